# Installs the package where it is missing (from the clone that this notebook lies in), then reads what to load:
#   DFLASH_MODEL, DFLASH_DRAFT_MODEL   folders or Hub ids of a real pair, such as Qwen/Qwen3.6-27B and its DFlash drafter
#   DFLASH_TP                          GPUs that share each layer (with a real pair: all that JAX sees)
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = next((p for p in (Path.cwd(), *Path.cwd().parents) if (p / "dflash_jax").is_dir()), None)
needed = [name for name in ("dflash_jax", "matplotlib", "optax") if importlib.util.find_spec(name) is None]
if needed:
    assert ROOT is not None, "start this notebook inside a clone of the repository"
    device = "cuda12" if shutil.which("nvidia-smi") else "cpu"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[{device},plots,train]"]
    subprocess.run(pip, check=True)
    sys.path.insert(0, str(ROOT))

get_ipython().run_line_magic("matplotlib", "inline")
import jax

MODEL, DRAFT_MODEL = os.environ.get("DFLASH_MODEL"), os.environ.get("DFLASH_DRAFT_MODEL")
TP = int(os.environ.get("DFLASH_TP", jax.local_device_count() if MODEL else 1))
print(f"{jax.local_device_count()} × {jax.devices()[0].device_kind}, jax {jax.__version__},", MODEL or "the bundled pair")

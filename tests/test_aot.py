"""The kernels compile for an NVIDIA GPU that is not in this machine, and the check that says so can fail.

It needs JAX's CUDA plug-in, so it runs in an environment of its own (`make aot-env`).
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pallas_kernels import aot, devices
from pallas_kernels.devices import GPUS

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("AOT_PYTHON", f"{sys.prefix}-aot/bin/python"))

# Two cases that no GPU of the table takes, in place of the real ones: too much shared memory for an A6000, and fp32
# products that spill where no entry of SPILLS says that they may.
BROKEN = """
import dataclasses, functools, sys
import jax.numpy as jnp
from pallas_kernels import aot
from pallas_kernels.tree_attention import shapes
from pallas_kernels.tree_attention.configs import config_for

def broken(kind):
    for label, name, dtype, change in (
        ("overflow", "qwen3.6-27b-64", jnp.bfloat16, {"num_stages": 4, "block_keys": 64}),
        ("spill", "qwen3.6-27b-64", jnp.float32, {}),
    ):
        shape = shapes.SHAPES[name]
        config = dataclasses.replace(config_for(kind, dtype, shape.head_dim, shape.query_rows), **change)
        call = functools.partial(shapes._call, scale=1.0, window=None, config=config)
        yield label, call, shape.arguments(dtype)

aot.all_cases = broken
sys.exit(aot.main())
"""


def gate(*words: str) -> tuple[int, list[dict], str]:
    """Runs python with `words` in the gate's environment: status, the JSON lines of stdout, stderr."""
    if not PYTHON.exists():
        pytest.fail(
            f"{PYTHON} is not there: run `make aot-env`, or name a python that has the CUDA plug-in in AOT_PYTHON"
        )
    done = subprocess.run(
        [PYTHON, *words, "--device", "a6000", "--json"], cwd=ROOT, text=True, capture_output=True, timeout=600,
        check=False,
    )  # fmt: skip
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_representative_kernels_fit_the_a6000() -> None:
    status, lines, errors = gate("-m", "pallas_kernels.aot", "--subset")
    assert status == 0, (lines, errors)
    *kernels, summary = lines
    assert summary["device"] == GPUS["a6000"].kind
    assert summary["failures"] == summary["spilling"] == 0
    assert summary["kernels"] == len(kernels)
    assert {kernel["name"] for kernel in kernels} == {
        "tree_attention", "tree_attention_merge", "gdn_tree_64", "gdn_commit", "gdn_chunk_prepare", "gdn_chunk_walk",
        "gdn_front", "gdn_gated_norm", "gdn_step", "add_norm", "scalars",
    }  # fmt: skip
    for kernel in kernels:
        assert kernel["shared_bytes"] <= GPUS["a6000"].shared_memory
        assert 16 <= kernel["registers"] <= 255


def test_a_whole_round_on_two_devices_compiles_and_is_held_to_its_limit(tmp_path: Path) -> None:
    """The real check is that of 64 layers (`make gate`); one layer of each kind shows what it says."""
    argv = ["-m", "benchmarks.whole_program", "--device", "a6000", "--tp", "2", "--layers", "4", "--context", "4096"]
    argv += ["--programs", "chain", "--limit", "0.5", "--json", str(tmp_path / "found.json")]
    done = subprocess.run([PYTHON, *argv], cwd=ROOT, text=True, capture_output=True, timeout=600, check=False)
    assert done.returncode == 1 and "FAILED: 2 x a6000: at most" in done.stdout, (done.stdout, done.stderr)
    found = json.loads((tmp_path / "found.json").read_text())
    chain = found["programs"]["chain"]
    # No table says for an A6000 which products the kernel serves better.
    assert chain["kernels"].pop("linear") == "xla"
    assert set(chain["kernels"].values()) == {"pallas"}
    # Two sums a layer, of target and drafter; two embeddings, fc and the normaliser, some of which travel together.
    assert 2 * (4 + 5) + 2 <= chain["all-reduce"] <= 2 * (4 + 5) + 6
    assert 0 < chain["all-gather"] <= 2
    # Weights, drafter and caches are the arguments, to within alignment and small things.
    parts = sum(found["parts"].values())
    assert parts * 0.99 <= chain["arguments"] <= parts * 1.01


@pytest.mark.skipif(find_spec("jax_cuda13_plugin") is not None, reason="this environment has the CUDA plug-in")
@pytest.mark.parametrize("module", ["benchmarks.whole_program", "pallas_kernels.aot"])
def test_without_the_plug_in_one_line_says_what_has_it(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--device", "a6000"], cwd=ROOT, text=True, capture_output=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and "make gate" in done.stderr


def test_overflow_and_unnamed_spills_fail() -> None:
    status, lines, errors = gate("-c", BROKEN)
    assert status == 1, (lines, errors)
    overflow, spill, summary = lines
    assert overflow["case"] == "overflow" and "Shared memory size limit exceeded" in overflow["failure"]
    assert spill["spill_bytes"] > 0 and "0 allowed" in spill["failure"]
    assert summary["failures"] == 2 and summary["spilling"] == 1


def test_a_filter_without_a_case_is_an_error() -> None:
    status, lines, errors = gate("-m", "pallas_kernels.aot", "--filter", "no such kernel")
    assert status == 2 and not lines
    assert errors.splitlines()[-1] == "--filter no such kernel: no case has this in its name"


def test_reports_of_ptxas_are_read() -> None:
    log = """ptxas warning : Registers are spilled in function 'b', 92 bytes spill stores, 96 bytes spill loads
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 400 bytes cmem[0]
ptxas info    : Function properties for b
    96 bytes stack frame, 92 bytes spill stores, 96 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 96 bytes cumulative stack size
"""
    assert aot.ptxas_reports(log) == {"a": (24, 0), "b": (255, 92)}


@pytest.mark.parametrize("name", GPUS)
def test_every_named_spill_is_of_a_real_case(name: str) -> None:
    cases = [case for case, _, _ in aot.all_cases(GPUS[name].kind)]
    kernels = (
        "tree_attention", "gdn_tree_32", "gdn_tree_64", "gdn_tree_128", "gdn_chunk_prepare", "gdn_chunk_walk", "linear",
    )  # fmt: skip
    for places, pattern, most, why in aot.SPILLS:
        assert set(places.split()) <= GPUS.keys() and most > 0 and why
        if name not in places.split():
            continue
        assert any(
            aot.allowed_spill(name, aot.Kernel(case, kernel, 0, 0, 0, 0.0)) == (most, why)
            for case in cases
            for kernel in kernels
        ), f"{pattern}: names nothing"


def test_without_the_plugin_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(devices.topologies, "get_topology_desc", missing)
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    with pytest.raises(RuntimeError, match="the CUDA plug-in of JAX is not installed"):
        devices.describe("a6000")

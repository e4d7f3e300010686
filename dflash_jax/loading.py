"""From model folders or Hub ids to an engine."""

import sys
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from dflash_jax.engine import Engine
from dflash_jax.errors import UserError
from dflash_jax.layers import join
from dflash_jax.sharding import make_mesh
from dflash_jax.tokenizer import Tokenizer
from pallas_kernels.dispatch import IMPLEMENTATIONS, Implementation, UnsupportedError, check_available

ASSETS = Path(__file__).parent / "assets"
BUNDLED_TARGET, BUNDLED_DRAFTER = ASSETS / "target", ASSETS / "drafter"
BUNDLED_PROMPTS = ASSETS / "prompts.json"  # of the held-out split

Dtype = Literal["auto", "bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = ("auto", "bfloat16", "float32")


def choose_dtype(dtype: Dtype, folder: Path) -> jnp.dtype:
    """The dtype of weights and activations: as asked, or the checkpoint's own on an accelerator, fp32 on a CPU.

    A CPU emulates bf16, which is slower than fp32 and no smaller where it counts.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    # `convert` builds on this package's modules, so it is imported where it is used.
    from convert import stored_dtype

    if dtype != "auto":
        return jnp.dtype(dtype)
    if jax.devices()[0].platform == "cpu":
        return jnp.dtype("float32")
    return stored_dtype(folder)


def load(
    model: str | Path | None = None,
    draft_model: str | Path | None = None,
    *,
    tp: int = 1,
    dtype: Dtype = "auto",
    max_model_len: int | None = None,
    max_slots: int = 8,
    kernels: Implementation = "auto",
    revision: str | None = None,
    progress: bool | None = None,
) -> Engine:
    """Loads a target with its own draft head, if the checkpoint has one, and, if given, its drafter.

    Args:
      model: a Hugging Face folder, an Orbax folder made by `python -m convert`, or a Hub id; None for the bundled
        target.
      draft_model: the same for the drafter; None for no drafter (for the bundled target: its own).
      tp: tensor-parallel devices.
      dtype: "auto", "bfloat16" or "float32".
      max_model_len: longest prompt + generated text; None for the model's own limit.
      max_slots: requests decoded at once.
      kernels: "auto", "xla" or "pallas".
      revision: of Hub ids.
      progress: loading bar on stderr; None only on a terminal.

    Raises:
      UserError: one line that names the file, key or flag and says what would be right.
    """
    from convert import load_drafter, load_mtp, load_target, resolve_model

    if kernels not in IMPLEMENTATIONS:
        raise UserError(f"--kernels must be one of {', '.join(IMPLEMENTATIONS)}, found {kernels!r}")
    try:
        check_available(kernels)
    except UnsupportedError as error:
        raise UserError(f"--kernels {kernels}: {error}") from None
    if model is None and draft_model is None:
        draft_model = BUNDLED_DRAFTER
    folder = resolve_model(str(model), revision) if model is not None else BUNDLED_TARGET
    kind = choose_dtype(dtype, folder)
    mesh = make_mesh(tp) if tp != 1 else None
    target_config, target = load_target(folder, kind, mesh, progress=progress)
    join(target, mesh)
    mtp = load_mtp(folder, kind, mesh, progress=progress)
    if mtp is not None:
        join(mtp, mesh)
    drafter = None
    if draft_model is not None:
        draft_folder = resolve_model(str(draft_model), revision)
        _, drafter, notes = load_drafter(draft_folder, target_config, kind, mesh, progress=progress)
        join(drafter, mesh)
        for note in notes:
            print(note, flush=True, file=sys.stderr)
    return Engine(
        target,
        drafter,
        Tokenizer.from_folder(folder),
        max_model_len=max_model_len,
        max_slots=max_slots,
        implementation=kernels,
        mtp=mtp,
        names=(str(model or "bundled"), None if draft_model is None else _name(draft_model)),
        mesh=mesh,
    )


def _name(draft_model: str | Path) -> str:
    return "bundled" if draft_model == BUNDLED_DRAFTER else str(draft_model)

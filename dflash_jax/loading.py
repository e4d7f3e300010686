"""From model folders or Hub ids to an engine."""

import sys
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from dflash_jax import memory_plan
from dflash_jax.engine import Engine
from dflash_jax.errors import UserError
from dflash_jax.layers import join
from dflash_jax.memory_plan import MemoryPlanner
from dflash_jax.sharding import check_divides, make_mesh
from pallas_kernels.dispatch import IMPLEMENTATIONS, Implementation, UnsupportedError, check_available

ASSETS = Path(__file__).parent / "assets"
BUNDLED_TARGET, BUNDLED_DRAFTER = ASSETS / "target", ASSETS / "drafter"
SMOLLM2_DRAFTER = ASSETS / "smollm2_drafter"  # of SmolLM2-135M-Instruct, which is not shipped
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

    What they and their caches take is planned first (see `dflash_jax.memory_plan`). Where the model's own length does
    not fit in memory, a shorter one is taken; where all slots do not fit at some length, fewer decode at once.

    Args:
      model: a Hugging Face folder, an Orbax folder made by `python -m convert`, a GGUF file, or a Hub id; None for the
        bundled target.
      draft_model: the same for the drafter; None for no drafter (for the bundled target: its own).
      tp: devices that share each layer; in a run of several processes (`jax.distributed`), all of them.
      dtype: "auto", "bfloat16" or "float32".
      max_model_len: longest prompt + generated text; None for the model's own limit.
      max_slots: requests decoded at once.
      kernels: "auto", "xla" or "pallas".
      revision: of Hub ids.
      progress: memory plan and loading bar on stderr; None only on a terminal.

    Raises:
      UserError: one line that names the file, key or flag and says what would be right.
    """
    from convert import load_drafter, load_mtp, load_target, load_tokenizer, resolve_model
    from convert.load import has_head, open_drafter, read_target_config

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
    mesh = make_mesh(tp) if tp != 1 or jax.process_count() > 1 else None
    target_config = read_target_config(folder)
    draft_folder, draft_config, notes = None, None, []
    if draft_model is not None:
        draft_folder = resolve_model(str(draft_model), revision)
        draft_config, _, _, notes = open_drafter(draft_folder, target_config)
    check_divides(target_config, draft_config, tp)
    limit = memory_plan.device_limit(jax.devices()[:1] if mesh is None else list(mesh.devices.flat))
    planner = MemoryPlanner(target_config, draft_config, kind.name, tp, limit, has_head(folder))
    own = target_config.max_position_embeddings
    length = planner.longest(own) if max_model_len is None else max_model_len
    plan = planner.fit(max_slots, length)
    if max_model_len is None and length < own:
        notes.append(f"the model's {own:,} tokens do not fit in device memory; --max-model-len is {length}")
        max_model_len = length
    if plan.slots < max_slots:
        notes.append(f"{plan.slots} of {max_slots} slots fit in device memory at {length:,} tokens each")
    if jax.process_index() == 0:
        for note in notes:
            print(note, flush=True, file=sys.stderr)
        if sys.stderr.isatty() if progress is None else progress:
            print(plan, flush=True, file=sys.stderr)
    _, target = load_target(folder, kind, mesh, progress=progress)
    join(target, mesh)
    mtp = load_mtp(folder, kind, mesh, progress=progress)
    if mtp is not None:
        join(mtp, mesh)
    drafter = None
    if draft_folder is not None:
        _, drafter, _ = load_drafter(draft_folder, target_config, kind, mesh, progress=progress)
        join(drafter, mesh)
    return Engine(
        target,
        drafter,
        load_tokenizer(folder),
        max_model_len=max_model_len,
        max_slots=max_slots,
        implementation=kernels,
        mtp=mtp,
        names=(str(model or "bundled"), None if draft_model is None else _name(draft_model)),
        mesh=mesh,
        memory=planner,
    )


def _name(draft_model: str | Path) -> str:
    return "bundled" if draft_model == BUNDLED_DRAFTER else str(draft_model)

"""Modules -> Hugging Face folders, as training writes them and as other programs read them."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from convert.keymap import HEAD, MTP_PREFIX, match_drafter, match_target, module_names
from convert.quantised import QUANTISATION
from convert.safetensors_source import INDEX, SINGLE
from dflash_jax.config import parse_drafter_config, parse_target_config
from dflash_jax.drafter import Drafter
from dflash_jax.errors import UserError
from dflash_jax.mtp import MTP
from dflash_jax.target import Target

MAX_SHARD_BYTES = 5_000_000_000
# Kept in float32 whatever the rest is cast to, as the modules keep them.
_FLOAT32_ENDINGS = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")


def tensor_name(parameter: str) -> str:
    """The name of a target's parameter in the text-only Hugging Face layout."""
    return parameter if parameter == HEAD or parameter.startswith(MTP_PREFIX) else f"model.{parameter}"


def save_target(
    folder: str | Path,
    config: dict[str, Any],
    module: Target,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    mtp: MTP | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes config.json and the weights of a target (`model.…`, `lm_head.weight`, `mtp.…`).

    Args:
      folder: made if need be; weights that lie in it are replaced, other files stay.
      config: the content of config.json; must describe `module`.
      module: the target.
      dtype: float32 or bfloat16; None keeps what the module has. The gates of the recurrence stay float32.
      mtp: the multi-token-prediction head, if there is one.
      max_shard_bytes: longest weight file; more than one comes with an index.

    Raises:
      UserError: config and module do not fit.
    """
    arrays = {tensor_name(name): leaf.get_value() for name, leaf in module_names(module).items()}
    if mtp is not None:
        arrays |= {MTP_PREFIX + name: leaf.get_value() for name, leaf in module_names(mtp).items()}
    source = str(Path(folder) / "config.json")
    match_target(
        parse_target_config(config, source=source), {name: a.shape for name, a in arrays.items()}, source
    )
    _write_plain(Path(folder), config, arrays, dtype, max_shard_bytes)


def save_drafter(
    folder: str | Path,
    config: dict[str, Any],
    module: Drafter,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes config.json and the weights of a drafter (no prefix); arguments as in `save_target`."""
    arrays = {name: leaf.get_value() for name, leaf in module_names(module).items()}
    source = str(Path(folder) / "config.json")
    drafter, _ = parse_drafter_config(config, source, arrays["fc.weight"].shape[1])
    match_drafter(drafter, {name: a.shape for name, a in arrays.items()}, source)
    _write_plain(Path(folder), config, arrays, dtype, max_shard_bytes)


def _stored(name: str, array: jax.Array, dtype: jax.typing.DTypeLike | None) -> np.dtype:
    kept = dtype is None or name.endswith(_FLOAT32_ENDINGS)
    stored = np.dtype(array.dtype if kept else jnp.dtype(dtype))
    if stored not in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
        raise UserError(f"{name}: cannot be written as {stored}; use float32 or bfloat16")
    return stored


def _groups(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
    """Splits tensors, in order, into files of at most `limit` bytes (a longer tensor gets a file of its own)."""
    group: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if group and filled + size > limit:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += size
    yield group


def _write_plain(
    folder: Path,
    config: dict[str, Any],
    arrays: dict[str, jax.Array],
    dtype: jax.typing.DTypeLike | None,
    max_shard_bytes: int,
) -> None:
    dtypes = {name: _stored(name, array, dtype) for name, array in arrays.items()}
    # What is written is not quantised, whatever it was made from.
    write_folder(folder, plain_config(config), arrays, dtypes, max_shard_bytes)


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json without what it says of quantised weights."""
    return {key: value for key, value in config.items() if key not in QUANTISATION}


def write_folder(
    folder: Path,
    config: dict[str, Any],
    arrays: Mapping[str, jax.Array | np.ndarray],
    dtypes: dict[str, np.dtype],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes config.json and tensors, each in its dtype: all of it or nothing. Arguments as in `save_target`."""
    sizes = {name: array.size * dtypes[name].itemsize for name, array in arrays.items()}
    groups = list(_groups(sizes, max_shard_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    files = [SINGLE] if len(groups) == 1 else [
        f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))
    ]  # fmt: skip
    # Everything is written beside the old files first: an interruption leaves the old model whole.
    pending: dict[Path, Path] = {}
    try:
        for file, names in zip(files, groups, strict=True):
            pending[folder / file] = temporary = folder / f".{file}.part"
            # One shard at a time on the host.
            tensors = {name: np.asarray(jax.device_get(arrays[name])).astype(dtypes[name]) for name in names}
            save_file(tensors, temporary, metadata={"format": "pt"})
        texts = {"config.json": config}
        if len(groups) > 1:
            weight_map = {name: file for file, names in zip(files, groups, strict=True) for name in names}
            texts[INDEX] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        for file, value in texts.items():
            pending[folder / file] = temporary = folder / f".{file}.part"
            temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for path, temporary in pending.items():
            os.replace(temporary, path)
    finally:
        for temporary in pending.values():
            temporary.unlink(missing_ok=True)
    stale = [p for p in folder.glob("model*.safetensors") if p.name not in files]
    stale += [folder / INDEX] if len(groups) == 1 else []
    for path in stale:
        path.unlink(missing_ok=True)

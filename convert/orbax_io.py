"""Orbax checkpoints: one flat tree of tensors under their Hugging Face names, with the model's small files beside it.

Orbax' v1 interface still moves between releases, so this is the only module that imports it for models.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from convert.source import Requests, TensorInfo, nbytes
from dflash_jax.errors import UserError

# Written by every Orbax v1 checkpoint. (`ocp.is_orbax_checkpoint` accepts any folder with JSON files in it.)
MARKER = "_CHECKPOINT_METADATA"
_NAMES = {np.dtype(jnp.bfloat16): "BF16", np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}
# A load call costs about 50 ms of bookkeeping and tells nothing before it ends: a few of them give a progress bar.
_GROUPS = 16
_CHUNK_BYTES = 64 << 20
# The small files that make a folder a model: configs, tokenizer, chat template, card, licence.
_SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md")
_NOT_COPIED = (".safetensors.index.json",)


def is_orbax(folder: Path) -> bool:
    """Whether a folder is an Orbax checkpoint."""
    return (folder / MARKER).is_file()


class OrbaxSource:
    """A folder written by `write`. Opening it reads metadata only."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            with _quiet():
                stored: Any = ocp.metadata(folder).metadata
        except Exception as error:  # Orbax documents no type for damaged checkpoints
            raise UserError(f"{folder}: Orbax cannot read this checkpoint ({_one_line(error)})") from None
        if stored is None:  # Orbax logs why and carries on
            raise UserError(f"{folder}: Orbax cannot read this checkpoint (damaged or incomplete)")
        if not isinstance(stored, dict) or not all(hasattr(leaf, "shape") for leaf in stored.values()):
            raise UserError(
                f"{folder}: not a model checkpoint; expected the flat tree that 'python -m convert' writes"
            )
        self.tensors = tuple(
            TensorInfo(name, tuple(leaf.shape), _NAMES.get(np.dtype(leaf.dtype), str(leaf.dtype)))
            for name, leaf in stored.items()
        )

    def read(self, requests: Requests, advance: Callable[[int], object]) -> Iterator[tuple[str, jax.Array]]:
        """See `Source.read`. Every device reads its own slices; Orbax casts."""
        # Orbax wants a sharding; where the caller has none, the default device is what JAX itself would take.
        default = jax.sharding.SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
        group: Requests = {}
        share = sum(map(nbytes, requests.values())) / _GROUPS
        last = next(reversed(requests), None)
        for name, leaf in requests.items():
            group[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default)
            size = sum(map(nbytes, group.values()))
            if size < share and name != last:
                continue
            # Tensors that are not wanted must be named as placeholders.
            tree = {info.name: group.get(info.name, ...) for info in self.tensors}
            try:
                with _quiet():
                    loaded = ocp.load(self.folder, tree)
            except Exception as error:
                raise UserError(
                    f"{self.folder}: Orbax cannot read this checkpoint ({_one_line(error)})"
                ) from None
            yield from ((name, loaded[name]) for name in group)
            advance(size)
            group = {}


def _storage() -> ocp.Context:
    """How tensors lie on disk: as they are, in chunks from which a device can read its own part."""
    context = ocp.Context()
    # Compression saved a third of the bytes of random bf16 weights, but writing took three times as long.
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    return context


@contextmanager
def _quiet() -> Generator[None]:
    """Keeps Orbax' warnings, which run over many lines, off stderr: what matters here becomes a `UserError`."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _one_line(error: Exception, length: int = 200) -> str:
    return " ".join(str(error).split())[:length]


def write(
    folder: Path, tensors: dict[str, jax.Array], model_folder: Path, *, overwrite: bool = False
) -> None:
    """Writes an Orbax model folder: all of it or nothing.

    Args:
      folder: where; must not exist unless `overwrite`.
      tensors: Hugging Face tensor name -> array.
      model_folder: where config.json, tokenizer and the other small files are copied from.
      overwrite: replace what is there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system, so that the last step is a rename.
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh, old = work / "new", work / "old"
        with _storage():
            ocp.save(fresh, tensors)
        for path in sorted(model_folder.iterdir()):
            wanted = path.suffix in _SIDE_SUFFIXES or path.name.startswith(("LICENSE", "NOTICE"))
            if (
                path.is_file()
                and wanted
                and not path.name.endswith(_NOT_COPIED)
                and not (fresh / path.name).exists()
            ):
                shutil.copyfile(path, fresh / path.name)
        if folder.exists():
            if not overwrite:
                raise UserError(f"{folder}: exists; name another folder or pass --overwrite")
            folder.rename(old)
        try:
            fresh.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)

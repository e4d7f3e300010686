"""A GGUF file: its metadata as plain Python values and its tensors as they lie in the file.

The package `gguf` (from llama.cpp, MIT) parses and dequantises; nothing else here imports it.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dflash_jax.errors import UserError

SUFFIX = ".gguf"
# Types that are no quantisation, by safetensors' names.
PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor: its type by ggml's name, its shape (rows first) and its bytes, a row of blocks a row.

    A one-dimensional tensor has no rows: its bytes are one row.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray

    def plain(self) -> np.ndarray | None:
        """The values, still in the file, where they are stored as floats; None where they are quantised."""
        if self.kind == "BF16":
            return self.data.view(jnp.bfloat16).reshape(self.shape)
        return self.data.reshape(self.shape) if self.kind in PLAIN else None

    def rows(self, which: slice | np.ndarray) -> Float[np.ndarray, "r *i"]:
        """Some rows in fp32."""
        from gguf import GGMLQuantizationType, quants

        plain = self.plain()
        if plain is not None:
            return plain[which].astype(np.float32)
        return quants.dequantize(np.ascontiguousarray(self.data[which]), GGMLQuantizationType[self.kind])


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """Attributes: path, metadata (key -> value or list), tensors in file order."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[StoredTensor, ...]

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own section, such as `block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return str(self.metadata.get("general.architecture"))


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that a path names: itself, or the one in a folder that is no other kind of model.

    Raises:
      UserError: a folder has several and nothing says which.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise UserError(f"{path}: {len(found)} GGUF files; name one of them: {', '.join(p.name for p in found[:4])}")
    return found[0] if found else None


def open_gguf(path: Path) -> GGUFFile:
    """Reads the header of a GGUF file; the tensors stay in it.

    Raises:
      UserError: the package `gguf` is missing, or the file is damaged, in parts, or has tensors of unknown types.
    """
    stat = path.stat()
    return _open(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=2)  # config, tokenizer and weights are read one after the other; parsing takes seconds
def _open(path: Path, changed: int, size: int) -> GGUFFile:
    del changed, size
    try:
        import gguf
    except ImportError:
        raise UserError(f"{path}: reading GGUF needs the package gguf: pip install gguf") from None
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = tuple(
            StoredTensor(t.name, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), t.data)
            for t in reader.tensors
        )
    except Exception as error:  # the parser has no errors of its own for damaged files
        raise UserError(f"{path}: not a readable GGUF file ({' '.join(str(error).split())[:200]})") from None
    if (metadata.get("split.count") or 1) > 1:
        raise UserError(f"{path}: one part of a split GGUF file; join the parts with 'llama-gguf-split --merge'")
    readable = {t.name for t in gguf.quants._type_traits} | set(PLAIN)
    unknown = sorted({t.kind for t in tensors} - readable)
    if unknown:
        raise UserError(f"{path}: tensors of type {', '.join(unknown)}, which the package gguf cannot dequantise")
    return GGUFFile(path, metadata, tensors)

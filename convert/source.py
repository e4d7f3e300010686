"""What a checkpoint on disk offers, whatever its format: names, shapes and dtypes first, then chosen tensors."""

import dataclasses
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import jax
from tqdm import tqdm

from convert.keymap import Shape, some
from dflash_jax.errors import UserError

# Where a parameter goes: nowhere in particular, one place for all, or a rule of (parameter name, shape).
Sharding = jax.sharding.Sharding | Callable[[str, Shape], jax.sharding.Sharding] | None
Requests = dict[str, jax.ShapeDtypeStruct]

# Names as safetensors spells them. Quantised dtypes mean something only together with their scales.
SUPPORTED_DTYPES = ("BF16", "F16", "F32")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: name, shape, and dtype by its safetensors name ("BF16", "F8_E4M3", …)."""

    name: str
    shape: Shape
    dtype: str


class Source(Protocol):
    """A checkpoint whose names are known and whose tensors are still on disk."""

    folder: Path
    tensors: tuple[TensorInfo, ...]

    def read(self, requests: Requests, advance: Callable[[int], object]) -> Iterator[tuple[str, jax.Array]]:
        """Yields the requested tensors one by one, cast to the dtype and placed on the sharding of each request.

        Args:
          requests: tensor name -> shape, dtype and (optional) sharding.
          advance: called with the bytes (as placed) of every tensor that is done.
        """
        ...


def shapes_of(source: Source) -> list[tuple[str, Shape]]:
    """The pairs that the key map takes."""
    return [(info.name, info.shape) for info in source.tensors]


def refuse_dtypes(source: Source, names: Iterable[str]) -> None:
    """Raises `UserError` listing those of `names` whose dtype cannot be cast to a weight."""
    names = set(names)
    bad = [
        f"{i.name} is {i.dtype}"
        for i in source.tensors
        if i.name in names and i.dtype not in SUPPORTED_DTYPES
    ]
    if bad:
        raise UserError(
            f"{source.folder}: unsupported dtype of {len(bad)} tensors: {some(bad)} "
            f"(supported: {', '.join(SUPPORTED_DTYPES)}; quantised weights need 'quantization_config' in config.json)"
        )


def place(name: str, leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """The request for one parameter: its shape and dtype with the sharding that the rule gives."""
    if callable(sharding) and not isinstance(sharding, jax.sharding.Sharding):
        sharding = sharding(name, leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@contextmanager
def progress_bar(total: int, text: str, show: bool | None) -> Generator[Callable[[int], object]]:
    """A bar of bytes on stderr; None shows it on a terminal only."""
    hidden = None if show is None else not show
    with tqdm(total=total, desc=text, unit="B", unit_scale=True, disable=hidden, file=sys.stderr) as bar:
        yield bar.update


def nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of the whole array."""
    return leaf.size * leaf.dtype.itemsize

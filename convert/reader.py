"""Tensors from files to their devices, a few at a time: what the formats of `Source` share.

Only the slices that this process' devices take are copied out, each once. A few tensors are read ahead of the one being
placed, so the host holds at most `READERS` tensors, in the dtype asked for, beside what it has mapped.
"""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.source import Requests, TensorInfo

# Tensors in host memory at once: read, or waiting for their devices. Four threads keep a solid-state disk busy.
READERS = 4
# Values of a tensor that are dequantised at a time, before they are cast.
_CHUNK_VALUES = 1 << 22


class Quantised:
    """A stored tensor that is dequantised when it is read, some rows at a time.

    Attributes:
      shape: of the dequantised tensor.
      rows: (start, stop) -> those rows in fp32.
    """

    def __init__(self, shape: tuple[int, ...], rows: Callable[[int, int], np.ndarray]):
        self.shape = shape
        self.rows = rows

    def copy(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """A part of the tensor; all of a row is computed for any part of it."""
        (start, stop, _), rest = index[0].indices(self.shape[0]), index[1:]
        size = [stop - start, *(len(range(*s.indices(n))) for s, n in zip(rest, self.shape[1:], strict=True))]
        out = np.empty(size, dtype)
        step = max(1, _CHUNK_VALUES // int(np.prod(self.shape[1:], dtype=np.int64)))
        for begin in range(start, stop, step):
            block = self.rows(begin, min(begin + step, stop))
            out[begin - start : begin - start + step] = block[(slice(None), *rest)]
        return out


class FileSource:
    """A `Source` whose tensors lie in mapped files; a format says where and how."""

    folder: Path
    tensors: tuple[TensorInfo, ...]

    def _view(self, name: str, shape: tuple[int, ...]) -> np.ndarray | Quantised:
        """A tensor as it lies in its file; pages are read when they are touched."""
        raise NotImplementedError

    def _place_of(self, name: str) -> Any:
        """A key that sorts tensors as they lie in their files."""
        raise NotImplementedError

    def read(self, requests: Requests, advance: Callable[[int], object]) -> Iterator[tuple[str, jax.Array]]:
        """See `Source.read`. In file order, so that a spinning disk or a network file system reads forward.

        At most `READERS` tensors (of this process' devices) are in host memory at once.
        """
        coming = iter(sorted(requests, key=self._place_of))
        window: collections.deque[tuple[str, Future[dict[_Span, np.ndarray]]]] = collections.deque()
        pool = ThreadPoolExecutor(READERS, "read-weights")
        try:
            while True:
                for name in itertools.islice(coming, READERS - len(window)):
                    window.append((name, pool.submit(self._parts, name, requests[name])))
                if not window:
                    return
                # Popped only when placed, and placed here: threads do not see the caller's default device.
                name, future = window[0]
                leaf = requests[name]
                array = _place(future.result(), leaf)
                window.popleft()
                del future
                yield name, array
                del array
                advance(leaf.size * leaf.dtype.itemsize)
        finally:
            pool.shutdown(cancel_futures=True)

    def _parts(self, name: str, leaf: jax.ShapeDtypeStruct) -> dict["_Span", np.ndarray]:
        """Copies of the parts of a tensor that this process' devices take, each once."""
        view = self._view(name, leaf.shape)
        indices: Iterable[tuple[slice, ...] | None] = [None]
        if leaf.sharding is not None:
            indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        return {
            span: _copy(view, tuple(slice(*ends) for ends in span), leaf.dtype)
            for span in {_span(index, leaf.shape) for index in indices}
        }


def _copy(view: np.ndarray | Quantised, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    if isinstance(view, Quantised):
        return view.copy(index, dtype)
    # np.array copies: an array on a CPU device may otherwise keep using the mapped file, which can change.
    return np.array(view[index], dtype=dtype, order="C")


# Where a part lies in its tensor: start and end along each axis.
_Span = tuple[tuple[int, int], ...]


def _span(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Span:
    index = index or (slice(None),) * len(shape)
    return tuple(axis.indices(length)[:2] for axis, length in zip(index, shape, strict=True))


def _place(parts: dict[_Span, np.ndarray], leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """The array, on its devices. Transfers are asynchronous; without waiting, the host would hold all on their way."""
    if leaf.sharding is None:
        (part,) = parts.values()
        return jax.device_put(part).block_until_ready()
    array = jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: parts[_span(index, leaf.shape)]
    )
    return array.block_until_ready()

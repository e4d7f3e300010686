"""The real shapes of the walk, by name: what tests, benchmarks and the compile check run."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tree_walk import kernel

ROWS = (1, 16, 32, 64, 128)
DEPTH, STOPS = 16, 2


def arguments(batch: int, rows: int) -> tuple[Any, ...]:
    """Abstract operands of `tree_walk`."""

    def array(dtype, *size):
        return jax.ShapeDtypeStruct((batch, *size), dtype)

    ids, flags, number = array(jnp.int32, rows), array(jnp.bool_, rows), array(jnp.int32)
    return (
        ids, ids, ids, ids, array(jnp.bool_, rows, rows), flags, ids, array(jnp.float32, rows),
        array(jnp.int32, STOPS), number, number, array(jnp.bool_), number, array(jnp.int32, DEPTH + 1),
    )  # fmt: skip


def cases(device_kind: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every shape; the launch is the same on every device."""
    del device_kind
    for rows in ROWS:
        depth = DEPTH if rows > 1 else 1
        for buckets in ((), (0, 15, 31, 63)):
            name = f"tree_walk/{rows}" + ("/buckets" if buckets else "")
            yield name, functools.partial(kernel.tree_walk, depth=depth, buckets=buckets), arguments(1, rows)

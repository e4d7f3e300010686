"""The real functions of scalars, by name: what tests, benchmarks and the compile check run."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax import steering
from pallas_kernels.scalars import kernel

BUDGETS = (0, 15, 31, 63)


def cases(device_kind: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every shape; the launch is the same on every device."""
    del device_kind
    k = len(BUDGETS)

    def array(size):
        return jax.ShapeDtypeStruct((size,), jnp.float32)

    known = steering.first_beliefs(k).size
    for index in (None, 0, k - 1):
        step = functools.partial(steering.step, index=index, budgets=BUDGETS)
        name = "start" if index is None else f"bucket{index}"
        arrays = (array(known), array(k), array(1), array(1 + 2 * k if index else 1))
        call = functools.partial(kernel.scalars, step, results=(known, 1), in_place=True)
        yield f"scalars/{name}", lambda *arrays, call=call: call(arrays), arrays

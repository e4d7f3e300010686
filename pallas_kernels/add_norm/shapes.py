"""The real shapes of the residual sum and its norm, by name: what tests, benchmarks and the compile check run."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.add_norm import kernel

# Width of the residual stream, and whether the norm is zero-centred.
MODELS: dict[str, tuple[int, bool]] = {
    "qwen3.6-27b": (5120, True), "qwen3-8b": (4096, False), "bundled": (256, True)
}  # fmt: skip
ROWS = (1, 16, 64, 2048)


def arguments(width: int, rows: int, dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Abstract x, update, weight."""
    x = jax.ShapeDtypeStruct((1, rows, width), dtype)
    return x, x, jax.ShapeDtypeStruct((width,), dtype)


def cases(device_kind: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every shape and dtype; the launch is the same on every device."""
    del device_kind
    for model, (width, centered) in MODELS.items():
        for dtype in (jnp.bfloat16, jnp.float32):
            function = functools.partial(kernel.add_norm, eps=1e-6, zero_centered=centered)
            for rows in ROWS:
                yield f"add_norm/{model}/{jnp.dtype(dtype).name}/{rows}", function, arguments(width, rows, dtype)

"""The real shapes of an attention layer's front, by name: what tests, benchmarks and the compile check run."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_front import kernel

# Query heads, key-value heads, head dim, half of the turning dims, gated, normed.
MODELS: dict[str, tuple[int, int, int, int, bool, bool]] = {
    "qwen3.6-27b": (24, 4, 256, 32, True, True), "qwen3.6-27b-tp2": (12, 2, 256, 32, True, True),
    "drafter": (32, 8, 128, 64, False, True), "smollm2": (9, 3, 64, 32, False, False),
}  # fmt: skip
ROWS = (1, 16, 64)


def arguments(model: str, rows: int, dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Abstract q, kv, gains, cos, sin."""
    heads, kv_heads, dim, half, gated, normed = MODELS[model]
    gain = jax.ShapeDtypeStruct((dim,), dtype) if normed else None
    angle = jax.ShapeDtypeStruct((1, rows, half), jnp.float32)
    q = jax.ShapeDtypeStruct((1, rows, heads * dim * (2 if gated else 1)), dtype)
    return q, jax.ShapeDtypeStruct((1, rows, 2 * kv_heads * dim), dtype), gain, gain, angle, angle


def cases(device_kind: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every shape and dtype; the launch is the same on every device."""
    del device_kind
    for model, (heads, kv_heads, dim, _, gated, _) in MODELS.items():
        for dtype in (jnp.bfloat16, jnp.float32):
            function = functools.partial(
                kernel.attention_front, heads=heads, kv_heads=kv_heads, head_dim=dim, gated=gated, eps=1e-6,
                zero_centered=True,
            )  # fmt: skip
            for rows in ROWS:
                yield f"attention_front/{model}/{jnp.dtype(dtype).name}/{rows}", function, arguments(model, rows, dtype)

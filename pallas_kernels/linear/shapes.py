"""The real shapes of products with weights, by name: what tests, benchmarks and the compile check run."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear import kernel
from pallas_kernels.linear.configs import config_for

# Product -> (columns, rows of the weights or of a half, SwiGLU), of models whole and on one of two devices.
PRODUCTS: dict[str, dict[str, tuple[int, int, bool]]] = {
    "qwen3.6-27b": {
        "in": (5120, 16480, False), "out": (6144, 5120, False), "q": (5120, 12288, False), "kv": (5120, 2048, False),
        "gate_up": (5120, 17408, True), "down": (17408, 5120, False), "head": (5120, 248320, False),
    },
    "qwen3.6-27b-tp2": {
        "in": (5120, 8240, False), "out": (3072, 5120, False), "gate_up": (5120, 8704, True),
        "down": (8704, 5120, False),
    },
    "smollm2": {
        "q": (576, 576, False), "gate_up": (576, 1536, True), "down": (1536, 576, False), "head": (576, 49152, False),
    },
    "bundled": {"in": (256, 1032, False), "gate_up": (256, 768, True), "down": (768, 256, False)},
}  # fmt: skip
ROWS = (1, 16, 64)
DTYPES = (jnp.bfloat16, jnp.float32)


def arguments(columns: int, out: int, swiglu: bool, rows: int, dtype: Any) -> tuple[Any, ...]:
    """Abstract x, weight, bias."""
    x = jax.ShapeDtypeStruct((1, rows, columns), dtype)
    weight = jax.ShapeDtypeStruct((out * (2 if swiglu else 1), columns), dtype)
    return x, weight, None


def cases(device_kind: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every shape and dtype; the launch is the same on every device."""
    del device_kind
    for model, products in PRODUCTS.items():
        for product, (columns, out, swiglu) in products.items():
            for dtype in DTYPES:
                for rows in ROWS:
                    config = config_for(out, columns, jnp.dtype(dtype).itemsize)
                    function = functools.partial(kernel.linear, swiglu=swiglu, dtype=dtype, config=config)
                    name = f"linear/{model}-{product}/{jnp.dtype(dtype).name}/{rows}"
                    yield name, function, arguments(columns, out, swiglu, rows, dtype)

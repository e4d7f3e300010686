"""The real shapes of tree attention, by name: what tests, benchmarks and the compile check run.

Heads and widths are those of the published `config.json` files; under tensor parallelism a device has its share of the
heads. Contexts are the capacity of the block table, the most that a slot may hold.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention import kernel
from pallas_kernels.tree_attention.configs import config_for

PAGE_SIZE = 64
# An operand's element count decides between 32- and 64-bit addresses, so compile with a cache of several layers.
LAYERS = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of the op.

    Attributes:
      heads, kv_heads, head_dim: query heads, key-value heads, and their width.
      rows: tree nodes, block rows or chunk tokens.
      context: capacity of a slot's block table in tokens.
      window: sliding window, or None.
      causal: causal rows (prefill) rather than a mask.
      batch: slots.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    context: int
    window: int | None = None
    causal: bool = False
    batch: int = 1

    @property
    def query_rows(self) -> int:
        """Query rows that share a key-value head."""
        return self.rows * (self.heads // self.kv_heads)

    def arguments(self, dtype: jax.typing.DTypeLike, layers: int = LAYERS) -> tuple[Any, ...]:
        """Abstract operands in the op's order: q, kv, mask, pages, layer, block_tables, lengths, positions."""
        struct = jax.ShapeDtypeStruct
        table = self.context // PAGE_SIZE
        pages = (layers, self.batch * table, PAGE_SIZE, 2, self.kv_heads, self.head_dim)
        return (
            struct((self.batch, self.rows, self.heads, self.head_dim), dtype),
            struct((self.batch, self.rows, 2, self.kv_heads, self.head_dim), dtype),
            None if self.causal else struct((self.batch, self.rows, self.rows), jnp.bool_),
            struct(pages, dtype),
            struct((), jnp.int32),
            struct((self.batch, table), jnp.int32),
            struct((self.batch,), jnp.int32),
            None if self.window is None else struct((self.batch, self.rows), jnp.int32),
        )


def _shapes() -> dict[str, Shape]:
    shapes = {}
    targets = {
        "qwen3.6-27b": (24, 4, 256, 262_144),
        "qwen3.6-27b-tp2": (12, 2, 256, 262_144),
        "qwen3-8b": (32, 8, 128, 40_960),
        "bundled": (4, 2, 64, 2048),
    }
    for name, (heads, kv_heads, dim, context) in targets.items():
        for rows in (1, 16, 64, 128):
            shapes[f"{name}-{rows}"] = Shape(heads, kv_heads, dim, rows, context)
        shapes[f"{name}-prefill"] = Shape(heads, kv_heads, dim, 512, context, causal=True)
    shapes["qwen3.6-27b-64-batch8"] = Shape(24, 4, 256, 64, 32_768, batch=8)
    # The drafters: a block of 16, all of the context or a window of it.
    shapes["drafter"] = Shape(32, 8, 128, 16, 262_144)
    shapes["drafter-window"] = Shape(32, 8, 128, 16, 262_144, window=2048)
    shapes["drafter-tp2"] = Shape(16, 4, 128, 16, 262_144)
    shapes["bundled-drafter"] = Shape(4, 2, 64, 16, 2048)
    return shapes


SHAPES: dict[str, Shape] = _shapes()

# Context lengths at which a shape is timed: short, long, and the longest that is promised.
TIMED_LENGTHS: dict[str, tuple[int, ...]] = {
    "qwen3.6-27b-64": (1024, 32_768, 131_072),
    "qwen3.6-27b-16": (1024, 32_768),
    "qwen3.6-27b-1": (1024, 32_768),
    "qwen3.6-27b-prefill": (8192,),
    "drafter": (8192, 32_768),
    "drafter-window": (32_768,),
    "bundled-1": (512,),
    "bundled-64": (512,),
    "bundled-drafter": (512,),
}


def _call(q, kv, mask, pages, layer, block_tables, lengths, positions, **options):
    """The op with its arrays in one row, as `Shape.arguments` has them."""
    return kernel.tree_attention(
        q, kv, mask, pages, layer, block_tables, lengths, positions=positions, **options
    )


def cases(device_kind: str) -> Iterator[tuple[str, Callable[..., jax.Array], tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every shape and dtype, in the config that `device_kind` gets."""
    for name, shape in SHAPES.items():
        for dtype in (jnp.bfloat16, jnp.float32):
            config = config_for(device_kind, dtype, shape.head_dim, shape.query_rows)
            function = functools.partial(
                _call, scale=shape.head_dim**-0.5, window=shape.window, config=config
            )
            yield f"tree_attention/{name}/{jnp.dtype(dtype).name}", function, shape.arguments(dtype)

"""The real shapes of the delta rule and what surrounds it, by name: what tests, benchmarks and the compile check run.

Heads and widths are those of the published `config.json` files; under tensor parallelism a device has its share.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ancestry import packed
from pallas_kernels.gdn_mixer import kernel as mixer_kernel
from pallas_kernels.gdn_mixer.configs import front_config, norm_config
from pallas_kernels.gdn_scan import chunk_kernel, commit_kernel, path_kernel, step_kernel, tree_kernel
from pallas_kernels.gdn_scan.configs import table_for

CONV_WIDTH = 4
TREE_ROWS = (1, 16, 32, 64, 128)
PATH_LENGTH = 16
NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Heads:
    """The linear layers of one model on one device.

    Attributes: key_heads, value_heads, dim (of keys and of values), layers.
    """

    key_heads: int
    value_heads: int
    dim: int
    layers: int

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return (2 * self.key_heads + self.value_heads) * self.dim

    @property
    def projected(self) -> int:
        """Columns of the joined projection: channels, gates, strengths and decays."""
        return self.channels + self.value_heads * (self.dim + 2)


MODELS: dict[str, Heads] = {
    "qwen3.6-27b": Heads(16, 48, 128, 48),
    "qwen3.6-27b-tp2": Heads(8, 24, 128, 48),
    "bundled": Heads(2, 4, 64, 12),
}
PREFILL_ROWS: dict[str, tuple[int, ...]] = {
    "qwen3.6-27b": (512, 8192), "qwen3.6-27b-tp2": (512, 8192), "bundled": (128, 2048),
}  # fmt: skip
# Rows at which the tree rule and what surrounds it are timed.
TIMED_ROWS: dict[str, tuple[int, ...]] = {"qwen3.6-27b": (1, 16, 32, 64), "bundled": (16,)}

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def row_arguments(heads: Heads, rows: int, dtype: jax.typing.DTypeLike, batch: int = 1) -> tuple[Any, ...]:
    """Abstract q, k, v, beta, and g or path sums, of the delta rule."""
    struct = jax.ShapeDtypeStruct
    keys = struct((batch, rows, heads.key_heads, heads.dim), dtype)
    gate = struct((batch, rows, heads.value_heads), jnp.float32)
    return keys, keys, struct((batch, rows, heads.value_heads, heads.dim), dtype), gate, gate


def masks(rows: int, batch: int = 1) -> jax.ShapeDtypeStruct:
    """Abstract mask of ancestors, packed."""
    return jax.eval_shape(packed, jax.ShapeDtypeStruct((batch, rows, rows), jnp.bool_))


def states(heads: Heads, batch: int = 1) -> jax.ShapeDtypeStruct:
    """Abstract states of all layers."""
    shape = (heads.layers, batch, heads.value_heads, heads.dim, heads.dim)
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def commit_arguments(heads: Heads, rows: int, dtype: jax.typing.DTypeLike, batch: int = 1) -> tuple[Any, ...]:
    """Abstract state, k, u, path_decay, path, count of the commit."""
    struct = jax.ShapeDtypeStruct
    lead = (heads.layers, batch, rows)
    return (
        states(heads, batch),
        struct((*lead, heads.key_heads, heads.dim), dtype),
        struct((*lead, heads.value_heads, heads.dim), jnp.float32),
        struct((*lead, heads.value_heads), jnp.float32),
        struct((batch, PATH_LENGTH), jnp.int32),
        struct((batch,), jnp.int32),
    )


def front_arguments(
    heads: Heads, rows: int, dtype: jax.typing.DTypeLike, *, causal: bool, batch: int = 1
) -> tuple[Any, ...]:
    """Abstract layer, inputs, window, taps, weight, strength, decay, a_log, dt_bias, valid, mask of the front's kernel.

    Inputs, strength and decay are one joined projection, as in the model.
    """
    struct = jax.ShapeDtypeStruct
    projected = struct((batch, rows, heads.projected), dtype)
    parameter = struct((heads.value_heads,), jnp.float32)
    return (
        struct((1,), jnp.int32), projected,
        struct((heads.layers, batch, CONV_WIDTH - 1, heads.channels), dtype),
        None if causal else struct((batch, rows, CONV_WIDTH - 1), jnp.int32),
        struct((heads.channels, 1, CONV_WIDTH), dtype),
        projected, projected, parameter, parameter, struct((batch, rows), jnp.bool_),
        None if causal or rows == 1 else masks(rows, batch),
    )  # fmt: skip


def norm_arguments(heads: Heads, rows: int, dtype: jax.typing.DTypeLike, batch: int = 1) -> tuple[Any, ...]:
    """Abstract x, z, weight of the gated norm; z is the joined projection."""
    struct = jax.ShapeDtypeStruct
    x = struct((batch, rows, heads.value_heads, heads.dim), jnp.float32)
    return x, struct((batch, rows, heads.projected), dtype), struct((heads.dim,), jnp.float32)


def cases(device_kind: str) -> Iterator[Case]:
    """(name, function, abstract arguments) of every kernel, shape and dtype, in the config that `device_kind` gets."""
    part = functools.partial
    for model, heads in MODELS.items():
        for dtype in (jnp.bfloat16, jnp.float32):
            table, kind = table_for(device_kind, dtype), f"{model}/{jnp.dtype(dtype).name}"
            commit = part(commit_kernel.commit_path, config=table.commit)
            starts = heads.projected - 2 * heads.value_heads, heads.projected - heads.value_heads
            front = part(
                mixer_kernel.gdn_front, key_heads=heads.key_heads, key_dim=heads.dim, starts=starts
            )
            norm = part(mixer_kernel.gated_norm, eps=NORM_EPS, start=heads.channels)
            step = part(step_kernel.step_delta_rule, config=table.step)
            place = jax.ShapeDtypeStruct((1,), jnp.int32)
            yield f"gdn_step/{kind}", step, (*row_arguments(heads, 1, dtype), states(heads), place)
            for rows in TREE_ROWS:
                tree = part(tree_kernel.tree_delta_rule, config=table.tree[tree_kernel.padded(rows)])
                ancestors = masks(rows)
                operands = (*row_arguments(heads, rows, dtype), states(heads), place, ancestors)
                yield f"gdn_tree/{kind}/{rows}", tree, operands
            if heads.value_heads * heads.dim <= table.paths:
                tree = part(path_kernel.tree_delta_rule, config=table.tree[PATH_LENGTH])
                paths = jax.ShapeDtypeStruct((1, 32, PATH_LENGTH), jnp.int32)
                yield f"gdn_paths/{kind}/32", tree, (*row_arguments(heads, 32, dtype), states(heads), place, paths)
            yield f"gdn_commit/{kind}", commit, commit_arguments(heads, 64, dtype)
            for rows in PREFILL_ROWS[model]:
                chunk = part(chunk_kernel.chunk_delta_rule, config=table.chunk)
                state = jax.ShapeDtypeStruct(states(heads).shape[1:], jnp.float32)
                yield f"gdn_chunk/{kind}/{rows}", chunk, (*row_arguments(heads, rows, dtype), state)
            for rows, causal in ((1, False), (16, False), (64, False), (PREFILL_ROWS[model][-1], True)):
                mixed = part(front, config=front_config(device_kind, rows))
                operands = front_arguments(heads, rows, dtype, causal=causal)
                yield f"gdn_front/{kind}/{rows}", mixed, operands
                normed = part(norm, config=norm_config(device_kind, rows * heads.value_heads))
                yield f"gdn_norm/{kind}/{rows}", normed, norm_arguments(heads, rows, dtype)

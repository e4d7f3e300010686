"""Pallas Triton kernel of the commit: all layers at once, in place, one read and one write of every state.

One program a (layer and slot, value head, block of value dims). The rows of the path are fetched by their numbers, so
nothing is gathered beforehand. A slot without accepted rows is left alone: no load, no store, its bits stay.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import compiled_once
from pallas_kernels.gdn_scan.configs import CommitConfig
from pallas_kernels.gdn_scan.dots import dot
from pallas_kernels.gdn_scan.tree_kernel import padded


def _kernel(
    state_ref,  # [L, B, Hv, dk, dv]
    k_ref,  # [L, B, N, Hk, dk]
    u_ref,  # [L, B, N, Hv, dv]
    total_ref,  # [L, B, N, Hv]
    path_ref,  # [B, D]
    count_ref,  # [B]
    new_ref,  # the same memory as state_ref
    *,
    config: CommitConfig,
    interpret: bool,
):
    _, slots, value_heads, key_dim, _ = state_ref.shape
    rows, key_heads = k_ref.shape[2:4]
    length = path_ref.shape[1]
    part, head = pl.program_id(0), pl.program_id(1)
    layer, slot = pl.program_id(2) // slots, pl.program_id(2) % slots
    key_head = head // (value_heads // key_heads)
    count = jnp.minimum(count_ref[slot], length)

    @pl.when(count > 0)
    def _():
        key_dims = jnp.arange(key_dim)
        value_dims = part * config.block_dv + jnp.arange(config.block_dv)
        cell = (layer, slot, head, key_dims[:, None], value_dims[None, :])
        state = state_ref[cell]

        place = jnp.arange(padded(length))
        used = place < count
        row = plgpu.load(path_ref.at[slot, jnp.minimum(place, length - 1)], mask=used, other=0)
        row = jnp.clip(row, 0, rows - 1)
        last_row = jnp.clip(path_ref[slot, count - 1], 0, rows - 1)

        def rows_of(ref, head, dims):
            mask = jnp.broadcast_to(used[:, None], (row.shape[0], dims.shape[0]))
            return plgpu.load(ref.at[layer, slot, row[:, None], head, dims[None, :]], mask=mask, other=0)

        keys = rows_of(k_ref, key_head, key_dims)
        fresh = rows_of(u_ref, head, value_dims)
        total = plgpu.load(total_ref.at[layer, slot, row, head], mask=used, other=0.0)
        last = total_ref[layer, slot, last_row, head]
        # The share goes to the fp32 side, so that bf16 keys stay exact operands.
        share = jnp.exp(jnp.where(used, last - total, -jnp.inf))
        update = dot(keys, share[:, None] * fresh, config.dot, contract=(0, 0), interpret=interpret)
        new_ref[cell] = jnp.exp(last) * state + update


@compiled_once("config", "interpret")
def commit_path(
    state: Float[Array, "L B Hv dk dv"],
    k: Float[Array, "L B N Hk dk"],
    u: Float[Array, "L B N Hv dv"],
    path_decay: Float[Array, "L B N Hv"],
    path: Int[Array, "B D"],
    count: Int[Array, " B"],
    *,
    config: CommitConfig,
    interpret: bool = False,
) -> Float[Array, "L B Hv dk dv"]:
    """See `pallas_kernels.gdn_scan.api.commit_path`. In place if the caller donates `state`."""
    layers, slots, value_heads, _, value_dim = state.shape
    config = config.fit(value_dim)
    return pl.pallas_call(
        functools.partial(_kernel, config=config, interpret=interpret),
        grid=(value_dim // config.block_dv, value_heads, layers * slots),
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="gdn_commit",
    )(state, k, u, path_decay, path, count)

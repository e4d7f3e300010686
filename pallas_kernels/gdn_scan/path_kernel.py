"""Pallas Triton kernel of the tree form, path by path: one program a (path, value head, block of value dims).

What a row gets depends on its ancestors alone, so a tree is the paths from its root to the rows without children, and
each is a chain. A program takes the rows of one and computes what `tree_kernel` does for a chain, without waiting for
another tile of rows. Rows that several paths have are computed by each, which takes no time while there are fewer
programs than multiprocessors can hold: for heads that are few and narrow. One of the paths has a row as its own and
stores it. Since a row's place in a path is its depth, its results are those of a chain to the last bit.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ancestry import LENGTH, SHARED
from pallas_kernels.dispatch import compiled_once
from pallas_kernels.gdn_scan.configs import TreeConfig
from pallas_kernels.gdn_scan.dots import dot, held_back, unit_lower_solve


def _kernel(
    layer_ref,  # [1]
    q_ref,  # [B, N, Hk, dk]
    k_ref,  # [B, N, Hk, dk]
    v_ref,  # [B, N, Hv, dv]
    beta_ref,  # [B, N, Hv]
    total_ref,  # [B, N, Hv]
    state_ref,  # [L, B, Hv, dk, dv]
    paths_ref,  # [B, N, P]
    out_ref,  # [B, N, Hv, dv]
    u_ref,  # [B, N, Hv, dv]
    *,
    config: TreeConfig,
    interpret: bool,
):
    batch, rows, key_heads, key_dim = q_ref.shape
    value_heads, size = v_ref.shape[2], paths_ref.shape[2]
    part, head, number = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    slot, path = number // rows, number % rows
    key_head = head // (value_heads // key_heads)
    product = functools.partial(dot, mode=config.dot, largest_first=True, interpret=interpret)
    depth = jnp.arange(size)
    # Always so, but a compiler does not know. It would put off what it may read at any time until the branch is taken,
    # and then the length, the rows' numbers and the rows are waited for one after another.
    here, first = slot < batch, jnp.int32(0)
    entry = plgpu.load(paths_ref.at[slot, path, depth], mask=jnp.broadcast_to(here, (size,)))
    length = plgpu.load(paths_ref.at[slot, path, first], mask=here) >> LENGTH
    layer = plgpu.load(layer_ref.at[first], mask=here)

    @pl.when(length > 0)
    def _():
        live = depth < length
        index = jnp.where(live, entry & (SHARED - 1), 0)
        value_dims = part * config.block_dv + jnp.arange(config.block_dv)
        key_dims = jnp.arange(key_dim)

        def rows_of(ref, head, dims):
            mask = jnp.broadcast_to(live[:, None], (size, dims.shape[0]))
            return plgpu.load(ref.at[slot, index[:, None], head, dims[None, :]], mask=mask, other=0)

        total, beta = (plgpu.load(ref.at[slot, index, head], mask=live, other=0.0) for ref in (total_ref, beta_ref))
        values = rows_of(v_ref, head, value_dims)
        keys, queries = rows_of(k_ref, key_head, key_dims), rows_of(q_ref, key_head, key_dims)
        state = state_ref[layer, slot, head, key_dims[:, None], value_dims[None, :]]
        keys = held_back(keys, live)
        similar, read_k = product(keys, keys, contract=(1, 1)), product(keys, state)
        scores, read_q = product(queries, keys, contract=(1, 1)), product(queries, state)

        row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
        # Masked before exp: above the diagonal the difference is positive and may overflow.
        sees = (column <= row) & live[:, None]
        decay = jnp.exp(jnp.where(sees, total[:, None] - total[None, :], -jnp.inf))
        rise = jnp.exp(total)[:, None]
        right = beta[:, None] * (values.astype(jnp.float32) - rise * read_k)
        coupling = beta[:, None] * decay * similar
        u = unit_lower_solve(coupling, right, row, column, config.dot, interpret=interpret)
        out = product(decay * scores, u, onto=rise * read_q)

        own = live & (entry & SHARED == 0)
        # Elsewhere where masked: two rows of one store must not name the same place.
        cell = (slot, jnp.where(own, index, rows + depth)[:, None], head, value_dims[None, :])
        stored = jnp.broadcast_to(own[:, None], (size, config.block_dv))
        plgpu.store(u_ref.at[cell], u, mask=stored)
        plgpu.store(out_ref.at[cell], key_dim**-0.5 * out, mask=stored)


@compiled_once("config", "interpret")
def tree_delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    beta: Float[Array, "B N Hv"],
    path_decay: Float[Array, "B N Hv"],
    state: Float[Array, "L B Hv dk dv"],
    layer: Int[Array, " 1"],
    paths: Int[Array, "B N P"],
    *,
    config: TreeConfig,
    interpret: bool = False,
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B N Hv dv"]]:
    """See `pallas_kernels.gdn_scan.api.tree_delta_rule`.

    `state` is that of all layers, `layer` which to read. P is a power of two of at least 16.
    """
    batch, rows, value_heads, value_dim = v.shape
    config = config.fit(q.shape[3], value_dim)
    rows_shape = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, config=config, interpret=interpret),
        grid=(value_dim // config.block_dv, value_heads, batch * rows),
        out_shape=(rows_shape, rows_shape),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name=f"gdn_paths_{paths.shape[2]}",
    )(layer, q, k, v, beta, path_decay, state, paths)

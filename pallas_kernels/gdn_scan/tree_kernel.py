"""Pallas Triton kernel of the tree form: one program a (slot, value head, block of value dims), one launch.

A program loads its head's keys and queries, reads its block of the committed state once, and does the rest in
registers and shared memory: path sums, decays, the N × N inverse, the innovations and the outputs. Programs of one
head repeat the inverse. That costs no time while there are fewer programs than multiprocessors can hold, and a kernel
of its own for the inverse would cost a launch and a trip through memory.

Rows are padded to a power of two that a matrix unit takes (16, 32, 64, 128). Padding rows are their own nobody: no
ancestors, zero keys and values, hence zero innovations. They are never loaded nor stored.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gdn_scan.configs import TreeConfig
from pallas_kernels.gdn_scan.dots import dot, unit_lower_inverse

MAX_ROWS = 128


def padded(rows: int) -> int:
    """Rows of the matrices that a kernel multiplies: the next power of two, at least 16."""
    return max(16, 1 << max(rows - 1, 0).bit_length())


def _kernel(
    layer_ref,  # [1]
    q_ref,  # [B, N, Hk, dk]
    k_ref,  # [B, N, Hk, dk]
    v_ref,  # [B, N, Hv, dv]
    beta_ref,  # [B, N, Hv]
    g_ref,  # [B, N, Hv]
    state_ref,  # [L, B, Hv, dk, dv]
    ancestors_ref,  # [B, N, N]
    out_ref,  # [B, N, Hv, dv]
    u_ref,  # [B, N, Hv, dv]
    total_ref,  # [B, N, Hv]
    *,
    config: TreeConfig,
    interpret: bool,
):
    _, rows, key_heads, key_dim = q_ref.shape
    value_heads = v_ref.shape[2]
    size = padded(rows)
    part, head, slot = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key_head = head // (value_heads // key_heads)
    mode = config.dot
    product = functools.partial(dot, mode=mode, interpret=interpret)

    place = jnp.arange(size)
    live = place < rows
    # In bounds even where masked: an interpreter reads before it masks.
    index = jnp.minimum(place, rows - 1)
    value_dims = part * config.block_dv + jnp.arange(config.block_dv)
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)

    def rows_of(ref, head, dims):
        mask = jnp.broadcast_to(live[:, None], (size, dims.shape[0]))
        return plgpu.load(ref.at[slot, index[:, None], head, dims[None, :]], mask=mask, other=0)

    g = plgpu.load(g_ref.at[slot, index, head], mask=live, other=0.0)
    beta = plgpu.load(beta_ref.at[slot, index, head], mask=live, other=0.0)
    seen = live[:, None] & live[None, :]
    mask = plgpu.load(ancestors_ref.at[slot, index[:, None], index[None, :]], mask=seen, other=0) != 0
    layer = layer_ref[0]

    def key_block(i, carry):
        # All products over key dims in one sweep: operands of all of them at once would not fit the registers.
        similar, scores, read_k, read_q = carry
        dims = i * config.block_dk + jnp.arange(config.block_dk)
        keys, queries = rows_of(k_ref, key_head, dims), rows_of(q_ref, key_head, dims)
        state = state_ref[layer, slot, head, dims[:, None], value_dims[None, :]]
        if rows > 1:
            similar += product(keys, keys, contract=(1, 1))
        scores += product(queries, keys, contract=(1, 1))
        return similar, scores, read_k + product(keys, state), read_q + product(queries, state)

    square, tall = jnp.zeros((size, size), jnp.float32), jnp.zeros((size, config.block_dv), jnp.float32)
    similar, scores, read_k, read_q = jax.lax.fori_loop(
        0, key_dim // config.block_dk, key_block, (square, square, tall, tall)
    )

    total = jnp.sum(jnp.where(mask, jnp.broadcast_to(g[None, :], (size, size)), 0.0), axis=1)
    # Masked before exp: off the path the difference may be positive and overflow.
    decay = jnp.exp(jnp.where(mask, total[:, None] - total[None, :], -jnp.inf))
    rise = jnp.exp(total)[:, None]
    values = rows_of(v_ref, head, value_dims).astype(jnp.float32)
    u = beta[:, None] * (values - rise * read_k)
    if rows > 1:
        a = jnp.where(row == column, 0.0, beta[:, None] * decay * similar)
        u = product(unit_lower_inverse(a, row, column, mode, interpret=interpret), u)
    out = key_dim**-0.5 * (rise * read_q + product(decay * scores, u))

    stored = jnp.broadcast_to(live[:, None], (size, config.block_dv))
    # Unclamped: two rows of one store must not name the same place, even where one is masked.
    cell = (slot, place[:, None], head, value_dims[None, :])
    plgpu.store(u_ref.at[cell], u, mask=stored)
    plgpu.store(out_ref.at[cell], out, mask=stored)
    # One program a head writes the path sums.
    plgpu.store(total_ref.at[slot, place, head], total, mask=live & (part == 0))


def tree_delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    beta: Float[Array, "B N Hv"],
    g: Float[Array, "B N Hv"],
    state: Float[Array, "L B Hv dk dv"],
    layer: Int[Array, " 1"],
    ancestors: Bool[Array, "B N N"],
    *,
    config: TreeConfig,
    interpret: bool = False,
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B N Hv dv"], Float[Array, "B N Hv"]]:
    """See `pallas_kernels.gdn_scan.api.tree_delta_rule`; `state` is that of all layers, `layer` which to read."""
    batch, rows, value_heads, value_dim = v.shape
    config = config.fit(q.shape[3], value_dim)
    rows_shape = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, config=config, interpret=interpret),
        grid=(value_dim // config.block_dv, value_heads, batch),
        out_shape=(rows_shape, rows_shape, jax.ShapeDtypeStruct(g.shape, jnp.float32)),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name=f"gdn_tree_{padded(rows)}",
    )(layer, q, k, v, beta, g, state, ancestors)

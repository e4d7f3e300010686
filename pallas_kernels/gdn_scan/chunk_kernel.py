"""Pallas Triton kernels of the chunk rule (prefill): two launches.

The first is parallel over chunks: the inverse of a chunk's I + A and its masked scores, both C × C. The second walks
the chunks of one (slot, value head, block of value dims) with the state in registers:

    u = T·β(V − e^G K S);   O = scale·(e^G Q S + P·u);   S ← e^{G_last} S + Kᵀ (e^{G_last − G} u)

Handing over T and P, and not T·βV and T·βe^G K as is usual, halves the bytes between the two and keeps keys and queries
as they came: exact operands where a model is bf16. T and P are fp32: in bf16 they would leave 2 % of error in a state
written again and again under one key.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import compiled_once
from pallas_kernels.gdn_scan.configs import ChunkConfig
from pallas_kernels.gdn_scan.dots import dot, unit_lower_inverse


def _prepare_kernel(
    q_ref,  # [B, N, Hk, dk]
    k_ref,  # [B, N, Hk, dk]
    beta_ref,  # [B, N, Hv]
    g_ref,  # [B, N, Hv]
    inverse_ref,  # [B, Hv, chunks, C, C]
    scores_ref,  # [B, Hv, chunks, C, C]
    *,
    config: ChunkConfig,
    interpret: bool,
):
    _, rows, key_heads, key_dim = q_ref.shape
    size, block = config.chunk, config.prepare_block_dk
    chunk, head, slot = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key_head = head // (beta_ref.shape[2] // key_heads)
    product = functools.partial(dot, mode=config.dot, interpret=interpret)

    place = chunk * size + jnp.arange(size)
    live = place < rows
    # In bounds even where masked: an interpreter reads before it masks.
    index = jnp.minimum(place, rows - 1)
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    g = plgpu.load(g_ref.at[slot, index, head], mask=live, other=0.0)
    beta = plgpu.load(beta_ref.at[slot, index, head], mask=live, other=0.0)

    def key_block(i, carry):
        similar, scores = carry
        dims = i * block + jnp.arange(block)
        cell = (slot, index[:, None], key_head, dims[None, :])
        mask = jnp.broadcast_to(live[:, None], (size, block))
        keys = plgpu.load(k_ref.at[cell], mask=mask, other=0)
        queries = plgpu.load(q_ref.at[cell], mask=mask, other=0)
        similar += product(keys, keys, contract=(1, 1))
        return similar, scores + product(queries, keys, contract=(1, 1))

    square = jnp.zeros((size, size), jnp.float32)
    similar, scores = jax.lax.fori_loop(0, key_dim // block, key_block, (square, square))
    total = jnp.cumsum(g)
    # Masked before exp: above the diagonal the difference is positive and could overflow.
    decay = jnp.exp(jnp.where(row >= column, total[:, None] - total[None, :], -jnp.inf))
    inverse = unit_lower_inverse(
        beta[:, None] * decay * similar, row, column, config.dot, interpret=interpret
    )
    cell = (slot, head, chunk, row, column)
    inverse_ref[cell] = inverse
    scores_ref[cell] = decay * scores


def _walk_kernel(
    q_ref,  # [B, N, Hk, dk]
    k_ref,  # [B, N, Hk, dk]
    v_ref,  # [B, N, Hv, dv]
    beta_ref,  # [B, N, Hv]
    g_ref,  # [B, N, Hv]
    inverse_ref,  # [B, Hv, chunks, C, C]
    scores_ref,  # [B, Hv, chunks, C, C]
    state_ref,  # [B, Hv, dk, dv]
    out_ref,  # [B, N, Hv, dv]
    final_ref,  # [B, Hv, dk, dv]
    *,
    config: ChunkConfig,
    interpret: bool,
):
    _, rows, key_heads, key_dim = q_ref.shape
    size, block = config.chunk, min(config.block_dk, key_dim)
    part, head, slot = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key_head = head // (v_ref.shape[2] // key_heads)
    product = functools.partial(dot, mode=config.dot, interpret=interpret)
    value_dims = part * config.block_dv + jnp.arange(config.block_dv)
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None, :]

    # The state is cut along its key dims: operands of all of them at once would not fit the registers.
    blocks = [b * block + jnp.arange(block) for b in range(key_dim // block)]
    cells = [(slot, head, dims[:, None], value_dims[None, :]) for dims in blocks]

    def walk(chunk, states):
        place = chunk * size + jnp.arange(size)
        live = place < rows
        index = jnp.minimum(place, rows - 1)

        def rows_of(ref, head, dims):
            mask = jnp.broadcast_to(live[:, None], (size, dims.shape[0]))
            return plgpu.load(ref.at[slot, index[:, None], head, dims[None, :]], mask=mask, other=0)

        beta = plgpu.load(beta_ref.at[slot, index, head], mask=live, other=0.0)
        g = plgpu.load(g_ref.at[slot, index, head], mask=live, other=0.0)
        total, last = jnp.cumsum(g), jnp.sum(g)
        rise = jnp.exp(total)[:, None]
        read_k = read_q = jnp.zeros((size, config.block_dv), jnp.float32)
        keys = [rows_of(k_ref, key_head, dims) for dims in blocks]
        for keys_b, dims, state in zip(keys, blocks, states, strict=True):
            read_k += product(keys_b, state)
            read_q += product(rows_of(q_ref, key_head, dims), state)
        values = rows_of(v_ref, head, value_dims).astype(jnp.float32)
        square = (slot, head, chunk, row, column)
        u = product(inverse_ref[square], beta[:, None] * (values - rise * read_k))
        out = key_dim**-0.5 * (rise * read_q + product(scores_ref[square], u))
        cell = (slot, place[:, None], head, value_dims[None, :])
        plgpu.store(out_ref.at[cell], out, mask=jnp.broadcast_to(live[:, None], out.shape))
        shared = jnp.exp(last - total)[:, None] * u
        return tuple(
            jnp.exp(last) * state + product(keys_b, shared, contract=(0, 0))
            for keys_b, state in zip(keys, states, strict=True)
        )

    states = jax.lax.fori_loop(0, inverse_ref.shape[2], walk, tuple(state_ref[cell] for cell in cells))
    for cell, state in zip(cells, states, strict=True):
        final_ref[cell] = state


@compiled_once("config", "interpret")
def chunk_delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    beta: Float[Array, "B N Hv"],
    g: Float[Array, "B N Hv"],
    state: Float[Array, "B Hv dk dv"],
    *,
    config: ChunkConfig,
    interpret: bool = False,
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "B Hv dk dv"]]:
    """See `pallas_kernels.gdn_scan.api.chunk_delta_rule`."""
    batch, rows, value_heads, value_dim = v.shape
    key_dim = q.shape[3]
    size, chunks = config.chunk, pl.cdiv(rows, config.chunk)
    config = config.fit(key_dim, value_dim)
    square = jax.ShapeDtypeStruct((batch, value_heads, chunks, size, size), jnp.float32)
    inverse, scores = pl.pallas_call(
        functools.partial(_prepare_kernel, config=config, interpret=interpret),
        grid=(chunks, value_heads, batch),
        out_shape=(square, square),
        compiler_params=plgpu.CompilerParams(num_warps=config.prepare_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="gdn_chunk_prepare",
    )(q, k, beta, g)
    return pl.pallas_call(
        functools.partial(_walk_kernel, config=config, interpret=interpret),
        grid=(value_dim // config.block_dv, value_heads, batch),
        out_shape=(
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="gdn_chunk_walk",
    )(q, k, v, beta, g, inverse, scores, state)

"""Pallas Triton kernels of a draft's candidates: the best tokens of each row of logits, in order, in two launches.

The first reads the logits once and leaves, for every chunk of 128 tokens, the largest and the sum of exponentials. In
the second a program a row finds the k chunks with the largest maxima, which hold all of the k best tokens, and sorts
those out: no sort, but a search for the k-th largest, and a count of who is larger among the k. Where there are no more
chunks than that the second one does it all. It also says what each costs the search (`costs`), which spares a launch.

Order of numbers: fp32 compares as its bits do, as integers, once those of negative numbers are turned around; a
positive NaN is then the largest, as for `lax.top_k`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import compiled_once
from pallas_kernels.tree_search.costs import BORDER, IMPOSSIBLE, cost_of

CHUNK = 128
_CHUNKS_A_PROGRAM = 16
_SMALLEST = -(2**31)


def _chunk_kernel(x_ref, top_ref, sum_ref):
    chunks = top_ref.shape[1]
    row, chunk = pl.program_id(0), pl.program_id(1) * _CHUNKS_A_PROGRAM + jnp.arange(_CHUNKS_A_PROGRAM)
    live = chunk < chunks
    inside = jnp.minimum(chunk, chunks - 1)
    column = (inside * CHUNK)[:, None] + jnp.arange(CHUNK)[None, :]
    x = plgpu.load(x_ref.at[row, column])
    top = jnp.max(x, axis=1)
    base = jnp.where(top > -jnp.inf, top, 0.0)
    plgpu.store(top_ref.at[row, chunk], top, mask=live)
    plgpu.store(sum_ref.at[row, chunk], jnp.sum(jnp.exp(x - base[:, None]), axis=1), mask=live)


def _turned(bits: Int[Array, "..."]) -> Int[Array, "..."]:
    """Those of negative numbers turned around; its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def ordered(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Integers in the order of fp32 numbers."""
    return _turned(lax.bitcast_convert_type(x, jnp.int32))


def _log_sum(x: Float[Array, " n"], sums: Float[Array, " n"] | None = None) -> Float[Array, ""]:
    """log Σ exp(x), or log Σ sums · exp(x)."""
    peak = jnp.max(x)
    base = jnp.where(peak > -jnp.inf, peak, 0.0)
    parts = jnp.exp(x - base)
    return base + jnp.log(jnp.sum(parts if sums is None else sums * parts))


def largest(keys: Int[Array, " n"], live, k: int):
    """Which of a program's keys are the k largest, the first of equal ones; there must be k live ones, and k < n.

    The k-th largest lies between the least of the largest keys of k groups, and the largest of all. Two counts a step
    thirds that span, until no more than k keys are as large as its lower end: 5 steps, mostly.
    """
    groups = pl.next_power_of_2(k)
    tops = jnp.max(keys.reshape(groups, -1), axis=1)

    def third(carry):
        low, high, last = carry
        # Of 32 bits without a sign: the span may be all of them.
        width = lax.div(lax.bitcast_convert_type(high - low, jnp.uint32), jnp.uint32(3))
        width = lax.bitcast_convert_type(width, jnp.int32)
        lower = low + 1 + width
        upper = lower + width
        # Both in one sum: there are no more than 2^13 keys.
        counts = jnp.sum((keys >= lower).astype(jnp.int32) + lax.shift_left((keys >= upper).astype(jnp.int32), 16))
        many, some = counts & 0xFFFF, counts >> 16
        low = jnp.where(some >= k, upper, jnp.where(many >= k, lower, low))
        high = jnp.where(some >= k, high, jnp.where(many >= k, upper - 1, lower - 1))
        return low, high, jnp.where(some >= k, some, jnp.where(many >= k, many, last))

    start = jnp.min(tops), jnp.max(tops), jnp.int32(keys.shape[0])
    least, _, count = lax.while_loop(lambda carry: (carry[0] != carry[1]) & (carry[2] > k), third, start)

    def first_of_equal_ones():
        above, equal = keys > least, live & (keys == least)
        room = k - jnp.sum(above.astype(jnp.int32))
        return above | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= room))

    return lax.cond(count > k, first_of_equal_ones, lambda: keys >= least)


def _pick_kernel(
    x_ref,  # [R, V]
    top_ref,  # [R, C], or None where all chunks are looked into
    sum_ref,  # [R, C], or None
    values_ref,  # [R, k]
    tokens_ref,  # [R, k]
    lse_ref,  # [R]
    costs_ref,  # [R / L, L + 2, k + 2]
    chunk_ref,  # [R, c]: chosen chunks
    key_ref,  # [R, k]
    token_ref,  # [R, k]
    *,
    barrier,
):
    k, kept = values_ref.shape[1], chunk_ref.shape[1]
    row, lse = pl.program_id(0), None
    if top_ref is not None:
        chunks = top_ref.shape[1]
        index = jnp.arange(pl.next_power_of_2(chunks))
        live = index < chunks
        inside = jnp.minimum(index, chunks - 1)
        top = plgpu.load(top_ref.at[row, inside], mask=live, other=-jnp.inf)
        lse = _log_sum(top, plgpu.load(sum_ref.at[row, inside], mask=live, other=0.0))
        chosen = largest(jnp.where(live, ordered(top), _SMALLEST), live, kept)
        place = jnp.cumsum(chosen.astype(jnp.int32)) - 1
        # Elsewhere where masked: two places of one store must not be the same.
        plgpu.store(chunk_ref.at[row, jnp.where(chosen, place, kept + index)], index, mask=chosen)
        barrier()
    index = jnp.arange(pl.next_power_of_2(kept * CHUNK))
    live = index < kept * CHUNK
    token = jnp.minimum(index, kept * CHUNK - 1)
    if top_ref is not None:
        chunk = plgpu.load(chunk_ref.at[row, lax.div(token, CHUNK)])
        token = chunk * CHUNK + lax.rem(token, CHUNK)
    x = plgpu.load(x_ref.at[row, token])
    if lse is None:  # all chunks are looked into
        x = jnp.where(live, x, -jnp.inf)
        lse = _log_sum(x)
    lse_ref[row] = lse
    keys = jnp.where(live, ordered(x), _SMALLEST)
    chosen = live & largest(keys, live, k)
    place = jnp.where(chosen, jnp.cumsum(chosen.astype(jnp.int32)) - 1, k + index)
    plgpu.store(key_ref.at[row, place], keys, mask=chosen)
    plgpu.store(token_ref.at[row, place], token, mask=chosen)
    barrier()

    index = jnp.arange(pl.next_power_of_2(k))
    live = index < k
    own = plgpu.load(key_ref.at[row, jnp.minimum(index, k - 1)])
    before = (own[None, :] > own[:, None]) | ((own[None, :] == own[:, None]) & (index[None, :] < index[:, None]))
    rank = jnp.sum((before & live[None, :]).astype(jnp.int32), axis=1)
    rank = jnp.where(live, rank, k + index)
    value = lax.bitcast_convert_type(_turned(own), jnp.float32)
    plgpu.store(values_ref.at[row, rank], value, mask=live)
    depths = costs_ref.shape[1] - BORDER
    slot, depth = lax.div(row, depths), lax.rem(row, depths)
    plgpu.store(costs_ref.at[slot, depth, rank], cost_of(value - lse), mask=live)
    # Beside the last rank, and below the last depth.
    side = jnp.arange(2)
    border = (slot, depth + side, jnp.where(side == 0, k, 0))
    plgpu.store(
        costs_ref.at[border], jnp.full((2,), IMPOSSIBLE, jnp.int32), mask=(side == 0) | (depth == depths - 1)
    )
    plgpu.store(tokens_ref.at[row, rank], plgpu.load(token_ref.at[row, jnp.minimum(index, k - 1)]), mask=live)


@compiled_once("k", "interpret")
def top_candidates(
    x: Float[Array, "... L V"], *, k: int, interpret: bool = False
) -> tuple[Float[Array, "... L k"], Int[Array, "... L k"], Float[Array, "... L"], Int[Array, "... L+2 k+2"]]:
    """See `pallas_kernels.tree_search.api.top_candidates_serve`, which says what these kernels take."""
    shape, vocab = x.shape[:-1], x.shape[-1]
    x = x.reshape(-1, vocab)
    rows, chunks = x.shape[0], vocab // CHUNK
    kept = min(chunks, k)
    per_chunk = jax.ShapeDtypeStruct((rows, chunks), jnp.float32)
    tops = sums = None
    if kept < chunks:
        tops, sums = pl.pallas_call(
            _chunk_kernel,
            grid=(rows, pl.cdiv(chunks, _CHUNKS_A_PROGRAM)),
            out_shape=(per_chunk, per_chunk),
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="draft_chunks",
        )(x)

    def numbers(dtype, *size):
        return jax.ShapeDtypeStruct((rows, *size), dtype)

    values, tokens, lse, costs, *_ = pl.pallas_call(
        functools.partial(_pick_kernel, barrier=(lambda: None) if interpret else plgpu.debug_barrier),
        grid=(rows,),
        out_shape=(
            numbers(jnp.float32, k), numbers(jnp.int32, k), numbers(jnp.float32),
            jax.ShapeDtypeStruct((rows // shape[-1], shape[-1] + BORDER, k + BORDER), jnp.int32),
            numbers(jnp.int32, kept), numbers(jnp.int32, k), numbers(jnp.int32, k),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="draft_candidates",
    )(x, tops, sums)  # fmt: skip
    costs = costs.reshape(*shape[:-1], *costs.shape[1:])
    return values.reshape(*shape, k), tokens.reshape(*shape, k), lse.reshape(shape), costs

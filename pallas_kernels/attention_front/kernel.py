"""Pallas Triton kernel between an attention layer's projections and its attention: a program a row and head."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import compiled_once


def _kernel(
    q_ref,  # [M, H · d], gated [M, H · 2d]
    kv_ref,  # [M, 2 · K · d], or what q_ref is, with them from `kv_start` on
    q_gain_ref,  # [d], or None: no norm
    k_gain_ref,  # [d], or None
    cos_ref,  # [M, half]
    sin_ref,  # [M, half]
    queries_ref,  # [M, H, d]
    pages_ref,  # [M, 2 · K, d]
    *,
    stride: int,
    kv_start: int,
    eps: float,
    zero_centered: bool,
    block: int,
    rest: int,
):
    _, heads, dim = queries_ref.shape
    kv_heads, half = pages_ref.shape[1] // 2, cos_ref.shape[1]
    row, head = pl.program_id(0), pl.program_id(1)

    def pieces(ref, start, size):
        """The two halves that turn into each other, and what passes through; with which numbers of each are real."""
        for offset, length, wide in ((0, half, block), (half, half, block), (2 * half, size - 2 * half, rest)):
            index = jnp.arange(wide)
            live = index < length
            yield ref, start + offset, jnp.minimum(index, max(length - 1, 0)), index + offset, live

    def load(ref, *index, mask):
        return plgpu.load(ref.at[index], mask=mask, other=0)

    def turn(source_ref, start, gain_ref, out_ref, out_head):
        parts = []
        for ref, begin, index, _, live in pieces(source_ref, start, dim):
            parts.append(load(ref, row, begin + index, mask=live).astype(jnp.float32))
        dtype = source_ref.dtype
        if gain_ref is not None:
            squares = sum(jnp.sum(part * part) for part in parts)
            factor = lax.rsqrt(squares / dim + eps)
            normed = []
            for part, (ref, begin, index, _, live) in zip(parts, pieces(gain_ref, 0, dim), strict=True):
                gain = load(ref, begin + index, mask=live)
                y = part * factor
                if zero_centered:
                    y = (y * (1.0 + gain.astype(jnp.float32))).astype(dtype)
                else:
                    y = y.astype(dtype) * gain.astype(dtype)
                normed.append(y.astype(jnp.float32))
            parts = normed
        first, second, other = parts
        index = jnp.arange(block)
        inside = jnp.minimum(index, half - 1)
        cos, sin = (load(ref, row, inside, mask=index < half) for ref in (cos_ref, sin_ref))
        turned = (first * cos - second * sin, second * cos + first * sin, other)
        for part, (_, _, _, place, live) in zip(turned, pieces(out_ref, 0, dim), strict=True):
            plgpu.store(out_ref.at[row, out_head, place], part.astype(dtype), mask=live)

    @pl.when(head < heads)
    def _():
        turn(q_ref, head * stride, q_gain_ref, queries_ref, head)

    own = head - heads

    @pl.when((own >= 0) & (own < kv_heads))
    def _():
        turn(kv_ref, kv_start + own * dim, k_gain_ref, pages_ref, own)

    @pl.when(own >= kv_heads)
    def _():
        index = jnp.arange(pl.next_power_of_2(dim))
        live = index < dim
        values = load(kv_ref, row, kv_start + own * dim + jnp.minimum(index, dim - 1), mask=live)
        plgpu.store(pages_ref.at[row, own, index], values, mask=live)


@compiled_once("heads", "kv_heads", "head_dim", "gated", "eps", "zero_centered", "interpret")
def attention_front(
    q: Float[Array, "B N P"],
    kv: Float[Array, "B N R"] | None,
    q_gain: Float[Array, " d"] | None,
    k_gain: Float[Array, " d"] | None,
    cos: Float[Array, "B N half"],
    sin: Float[Array, "B N half"],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool,
    eps: float,
    zero_centered: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "B N H d"], Float[Array, "B N 2 K d"]]:
    """See `pallas_kernels.attention_front.api.attention_front`, which checks what this kernel takes."""
    batch, nodes = q.shape[:2]
    rows, stride = batch * nodes, (2 if gated else 1) * head_dim
    half, kv_start = cos.shape[-1], heads * stride if kv is None else 0
    kv = q if kv is None else kv
    queries, pages = pl.pallas_call(
        functools.partial(
            _kernel, stride=stride, kv_start=kv_start, eps=eps, zero_centered=zero_centered,
            block=pl.next_power_of_2(half), rest=pl.next_power_of_2(max(head_dim - 2 * half, 1)),
        ),
        grid=(rows, heads + 2 * kv_heads),
        out_shape=(
            jax.ShapeDtypeStruct((rows, heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((rows, 2 * kv_heads, head_dim), kv.dtype),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="attention_front",
    )(q.reshape(rows, -1), kv.reshape(rows, -1), q_gain, k_gain, cos.reshape(rows, half), sin.reshape(rows, half))
    return (
        queries.reshape(batch, nodes, heads, head_dim),
        pages.reshape(batch, nodes, 2, kv_heads, head_dim),
    )

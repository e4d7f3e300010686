"""Pallas Triton kernel of the residual sum and its norm: a program a row, which stays in registers between the two."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import compiled_once


def _kernel(x_ref, update_ref, weight_ref, sum_ref, normed_ref, *, eps: float, zero_centered: bool, block: int):
    width = x_ref.shape[1]
    row, column = pl.program_id(0), jnp.arange(block)
    live = column < width
    # In bounds even where masked: an interpreter reads before it masks.
    index = jnp.minimum(column, width - 1)
    x, update, weight = (
        plgpu.load(ref, mask=live, other=0)
        for ref in (x_ref.at[row, index], update_ref.at[row, index], weight_ref.at[index])
    )
    total = x + update
    # Unclamped: two places of one store must not be the same, even where one is masked.
    plgpu.store(sum_ref.at[row, column], total, mask=live)
    y = total.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.sum(y * y) / width + eps)
    if zero_centered:
        y = y * (1.0 + weight.astype(jnp.float32))
    else:
        y = y.astype(x.dtype) * weight.astype(x.dtype)
    plgpu.store(normed_ref.at[row, column], y.astype(normed_ref.dtype), mask=live)


@compiled_once("eps", "zero_centered", "interpret")
def add_norm(
    x: Float[Array, "... d"],
    update: Float[Array, "... d"],
    weight: Float[Array, " d"],
    *,
    eps: float,
    zero_centered: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "... d"], Float[Array, "... d"]]:
    """See `pallas_kernels.add_norm.api.add_norm`."""
    shape, width = x.shape, x.shape[-1]
    rows, block = math.prod(shape[:-1]), 1 << (width - 1).bit_length()
    out = jax.ShapeDtypeStruct((rows, width), x.dtype)
    total, normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps, zero_centered=zero_centered, block=block),
        grid=(rows,),
        out_shape=(out, out),
        # Eight numbers or so a thread: enough loads in flight, and few warps to wait for in the sum.
        compiler_params=plgpu.CompilerParams(num_warps=max(1, min(16, block // 256)), num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(x.reshape(rows, width), update.reshape(rows, width), weight)
    return total.reshape(shape), normed.reshape(shape)

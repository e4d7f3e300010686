"""Pallas Triton kernel of a product of few rows with a weight matrix: y = x Wᵀ, [M, K] times [N, K].

With so few rows the product is as fast as its weights are read, so a program owns `block_out` rows of W and up to
`block_rows` rows of x, and walks K in a software pipeline; with `splits` several programs share those rows of W and
leave partial sums to be added by whoever reads them. SwiGLU costs no launch of its own: with W = [gate | up] a program
owns the same rows of both halves.

Rows beyond M are zeros to the matrix unit, which wants 16 at least, and cost nothing but registers.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import compiled_once
from pallas_kernels.linear.configs import Config
from pallas_kernels.tree_attention.kernel import FP32_DOT


def _kernel(
    x_ref,  # [M, K]
    weight_ref,  # [N, K]; with swiglu [2N, K]
    bias_ref,  # [N] or [2N], or None
    y_ref,  # [M, N], with splits [S, M, N]
    *,
    swiglu: bool,
    splits: int,
    block_rows: int,
    block_out: int,
    block_in: int,
    precision: lax.PrecisionLike,
):
    rows, width = x_ref.shape
    out_width = y_ref.shape[-1]
    tile, split = pl.program_id(0), pl.program_id(1)
    row = pl.program_id(2) * block_rows + jnp.arange(block_rows)
    column = tile * block_out + jnp.arange(block_out)
    live_row, live_column = row < rows, column < out_width

    def inside(index, size, block):
        # In bounds even where masked, which an interpreter asks for. Left alone where it never leaves them: the
        # compiler then sees that neighbours are neighbours, without which it neither vectorises loads nor copies ahead.
        return jnp.minimum(index, size - 1) if size % block else index

    row_index, column_index = inside(row, rows, block_rows), inside(column, out_width, block_out)
    blocks = pl.cdiv(width, block_in)
    share = pl.cdiv(blocks, splits)

    def product(x, block_of_weight):
        return lax.dot_general(
            x, block_of_weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def step(index, sums):
        block = split * share + index
        k = block * block_in + jnp.arange(block_in)
        live_k = k < width if width % block_in or blocks % splits else jnp.ones((block_in,), bool)
        k_index = inside(k, width, block_in * splits)
        mask = live_row[:, None] & live_k[None, :]
        x = plgpu.load(x_ref.at[row_index[:, None], k_index[None, :]], mask=mask, other=0)
        out = []
        for half, total in enumerate(sums):
            weights = plgpu.load(
                weight_ref.at[(half * out_width + column_index)[:, None], k_index[None, :]],
                mask=live_column[:, None] & live_k[None, :], other=0,
            )  # fmt: skip
            out.append(total + product(x, weights))
        return tuple(out)

    zero = jnp.zeros((block_rows, block_out), jnp.float32)
    sums = lax.fori_loop(0, share, step, (zero, zero) if swiglu else (zero,))
    if bias_ref is not None:
        sums = tuple(
            total + plgpu.load(bias_ref.at[half * out_width + column_index]).astype(jnp.float32)[None, :]
            for half, total in enumerate(sums)
        )
    y = sums[0]
    if swiglu:
        # Rounded where the layer by itself rounds.
        gate, up = (total.astype(x_ref.dtype).astype(jnp.float32) for total in sums)
        y = gate / (1.0 + jnp.exp(-gate)) * up
    place = (row[:, None], column[None, :])
    target = y_ref.at[place] if splits == 1 else y_ref.at[split, *place]
    plgpu.store(target, y.astype(y_ref.dtype), mask=live_row[:, None] & live_column[None, :])


@compiled_once("swiglu", "dtype", "config", "interpret")
def linear(
    x: Float[Array, "... i"],
    weight: Float[Array, "o i"],
    bias: Float[Array, " o"] | None,
    *,
    swiglu: bool = False,
    dtype: jax.typing.DTypeLike,
    config: Config,
    interpret: bool = False,
) -> Float[Array, "... O"]:
    """See `pallas_kernels.linear.api`, which checks what this kernel takes.

    Args:
      config: tile sizes and launch parameters.
      interpret: run in Pallas' interpreter, on any device.
    """
    shape, width = x.shape, x.shape[-1]
    rows, out = math.prod(shape[:-1]), weight.shape[0] // (2 if swiglu else 1)
    # What comes after the sum needs all of it.
    splits = 1 if swiglu or bias is not None else config.splits
    # The interpreter's dots run on the host, where the preset does not exist.
    precision = (lax.Precision.HIGHEST if interpret else FP32_DOT) if x.dtype == jnp.float32 else None
    block_rows = min(max(16, 1 << (rows - 1).bit_length()), config.block_rows)
    kernel = functools.partial(
        _kernel, swiglu=swiglu, splits=splits, block_rows=block_rows, block_out=config.block_out,
        block_in=min(config.block_in, max(16, 1 << (width - 1).bit_length())), precision=precision,
    )  # fmt: skip
    y = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(out, config.block_out), splits, pl.cdiv(rows, block_rows)),
        out_shape=jax.ShapeDtypeStruct(
            (rows, out) if splits == 1 else (splits, rows, out), dtype if splits == 1 else jnp.float32
        ),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="linear",
    )(x.reshape(rows, width), weight, bias)
    y = y if splits == 1 else jnp.sum(y, axis=0).astype(dtype)
    return y.reshape(*shape[:-1], out)

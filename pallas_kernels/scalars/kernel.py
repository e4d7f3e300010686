"""Pallas Triton kernel of functions of scalars: one warp, whose threads all do the same."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import compiled_once


def _kernel(*refs, function, inputs, barrier):
    lists = [[ref[i] for i in range(ref.shape[0])] for ref in refs[:inputs]]
    barrier()  # before any thread writes where another one reads
    for ref, result in zip(refs[inputs:], function(*lists), strict=True):
        for i, number in enumerate(result):
            ref[i] = jnp.asarray(number, jnp.float32)


@compiled_once("function", "results", "in_place", "interpret")
def scalars(
    function: Callable[..., Sequence[Sequence[Any]]],
    arrays: Sequence[Float[Array, " _"]],
    results: tuple[int, ...],
    *,
    in_place: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, " _"], ...]:
    """See `pallas_kernels.scalars.api.scalars`, which checks what this kernel takes."""
    barrier = plgpu.debug_barrier if in_place and not interpret else lambda: None
    return pl.pallas_call(
        functools.partial(_kernel, function=function, inputs=len(arrays), barrier=barrier),
        out_shape=tuple(jax.ShapeDtypeStruct((size,), jnp.float32) for size in results),
        input_output_aliases={0: 0} if in_place else {},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="scalars",
    )(*arrays)

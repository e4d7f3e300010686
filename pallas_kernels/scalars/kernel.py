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


def _kernel(*refs, function):
    *arrays, out_ref = refs
    lists = [[ref[i] for i in range(ref.shape[0])] for ref in arrays]
    for i, result in enumerate(function(*lists)):
        out_ref[i] = jnp.asarray(result, jnp.float32)


@compiled_once("function", "results", "interpret")
def scalars(
    function: Callable[..., Sequence[Any]],
    arrays: Sequence[Float[Array, " _"]],
    results: int,
    *,
    interpret: bool = False,
) -> Float[Array, " R"]:
    """See `pallas_kernels.scalars.api.scalars`, which checks what this kernel takes."""
    return pl.pallas_call(
        functools.partial(_kernel, function=function),
        out_shape=jax.ShapeDtypeStruct((results,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="scalars",
    )(*arrays)

"""Public entry of products of few rows with weights."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, resolve, target_device
from pallas_kernels.linear import kernel, reference, table
from pallas_kernels.linear.configs import Config, config_for

DTYPES = (jnp.bfloat16, jnp.float32)
# Beyond, a product is no longer bound by reading weights, and the compiler's own are as good.
MAX_ROWS = 64


def unsupported(x: Float[Array, "... i"], weight: Float[Array, "o i"]) -> str | None:
    """Why the Pallas kernel cannot take these arrays, whatever the device; None if it can."""
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return f"dtypes {x.dtype} and {weight.dtype} are not both bfloat16 or both float32"
    return None


def _config(x: Float[Array, "... i"], weight: Float[Array, "o i"], swiglu: bool) -> tuple[Config, str | None]:
    """The kernel's config for these products, and why XLA's own kernels are the better ones, or None."""
    rows, out, columns = math.prod(x.shape[:-1]), weight.shape[0] // (2 if swiglu else 1), weight.shape[1]
    kind = target_device().device_kind
    if rows > MAX_ROWS:
        slower = f"{rows} rows are more than {MAX_ROWS}"
    elif x.dtype != jnp.bfloat16:
        slower = f"{x.dtype} products are not bound by memory"
    elif measured := table.lookup(kind, table.Product.of(rows, out, columns, swiglu)):
        return measured, None
    else:
        slower = f"not measured to be faster than XLA's for {out} x {columns} on {kind!r}"
    return config_for(out, columns, weight.dtype.itemsize), slower


def linear(
    x: Float[Array, "... i"],
    weight: Float[Array, "o i"],
    bias: Float[Array, " o"] | None = None,
    *,
    swiglu: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "... O"]:
    """x Wᵀ + b, summed in fp32.

    Args:
      x: rows.
      weight: in the layout of checkpoints.
      bias: added to each row.
      swiglu: weight and bias are [gate | up], and the result is silu(gate) · up (arXiv 2002.05202).
      dtype: of the result; None for x's.
      implementation: "auto", "xla" or "pallas".

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    config, slower = _config(x, weight, swiglu)
    if resolve("linear", implementation, unsupported(x, weight), slower) == "xla":
        return reference.linear(x, weight, bias, swiglu=swiglu, dtype=dtype)
    return kernel.linear(x, weight, bias, swiglu=swiglu, dtype=dtype, config=config)

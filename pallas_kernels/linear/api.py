"""Public entry of products of few rows with weights."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, resolve, target_device, unsupported_device
from pallas_kernels.linear import kernel, reference, table
from pallas_kernels.linear.configs import Config, config_for

DTYPES = (jnp.bfloat16, jnp.float32)
# Beyond, a product is no longer bound by reading weights, and the compiler's own are as good.
MAX_ROWS = 64
# Every program reads all of x, which beyond this width is more than its weights.
MAX_NORM_WIDTH = 1024


def unsupported(x: Float[Array, "... i"], weight: Float[Array, "o i"]) -> str | None:
    """Why the Pallas kernel cannot take these arrays, whatever the device; None if it can."""
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return f"dtypes {x.dtype} and {weight.dtype} are not both bfloat16 or both float32"
    return None


def _measured(x: Float[Array, "... i"], weight: Float[Array, "o i"], swiglu: bool, norm: bool) -> Config | str:
    """The config of these products, or why XLA's own kernels are the better ones."""
    if (rows := math.prod(x.shape[:-1])) > MAX_ROWS:
        return f"{rows} rows are more than {MAX_ROWS}"
    if x.dtype != jnp.bfloat16:
        return f"{x.dtype} products are not bound by memory"
    out, columns = weight.shape[0] // (2 if swiglu else 1), weight.shape[1]
    product = table.Product.of(rows, out, columns, swiglu, norm)
    kind = target_device().device_kind
    return table.lookup(kind, product) or f"not measured to be faster than XLA's for {out} x {columns} on {kind!r}"


def _config(measured: Config | str, x: Float[Array, "... i"], weight: Float[Array, "o i"], swiglu: bool) -> Config:
    """Of a product that the kernel has to serve, measured or not."""
    if isinstance(measured, Config):
        return measured
    out, rows = weight.shape[0] // (2 if swiglu else 1), math.prod(x.shape[:-1])
    return config_for(target_device().device_kind, rows, out, weight.shape[1], weight.dtype.itemsize)


def _reason(measured: Config | str) -> str | None:
    return measured if isinstance(measured, str) else None


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
    measured = _measured(x, weight, swiglu, norm=False)
    if resolve("linear", implementation, unsupported(x, weight), _reason(measured)) == "xla":
        return reference.linear(x, weight, bias, swiglu=swiglu, dtype=dtype)
    config = _config(measured, x, weight, swiglu)
    return kernel.linear(x, None, None, weight, bias, swiglu=swiglu, dtype=dtype, config=config)[1]


def joins_norm(x: Float[Array, "... i"], implementation: Implementation = "auto") -> bool:
    """Whether `norm_linear` of these rows beats a norm of its own: where launches cost more than reading rows again."""
    if x.shape[-1] > MAX_NORM_WIDTH or math.prod(x.shape[:-1]) > MAX_ROWS or unsupported_device(target_device()):
        return False
    if implementation == "auto":
        kind, rows = target_device().device_kind, math.prod(x.shape[:-1])
        return x.dtype == jnp.bfloat16 and table.joins_norms(kind, rows, x.shape[-1])
    return implementation == "pallas"


def norm_linear(
    x: Float[Array, "... i"],
    update: Float[Array, "... i"] | None,
    gain: Float[Array, " i"],
    weight: Float[Array, "o i"],
    bias: Float[Array, " o"] | None = None,
    *,
    eps: float,
    zero_centered: bool,
    swiglu: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "... i"], Float[Array, "... O"]]:
    """x + update, and `linear` of its RMSNorm (arXiv 1910.07467).

    Args:
      x: the residual stream.
      update: a layer's output, in x's dtype; None for nothing to add.
      gain: weight of the norm.
      eps: added to the mean square.
      zero_centered: scale by 1 + gain (Qwen3.5) rather than by gain (Qwen3).

    Returns:
      The sum, rounded to x's dtype, and the product; the norm in between is that of the rounded sum.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    measured = _measured(x, weight, swiglu, norm=True)
    if resolve("norm_linear", implementation, unsupported(x, weight), _reason(measured)) == "xla":
        return reference.norm_linear(
            x, update, gain, weight, bias, eps=eps, zero_centered=zero_centered, swiglu=swiglu, dtype=dtype
        )
    return kernel.linear(
        x, update, gain, weight, bias, eps=eps, zero_centered=zero_centered, swiglu=swiglu, dtype=dtype,
        config=_config(measured, x, weight, swiglu),
    )  # fmt: skip

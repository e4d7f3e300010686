"""Public entry of the residual sum and its norm."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.add_norm import kernel, reference
from pallas_kernels.dispatch import Implementation, resolve

DTYPES = (jnp.bfloat16, jnp.float32)
MAX_WIDTH = 16_384


def unsupported(x: Float[Array, "... d"]) -> str | None:
    """Why the Pallas kernel cannot take this array, whatever the device; None if it can."""
    if x.dtype not in DTYPES:
        return f"dtype {x.dtype} is none of bfloat16, float32"
    if x.shape[-1] > MAX_WIDTH:
        return f"width {x.shape[-1]} is more than {MAX_WIDTH}, what the registers of one program hold"
    return None


def add_norm(
    x: Float[Array, "... d"],
    update: Float[Array, "... d"],
    weight: Float[Array, " d"],
    *,
    eps: float,
    zero_centered: bool,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "... d"], Float[Array, "... d"]]:
    """x + update, and its RMSNorm (arXiv 1910.07467): the residual stream and what the next mixer reads.

    Args:
      x: the residual stream.
      update: a layer's output, in x's dtype.
      weight: of the norm.
      eps: added to the mean square.
      zero_centered: scale by 1 + weight (Qwen3.5) rather than by weight (Qwen3).
      implementation: "auto", "xla" or "pallas".

    Returns:
      The sum, rounded to x's dtype, and the norm of the rounded sum, computed in fp32.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    if resolve("add_norm", implementation, unsupported(x)) == "xla":
        return reference.add_norm(x, update, weight, eps=eps, zero_centered=zero_centered)
    return kernel.add_norm(x, update, weight, eps=eps, zero_centered=zero_centered)

"""XLA reference of the residual sum and its norm."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "... d"], weight: Float[Array, " d"], *, eps: float, zero_centered: bool
) -> Float[Array, "... d"]:
    """x / rms(x), scaled by `weight` or, zero-centred, by 1 + `weight`; in fp32, cast back at the end."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    if zero_centered:
        return (y * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    # The dense models round to the activations' dtype before scaling (Hugging Face Qwen3RMSNorm).
    return (y.astype(x.dtype) * weight.astype(x.dtype)).astype(x.dtype)


def add_norm(
    x: Float[Array, "... d"],
    update: Float[Array, "... d"],
    weight: Float[Array, " d"],
    *,
    eps: float,
    zero_centered: bool,
) -> tuple[Float[Array, "... d"], Float[Array, "... d"]]:
    """See `pallas_kernels.add_norm.api.add_norm`."""
    total = x + update
    return total, rms_norm(total, weight, eps=eps, zero_centered=zero_centered)

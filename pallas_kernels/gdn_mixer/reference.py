"""XLA reference of the front and the gated norm of a Gated DeltaNet layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

L2_EPS = 1e-6


def l2norm(x: Float[Array, "... d"], eps: float = L2_EPS) -> Float[Array, "... d"]:
    """x / ‖x‖ in fp32, eps inside the root and on the sum (not the mean)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def convolve(
    inputs: Float[Array, "B N C"],
    window: Float[Array, "B W C"],
    taps: Int[Array, "B N W"] | None,
    weight: Float[Array, "C 1 K"],
) -> Float[Array, "B N C"]:
    """silu of the causal depthwise convolution, in the inputs' dtype; see `api.gdn_front` for the arguments."""
    factors = weight[:, 0].astype(jnp.float32)
    rows, width = inputs.shape[1], window.shape[1]
    past = jnp.concatenate([window, inputs], axis=1)
    total = inputs.astype(jnp.float32) * factors[:, -1]
    for j in range(width):
        if taps is None:
            earlier = jax.lax.slice_in_dim(past, width - 1 - j, width - 1 - j + rows, axis=1)
        else:
            earlier = jnp.take_along_axis(past, (taps[:, :, j] + width)[..., None], axis=1)
        total = total + earlier.astype(jnp.float32) * factors[:, width - 1 - j]
    return jax.nn.silu(total).astype(inputs.dtype)


def gdn_front(
    inputs: Float[Array, "B N C"],
    window: Float[Array, "B W C"],
    taps: Int[Array, "B N W"] | None,
    weight: Float[Array, "C 1 K"],
    strength: Float[Array, "B N Hv"],
    decay: Float[Array, "B N Hv"],
    a_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    valid: Bool[Array, "B N"],
    *,
    key_heads: int,
    key_dim: int,
    ancestors: Bool[Array, "B N N"] | None = None,
) -> tuple[
    Float[Array, "B N Hk dk"],
    Float[Array, "B N Hk dk"],
    Float[Array, "B N Hv dv"],
    Float[Array, "B N Hv"],
    Float[Array, "B N Hv"],
]:
    """See `pallas_kernels.gdn_mixer.api.gdn_front`."""
    batch, rows, value_heads = strength.shape
    beta = jax.nn.sigmoid(strength.astype(jnp.float32))
    g = -jnp.exp(a_log) * jax.nn.softplus(decay.astype(jnp.float32) + dt_bias)
    beta, g = (jnp.where(valid[..., None], x, 0.0) for x in (beta, g))
    if ancestors is not None:
        g = jnp.einsum("bij,bjh->bih", ancestors.astype(jnp.float32), g, precision=jax.lax.Precision.HIGHEST)
    mixed = convolve(inputs, window, taps, weight)
    width = key_heads * key_dim
    shape = (batch, rows, key_heads, key_dim)
    q = l2norm(mixed[..., :width].reshape(shape)).astype(inputs.dtype)
    k = l2norm(mixed[..., width : 2 * width].reshape(shape)).astype(inputs.dtype)
    v = mixed[..., 2 * width :].reshape(batch, rows, value_heads, -1)
    return q, k, v, beta, g


def gated_norm(
    x: Float[Array, "... d"], z: Float[Array, "... d"], weight: Float[Array, " d"], *, eps: float
) -> Float[Array, "... d"]:
    """See `pallas_kernels.gdn_mixer.api.gated_norm`."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * weight
    return (y * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)

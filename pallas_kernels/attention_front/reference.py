"""XLA reference of what stands between an attention layer's projections and its attention."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.add_norm.reference import rms_norm


def apply_rope(
    x: Float[Array, "B N H d"], cos: Float[Array, "B N half"], sin: Float[Array, "B N half"]
) -> Float[Array, "B N H d"]:
    """Rotates the leading 2·half dims of every head (pairs i and i + half); the rest passes through."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)


def _rotated(
    x: Float[Array, "B N H d"],
    gain: Float[Array, " d"] | None,
    cos: Float[Array, "B N half"],
    sin: Float[Array, "B N half"],
    eps: float,
    zero_centered: bool,
) -> Float[Array, "B N H d"]:
    normed = x if gain is None else rms_norm(x, gain, eps=eps, zero_centered=zero_centered)
    return apply_rope(normed, cos, sin)


def rotated_queries(
    q: Float[Array, "B N P"],
    gain: Float[Array, " d"] | None,
    cos: Float[Array, "B N half"],
    sin: Float[Array, "B N half"],
    *,
    head_dim: int,
    gated: bool,
    eps: float,
    zero_centered: bool,
) -> Float[Array, "B N H d"]:
    """The queries' part of `pallas_kernels.attention_front.api.attention_front`."""
    q = q.reshape(*q.shape[:2], -1, (2 if gated else 1) * head_dim)[..., :head_dim]
    return _rotated(q, gain, cos, sin, eps, zero_centered)


def paged_kv(
    kv: Float[Array, "B N R"],
    gain: Float[Array, " d"] | None,
    cos: Float[Array, "B N half"],
    sin: Float[Array, "B N half"],
    *,
    head_dim: int,
    eps: float,
    zero_centered: bool,
) -> Float[Array, "B N 2 K d"]:
    """The keys' and values' part of it."""
    k, v = jnp.split(kv, 2, axis=-1)
    k, v = (part.reshape(*kv.shape[:2], -1, head_dim) for part in (k, v))
    return jnp.stack([_rotated(k, gain, cos, sin, eps, zero_centered), v], axis=2)

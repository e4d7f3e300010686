"""Public entry of what stands between an attention layer's projections and its attention."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention_front import kernel
from pallas_kernels.attention_front.reference import paged_kv, rotated_queries
from pallas_kernels.dispatch import Implementation, resolve

DTYPES = (jnp.bfloat16, jnp.float32)
# Of more rows XLA's several kernels are as fast as reading and writing them.
MAX_ROWS = 256


def unsupported(q: Float[Array, "B N P"]) -> str | None:
    """Why the Pallas kernel cannot take this array, whatever the device; None if it can."""
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is none of bfloat16, float32"
    return None


def attention_front(
    q: Float[Array, "B N P"],
    kv: Float[Array, "B N R"] | None,
    q_gain: Float[Array, " d"] | None,
    k_gain: Float[Array, " d"] | None,
    cos: Float[Array, "B N half"],
    sin: Float[Array, "B N half"],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool,
    eps: float,
    zero_centered: bool,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B N H d"], Float[Array, "B N 2 K d"]]:
    """Queries and keys, each head normed where the model norms them, rotated by its position; and values as they are.

    Args:
      q: projected queries, head by head; with `gated` [query | gate] a head, of which the gate is not used.
      kv: projected keys, then values; None if they follow the queries in `q`.
      q_gain, k_gain: weights of the norms over a head; None for models without.
      cos, sin: of the rotary angles of the rows (`layers.rope_tables`); the leading 2·half dims of a head turn.
      heads, kv_heads, head_dim: H, K, d.
      eps, zero_centered: of the norms.
      implementation: "auto", "xla" or "pallas".

    Returns:
      Queries, and keys (index 0) beside values (index 1), as the pages hold them.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    rows = q.shape[0] * q.shape[1]
    slower = f"{rows} rows are more than {MAX_ROWS}" if rows > MAX_ROWS else None
    if resolve("attention_front", implementation, unsupported(q), slower) == "xla":
        norm = {"head_dim": head_dim, "eps": eps, "zero_centered": zero_centered}
        if kv is None:
            q, kv = jnp.split(q, [q.shape[-1] - 2 * kv_heads * head_dim], axis=-1)
        return rotated_queries(q, q_gain, cos, sin, gated=gated, **norm), paged_kv(kv, k_gain, cos, sin, **norm)
    return kernel.attention_front(
        q, kv, q_gain, k_gain, cos, sin, heads=heads, kv_heads=kv_heads, head_dim=head_dim, gated=gated, eps=eps,
        zero_centered=zero_centered,
    )  # fmt: skip

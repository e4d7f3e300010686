"""XLA reference of tree attention: gather the pages, mask, softmax in fp32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def tree_attention(
    q: Float[Array, "B N H d"],
    kv: Float[Array, "B N 2 K d"],
    mask: Bool[Array, "B N N"] | None,
    pages: Float[Array, "L P S 2 K d"] | None,
    layer: int,
    block_tables: Int[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
    *,
    scale: float,
    window: int | None = None,
    positions: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N H d"]:
    """See `pallas_kernels.tree_attention.api.tree_attention`."""
    batch, rows, heads, dim = q.shape
    kv_heads = kv.shape[3]
    grouped = q.reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    if mask is None:
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows))
    keys, values, visible = kv[:, :, 0], kv[:, :, 1], mask
    if pages is not None:
        assert block_tables is not None and lengths is not None
        # One gather for keys and values of the slot's pages, in token order.
        context = pages.at[layer, block_tables].get(mode="clip")
        context = context.reshape(batch, -1, 2, kv_heads, dim)
        index = jnp.arange(context.shape[1])
        used = index < lengths[:, None]
        # A masked weight is exactly 0, but 0 · NaN is NaN: clear what was never written.
        context = jnp.where(used[:, :, None, None, None], context, 0)
        seen = jnp.broadcast_to(used[:, None, :], (batch, rows, used.shape[1]))
        if window is not None:
            assert positions is not None
            seen = seen & (positions[:, :, None] - index < window)
        keys = jnp.concatenate([context[:, :, 0], keys], axis=1)
        values = jnp.concatenate([context[:, :, 1], values], axis=1)
        visible = jnp.concatenate([seen, mask], axis=2)
    logits = jnp.einsum(
        "bnkgd,bskd->bkgns", grouped, keys, precision=precision, preferred_element_type=jnp.float32
    )
    logits = jnp.where(visible[:, None, None], logits * scale, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=-1).astype(q.dtype)
    out = jnp.einsum(
        "bkgns,bskd->bnkgd", weights, values, precision=precision, preferred_element_type=jnp.float32
    )
    return out.astype(q.dtype).reshape(batch, rows, heads, dim)

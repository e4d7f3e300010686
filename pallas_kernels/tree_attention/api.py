"""Public entry of tree attention."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, resolve, target_device
from pallas_kernels.tree_attention import kernel, reference
from pallas_kernels.tree_attention.configs import config_for

HEAD_DIMS = (64, 128, 256)
DTYPES = (jnp.bfloat16, jnp.float32)
MIN_PAGE_SIZE = 16


def unsupported(
    q: Float[Array, "B N H d"],
    kv: Float[Array, "B N 2 K d"],
    pages: Float[Array, "L P S 2 K d"] | None,
) -> str | None:
    """Why the Pallas kernel cannot take these arrays, whatever the device; None if it can."""
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is none of bfloat16, float32"
    if q.shape[-1] not in HEAD_DIMS:
        return f"head dim {q.shape[-1]} is none of {', '.join(map(str, HEAD_DIMS))}"
    if kv.dtype != q.dtype or (pages is not None and pages.dtype != q.dtype):
        return f"queries are {q.dtype}, but keys and values are not"
    if pages is not None:
        size = pages.shape[2]
        if size < MIN_PAGE_SIZE or size & (size - 1):
            return f"page size {size} is not a power of two of at least {MIN_PAGE_SIZE}"
    return None


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
    implementation: Implementation = "auto",
) -> Float[Array, "B N H d"]:
    """Grouped-query attention of N rows a slot over `lengths` context tokens and over the rows themselves.

    Row i of slot b sees every context token j < lengths[b] (with a window, those with positions[b, i] - j < window)
    and the rows r with mask[b, i, r]. Softmax is fp32. Unused page entries may hold anything, NaN included.

    Args:
      q: queries, rotated and normed; H is a multiple of K.
      kv: keys (index 0) and values (index 1) of the rows.
      mask: which rows see which, or None for causal rows. Windows inside the rows are the caller's, in the mask.
      pages: the paged cache of all layers, S tokens a page; None for an empty context.
      layer: which layer of `pages` to read.
      block_tables: page numbers of each slot in token order; T·S bounds the context that is looked at.
      lengths: context tokens of each slot.
      scale: factor on the logits.
      window: sliding window in tokens, self included; None for all of the context.
      positions: absolute positions of the rows; needed with a window only.
      implementation: "auto", "xla" or "pallas".

    Returns:
      Attention output in q's dtype.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    if resolve("tree_attention", implementation, unsupported(q, kv, pages)) == "xla":
        return reference.tree_attention(
            q, kv, mask, pages, layer, block_tables, lengths, scale=scale, window=window, positions=positions
        )
    rows = q.shape[1] * (q.shape[2] // kv.shape[3])
    return kernel.tree_attention(
        q, kv, mask, pages, layer, block_tables, lengths, scale=scale, window=window, positions=positions,
        config=config_for(target_device().device_kind, q.dtype, q.shape[3], rows),
    )

"""Public entry of tree attention."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.tree_attention import reference


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
    resolve("tree_attention", implementation)
    return reference.tree_attention(
        q, kv, mask, pages, layer, block_tables, lengths, scale=scale, window=window, positions=positions
    )

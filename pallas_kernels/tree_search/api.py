"""Public entries of a tree's construction; the XLA reference is `dflash_jax.tree`, which asks here first."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.tree_search.candidates_kernel import CHUNK, top_candidates
from pallas_kernels.tree_search.costs import bordered
from pallas_kernels.tree_search.search_kernel import MAX_BUDGET, search

__all__ = ["bordered", "search", "search_serves", "top_candidates", "top_candidates_serve"]

# What the registers of one program hold.
MAX_CANDIDATES = 64
MAX_VOCAB = 1 << 20
# The search unrolls its loop over the spine.
MAX_LENGTH = 32


def _unsupported_logits(logits: Float[Array, "... V"], k: int) -> str | None:
    vocab = logits.shape[-1]
    if logits.dtype != jnp.float32:
        return f"dtype {logits.dtype} is not float32"
    if vocab % CHUNK or vocab > MAX_VOCAB:
        return f"{vocab} tokens are no multiple of {CHUNK} of at most {MAX_VOCAB}"
    return f"{k} candidates are more than {MAX_CANDIDATES}" if k > min(MAX_CANDIDATES, vocab) else None


def top_candidates_serve(
    logits: Float[Array, "... V"], k: int, implementation: Implementation = "auto"
) -> bool:
    """Whether `top_candidates` takes these logits.

    It gives the k largest, best first and equal ones by id, their ids, log Σ exp of all, and the costs of the k,
    `bordered`: those of their log-probabilities over these logits.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    return resolve("draft_candidates", implementation, _unsupported_logits(logits, k)) == "pallas"


def search_serves(shape: tuple[int, ...], budget: int, implementation: Implementation = "auto") -> bool:
    """Whether `search` builds trees of this budget from scores of this shape, [B, L, K].

    It takes their costs, `bordered`, and gives the fields of a `dflash_jax.tree.Tree` (tokens, parents, depths,
    ancestors, valid, order, log_probs), all as the reference does.

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    reason, (length, candidates) = None, shape[1:]
    if max(budget, candidates) > MAX_BUDGET or length > MAX_LENGTH:
        reason = (
            f"{budget} nodes of {candidates} candidates over {length} depths: at most {MAX_BUDGET} over {MAX_LENGTH}"
        )
    return resolve("tree_search", implementation, reason) == "pallas"

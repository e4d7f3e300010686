"""Acceptance rules: which token the target chooses after each verified row.

A rule sees the target's logits of every row and returns one token a row; the walk then descends while that token is a
child. A rule that draws each token from the target's exact distribution is lossless whatever the tree holds, because
a row is reached only if the draws above it led there (sample-and-match; see docs/architecture.md).
"""

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.sampling import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    TARGET_STREAM,
    SamplingState,
    at_token,
    best_token,
    gumbel,
    next_token_scores,
    probabilities,
    tempered,
    total,
    uniform,
)
from dflash_jax.sharding import Vocabulary
from dflash_jax.tree import Tree, chain_tree


class AcceptanceRule(Protocol):
    """Chooses the target's token after each row; hashable, because it is a static argument of the round."""

    def __call__(
        self,
        logits: Float[Array, "B N V"],
        tree: Tree,
        lengths: Int[Array, " B"],
        sampling: SamplingState | None,
        draft: Float[Array, "B L V"] | None,
        vocabulary: Vocabulary,
    ) -> Int[Array, "B N"]:
        """Returns one token a row.

        Args:
          logits: fp32 logits of the rows, on this device's slice of the vocabulary.
          tree: the rows.
          lengths: position of node 0 of each slot.
          sampling: parameters and seeds of the slots; None in a batch that is greedy throughout.
          draft: scores (log-probabilities up to a constant) that the tokens of a sampled chain were drawn from;
            None where drafts are a function of the past.
          vocabulary: what the slice is part of.
        """
        ...


def greedy(
    logits: Float[Array, "B N V"],
    tree: Tree,
    lengths: Int[Array, " B"],
    sampling: SamplingState | None,
    draft: Float[Array, "B L V"] | None,
    vocabulary: Vocabulary,
) -> Int[Array, "B N"]:
    """The most probable token; the smallest id among equals."""
    del tree, lengths, sampling, draft
    return vocabulary.argmax(logits)


def sample(
    logits: Float[Array, "B N V"],
    tree: Tree,
    lengths: Int[Array, " B"],
    sampling: SamplingState | None,
    draft: Float[Array, "B L V"] | None,
    vocabulary: Vocabulary,
) -> Int[Array, "B N"]:
    """Draws every row's token from the request's distribution (sample-and-match).

    Rows of one depth share their noise. At most one of them is reached, and which one is settled by the noise of
    smaller depths, so a row's draw is exact where it counts.
    """
    del draft
    assert sampling is not None
    # Filters look for thresholds in many passes, each of which would be an exchange: one gather costs less.
    logits = vocabulary.gather(logits)
    scores = next_token_scores(logits, tree, sampling)
    noise = gumbel(sampling, TARGET_STREAM, lengths, tree.max_depth + 1, logits.shape[-1])
    if logits.shape[1] > 1:
        noise = noise[jnp.arange(logits.shape[0])[:, None], tree.depths]
    return best_token(scores + noise)


def sampled_chain(
    anchor: Int[Array, " B"],
    log_probs: Float[Array, "B L V"],
    lengths: Int[Array, " B"],
    sampling: SamplingState,
) -> tuple[Tree, Float[Array, "B L V"]]:
    """A chain whose tokens are drawn from the drafter's marginals, for `reject_and_resample`.

    The marginals take the request's temperature, top-k, top-p and min-p. Any distribution would be lossless; this one
    is closer to the target's than the marginals as they are.

    Returns:
      The chain, and the scores whose softmax its tokens were drawn from.
    """
    scores = tempered(log_probs, sampling)
    noise = gumbel(sampling, DRAFT_STREAM, lengths, *log_probs.shape[1:])
    return chain_tree(anchor, best_token(scores + noise)), scores


def reject_and_resample(
    logits: Float[Array, "B N V"],
    tree: Tree,
    lengths: Int[Array, " B"],
    sampling: SamplingState | None,
    draft: Float[Array, "B L V"] | None,
    vocabulary: Vocabulary,
) -> Int[Array, "B N"]:
    """Speculative sampling on a chain drawn from q (arXiv 2211.17192, algorithm 1).

    A drafted token x is accepted with probability min(1, p(x) / q(x)), else a token is drawn from max(0, p - q),
    which x has no part in. After the last row the token is drawn from p. Draft, coin and residual are independent.
    Without a draft (after prefill) it is `sample`.
    """
    assert sampling is not None
    if draft is None:
        return sample(logits, tree, lengths, sampling, None, vocabulary)
    logits = vocabulary.gather(logits)
    scores = next_token_scores(logits, tree, sampling)
    p = probabilities(scores)
    # The last row has no child: nothing to accept, and q = 0 makes its residual p.
    q = jnp.pad(probabilities(draft), ((0, 0), (0, 1), (0, 0)))
    child = jnp.pad(tree.tokens[:, 1:], ((0, 0), (0, 1)))
    coin = uniform(sampling, ACCEPT_STREAM, lengths, logits.shape[1])
    accepted = coin * at_token(q, child) < at_token(p, child)
    accepted = accepted.at[:, -1].set(False)
    residual = jnp.maximum(p - q, 0.0)
    # Where p and q differ by rounding alone nothing may be left of the residual.
    residual = jnp.where(total(residual) > 0, residual, p)
    noise = gumbel(sampling, TARGET_STREAM, lengths, *logits.shape[1:])
    chosen = jnp.where(accepted, child, best_token(jnp.log(residual) + noise))
    return jnp.where(sampling.temperature[:, None] > 0, chosen, best_token(scores))

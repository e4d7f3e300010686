"""Acceptance rules: which token the target chooses after each verified row.

A rule sees the target's logits of every row and returns one token a row; the walk then descends while that token is a
child. A rule that draws each token from the target's exact distribution is lossless whatever the tree holds, because
a row is reached only if the draws above it led there (sample-and-match; see docs/architecture.md).
"""

from typing import Protocol

from jaxtyping import Array, Float, Int

from dflash_jax.sharding import Vocabulary
from dflash_jax.tree import Tree


class AcceptanceRule(Protocol):
    """Chooses the target's token after each row; hashable, because it is a static argument of the round."""

    def __call__(
        self, logits: Float[Array, "B N V"], tree: Tree, vocabulary: Vocabulary
    ) -> Int[Array, "B N"]:
        """Returns one token a row from fp32 logits, of which a device may hold a slice (see `Vocabulary`)."""
        ...


def greedy(logits: Float[Array, "B N V"], tree: Tree, vocabulary: Vocabulary) -> Int[Array, "B N"]:
    """The most probable token; the smallest id among equals."""
    del tree
    return vocabulary.argmax(logits)

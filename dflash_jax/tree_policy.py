"""Policies that say which prefixes deserve a row of the verified tree.

The drafter gives one distribution per depth, independent of the branch, so a prefix (a path from the
anchor) is a tuple of ranks, one per depth, and its score is the sum of one edge score per depth. A policy
chooses the edge scores and how much of the top-1 chain (the spine) is kept whatever its score; the search
in ``tree.py`` then returns the exact optimum. The objective: DDTree, https://github.com/liranringel/ddtree.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class TreePolicy:
    """What a tree is built for; override one or both methods of :class:`BestFirst` or :class:`SpineFirst`.

    A policy is frozen and hashable, so that it can be a static argument of ``jax.jit``. The search is exact
    for every policy that keeps this contract:

    1. ``edge_scores`` returns values <= 0: a prefix is then never better than its own beginning, and the
       selected set is closed under taking parents.
    2. Along the last axis they never increase: a rank can then be pruned by the better ranks before it.
    3. ``spine_nodes`` is a Python integer, known when the program is traced.

    What breaks it is read as the nearest score that keeps it: a positive one as 0, one that rises with the
    rank as the lowest before it, NaN as -inf.

    Scores add up over depths: what an edge is worth may depend on its depth, its rank and every
    log-probability given, but not on the branch it hangs from. An edge score of -inf forbids the edge: its
    prefixes never become nodes, even if rows of the budget stay unused.

    Example: trust the drafter less with each depth, and never take more than three siblings::

        @dataclasses.dataclass(frozen=True)
        class Cautious(BestFirst):
            doubt: float = 0.1  # nats per depth

            def edge_scores(self, log_probs):
                depth = jnp.arange(log_probs.shape[1])[None, :, None]
                rank = jnp.arange(log_probs.shape[2])
                return jnp.where(rank < 3, log_probs - self.doubt * depth, -jnp.inf)
    """

    def edge_scores(self, log_probs: Float[Array, "B L K"]) -> Float[Array, "B L K"]:
        """Scores, in nats, of the ``K`` best tokens of each depth.

        Args:
            log_probs: their log-probabilities under the drafter, best first; index 0 of ``L`` is depth 1. Only
                the depths and ranks that a tree of the budget can hold are given.

        Returns:
            Values <= 0 that do not increase along ``K``; -inf forbids an edge.
        """
        return log_probs

    def spine_nodes(self, length: int, budget: int) -> int:
        """How many nodes of the top-1 chain, from depth 1 down, come before all others.

        Args:
            length: number of depths ``L``.
            budget: number of nodes besides node 0. The result is clipped to both. If it takes the whole budget
                nothing is searched and the tree is a chain.
        """
        del length, budget
        return 0


@dataclasses.dataclass(frozen=True)
class BestFirst(TreePolicy):
    """Exactly the ``budget`` most probable prefixes: the longest walk to expect if the drafter is right.

    The engine's default. With as many nodes as the drafter has depths it gives up the end of the chain, which few walks
    reach, for siblings near the anchor.
    """


@dataclasses.dataclass(frozen=True)
class SpineFirst(TreePolicy):
    """The whole top-1 chain first, then the most probable other prefixes.

    Contains the plain chain of the same drafter, so it never accepts less. With ``budget <= L`` it is the
    chain.
    """

    def spine_nodes(self, length: int, budget: int) -> int:
        """All of the spine."""
        return min(length, budget)

"""What a verified tree comes to: the accepted path, where the text ends, the slots' counters, and evidence for budgets.

This is the reference of `pallas_kernels.tree_walk`, which does all of it in one launch.
"""

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.tree import Tree, Walk, walk
from pallas_kernels import tree_walk

if TYPE_CHECKING:
    from dflash_jax.round import DecodeState, RoundSpec


@struct.dataclass
class Evidence:
    """What rounds say about each of `RoundSpec.buckets` (K of them), summed over rounds; of inactive slots nothing.

    Trees of one policy are nested, so a round tells exactly what every smaller budget would have emitted in it. Entries
    of buckets above the budget that ran are those of that budget.

    Attributes:
      numbers: all of it in one array: rounds, then `reached`, then `predicted`.
    """

    numbers: Float[Array | np.ndarray, "B 1+2K"]

    @property
    def rounds(self) -> Float[Array | np.ndarray, " B"]:
        """Rounds in which the slot was active."""
        return self.numbers[:, 0]

    @property
    def reached(self) -> Float[Array | np.ndarray, "B K"]:
        """Tokens that a round of the bucket would have emitted, stop tokens and limits aside."""
        return self.numbers[:, 1 : 1 + self.numbers.shape[1] // 2]

    @property
    def predicted(self) -> Float[Array | np.ndarray, "B K"]:
        """The same, as the drafter's probabilities expect it."""
        return self.numbers[:, 1 + self.numbers.shape[1] // 2 :]


@struct.dataclass
class Settled:
    """A round's outcome; a slot that is not active emits nothing and keeps its counters.

    Attributes:
      walked: the accepted path and its tokens.
      count: tokens that the slot really emits, cut at stop tokens and at its limit.
      anchor, lengths, active, remaining, histogram: of the `DecodeState` after the round.
      evidence: with buckets and a tree.
    """

    walked: Walk
    count: Int[Array, " B"]
    anchor: Int[Array, " B"]
    lengths: Int[Array, " B"]
    active: Bool[Array, " B"]
    remaining: Int[Array, " B"]
    histogram: Int[Array, "B H"]
    evidence: Evidence | None = None


def settle(state: "DecodeState", tree: Tree, chosen: Int[Array, "B N"], spec: "RoundSpec") -> Settled:
    """Walks the tree by the target's tokens and says what that changes of the slots.

    Args:
      state: before the round.
      tree: its rows.
      chosen: the target's token after each row.
    """
    buckets = spec.buckets if spec.budget else ()
    if tree_walk.tree_walk_serves(tree.tokens.shape[1], spec.implementation):
        path, tokens, accepted, *rest = tree_walk.tree_walk(
            chosen, tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.valid, tree.order, tree.log_probs,
            state.stop_ids, state.anchor, state.lengths, state.active, state.remaining, state.histogram,
            depth=tree.max_depth + 1, buckets=buckets,
        )  # fmt: skip
        walked = Walk(path=path, count=accepted, bonus=tokens[:, -1], tokens=tokens)
        return Settled(walked, *rest[:6], evidence=Evidence(rest[6]) if buckets else None)
    walked = walk(tree, chosen)
    count, active = cut(state, walked.tokens, walked.count)
    last = jnp.maximum(count - 1, 0)[:, None]
    anchor = jnp.take_along_axis(walked.tokens, last, axis=1)[:, 0]
    bins = jnp.arange(state.histogram.shape[1])
    return Settled(
        walked=walked,
        count=count,
        anchor=jnp.where(count > 0, anchor, state.anchor),
        lengths=state.lengths + count,
        active=active,
        remaining=state.remaining - count,
        histogram=state.histogram + ((bins == count[:, None]) & (count > 0)[:, None]),
        evidence=tell(state.active, tree, walked, buckets) if buckets else None,
    )


def cut(state: "DecodeState", tokens: Int[Array, "B D"], count: Int[Array, " B"]) -> tuple[Array, Array]:
    """How many tokens a slot really emits (stop tokens, its limit), and whether it goes on."""
    order = jnp.arange(tokens.shape[1])
    is_stop = jnp.any(tokens[:, :, None] == state.stop_ids[:, None, :], axis=2) & (order < count[:, None])
    first_stop = jnp.min(jnp.where(is_stop, order, tokens.shape[1]), axis=1)
    kept = jnp.minimum(jnp.minimum(count, first_stop + 1), state.remaining)
    kept = jnp.where(state.active, kept, 0)
    goes_on = state.active & (first_stop >= kept) & (state.remaining > kept)
    return kept, goes_on


def tell(active: Bool[Array, " B"], tree: Tree, walked: Walk, buckets: tuple[int, ...]) -> Evidence:
    """What a round with a tree says about all buckets."""
    assert tree.log_probs is not None and tree.order is not None
    budgets = jnp.asarray(buckets)
    on_path = jnp.arange(walked.path.shape[1]) < walked.count[:, None]
    taken = jnp.take_along_axis(tree.order, walked.path, axis=1)
    reached = jnp.sum(on_path[:, :, None] & (taken[:, :, None] <= budgets), axis=1)
    probability = jnp.where(tree.valid, jnp.exp(tree.log_probs), 0.0)
    predicted = jnp.sum(probability[:, :, None] * (tree.order[:, :, None] <= budgets), axis=1)
    told = jnp.concatenate([jnp.ones((active.shape[0], 1)), reached, predicted], axis=1)
    return Evidence(jnp.where(active[:, None], told, 0.0).astype(jnp.float32))

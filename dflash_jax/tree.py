"""Token trees on the device: construction from the drafter's marginals, ancestor mask, and the walk.

A *prefix* of depth d is a tuple of d ranks; rank r at depth t is the r-th best token of the drafter's
distribution t. Its score is the sum of the edge scores that the policy gives (``tree_policy.py``), and the
best tree of ``budget`` nodes is the set of the best prefixes. The usual way to find it is a heap, one pop a
node; here the same set comes from ceil(log2(L)) batched steps:

* **Fixed point.** Negated edge scores become integer *costs* in units of 2**-20 nat, as fine as fp32
  resolves a sum of 16 nats. Integer sums do not depend on the order of addition, so a cost is the same
  however a prefix is put together, on every backend. A sum that reaches 1024 nats stays there and means
  *impossible*: such prefixes are never nodes.
* **Doubling.** Segments of 1, 2, 4, 8 ... depths are joined in pairs, as in a parallel prefix sum: the best
  segments of depths a+1..c are sums of good segments of a+1..b and of b+1..c. After step k every depth up
  to 2**k has its best complete prefixes.
* **Pruning.** Let a prefix contain segment i (counted from 0, best first) of the left list and then segment
  j of the right one. The (i+1)*(j+1)-1 other prefixes with segments no worse on both sides come before it,
  and so do the i+1 shorter ones that end with a left segment no worse than i. Hence (i+1)*(j+2) <= budget
  for every node of the tree: about budget*(ln(budget) - 1) pairs, a static list, instead of budget**2.

**Order.** Prefixes of one depth are ordered by descending score. Equal scores: cut the prefix into (left,
right), the length of right being the largest power of two below that of the whole; the smaller position of
right in its own order comes first, then the smaller position of left; a segment of one depth is ordered by
rank, and equal log-probabilities are ranked by token id. The spine is thus the first of its depth. Over all
depths the order is: reserved spine nodes, then descending score, then smaller depth, then the order within
the depth. A parent always precedes its children, so the first ``budget`` prefixes are closed under taking
parents, ties included.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.sharding import Vocabulary
from dflash_jax.tree_policy import BestFirst, SpineFirst, TreePolicy
from pallas_kernels import tree_search
from pallas_kernels.dispatch import Implementation
from pallas_kernels.tree_search.search_kernel import pairs_of

__all__ = [
    "BestFirst",
    "SpineFirst",
    "Tree",
    "TreePolicy",
    "Walk",
    "accepted_ranks",
    "ancestor_index",
    "build_tree",
    "candidates_needed",
    "chain_tree",
    "grow_tree",
    "root_only_tree",
    "top_candidates",
    "walk",
]

_UNITS_PER_NAT = 1 << 20
_IMPOSSIBLE = (1 << 30) - 1  # twice this is still an int32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "parents", "depths", "ancestors", "valid", "order", "log_probs"],
    meta_fields=["max_depth"],
)
@dataclasses.dataclass(frozen=True)
class Tree:
    """``N = budget + 1`` rows per slot, node 0 being the anchor.

    Rows are sorted by depth, and within a depth best first; so parents precede children and siblings are
    best first. Padding rows come last: token 0, parent -1, depth 0, ancestors themselves only, ``valid``
    False.

    Attributes:
        tokens: token ids.
        parents: row of the parent; -1 for node 0.
        depths: distance from node 0.
        ancestors: ``[b, i, j]`` is True where row j is row i or an ancestor of it.
        valid: False for padding rows.
        max_depth: static upper bound of the depths (``L``).
        order: when the policy took a row: node 0 is 0, the best prefix 1. The tree of a smaller budget b, if the
            policy takes its spine first in both, is the rows of order <= b. Budget + 1 for padding rows.
        log_probs: score of the row's prefix in nats (0 for node 0), under the policies here its log-probability;
            None where a chain was not built from scores.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depths: Int[Array, "B N"]
    ancestors: Bool[Array, "B N N"]
    valid: Bool[Array, "B N"]
    max_depth: int
    order: Int[Array, "B N"] | None = None
    log_probs: Float[Array, "B N"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """Result of :func:`walk`; ``D = max_depth + 1``.

    Attributes:
        path: rows accepted, from node 0 down; entries from ``count`` on repeat the last accepted row.
        count: number of accepted rows, node 0 included, 1..D. Also the number of tokens emitted.
        bonus: the target's token at the last accepted row; the next anchor.
        tokens: tokens emitted: those of the accepted children, then the bonus, which later entries repeat.
    """

    path: Int[Array, "B D"]
    count: Int[Array, "B"]
    bonus: Int[Array, "B"]
    tokens: Int[Array, "B D"]


def candidates_needed(length: int, vocab: int, budget: int, policy: TreePolicy) -> tuple[int, int]:
    """How many depths, and how many of the best tokens of each, a tree of this budget can use."""
    spine = _spine(length, budget, policy)
    # No path is longer than the number of nodes.
    return min(length, budget), 1 if spine == budget else min(budget, vocab)


def _spine(length: int, budget: int, policy: TreePolicy) -> int:
    return min(max(policy.spine_nodes(length, budget), 0), length, budget)


def top_candidates(
    logits: Float[Array, "B L V"], k: int, vocabulary: Vocabulary, implementation: Implementation = "xla"
) -> tuple[Float[Array, "B L K"], Int[Array, "B L K"]]:
    """The ``k`` best tokens of each depth, best first, equal values in the order of their ids.

    The only step that reads the drafter's vocabulary, of which each device may hold a slice.

    Returns:
        Their log-probabilities and their token ids.
    """
    local = min(k, logits.shape[-1])
    if k > 1 and tree_search.top_candidates_serve(logits, local, implementation):
        values, tokens, normaliser = tree_search.top_candidates(logits, k=local)
        values, tokens = vocabulary.merge_top_k(values, tokens, logits.shape[-1], k)
        return values - vocabulary.merge_log_normaliser(normaliser)[..., None], tokens
    values, tokens = vocabulary.top_k(logits, k)
    return values - vocabulary.log_normaliser(logits)[..., None], tokens


def build_tree(
    anchor: Int[Array, "B"], log_probs: Float[Array, "B L V"], budget: int, policy: TreePolicy | None = None
) -> Tree:
    """:func:`grow_tree` from whole marginals.

    Args:
        anchor: token of node 0.
        log_probs: the drafter's fp32 log-softmax at temperature 1, whatever the temperature of the request;
            index 0 of ``L`` is depth 1. -inf marks an impossible token.
        budget: number of rows besides node 0.
        policy: which prefixes count as best; :class:`SpineFirst` if not given.

    Raises:
        ValueError: as of :func:`grow_tree`.
    """
    policy = SpineFirst() if policy is None else policy
    length, vocab = log_probs.shape[1:]
    depths, k = candidates_needed(length, vocab, budget, policy)
    values, tokens = lax.top_k(log_probs[:, :depths], k)
    return grow_tree(anchor, values, tokens.astype(jnp.int32), budget, policy, length)


def grow_tree(
    anchor: Int[Array, "B"],
    values: Float[Array, "B l K"],
    tokens: Int[Array, "B l K"],
    budget: int,
    policy: TreePolicy,
    length: int,
    implementation: Implementation = "xla",
) -> Tree:
    """Builds the tree of the ``budget`` best prefixes under ``policy``, for each slot on its own.

    Everything is static in shape; under ``jax.jit`` mark ``budget``, ``policy`` and ``length`` static.

    Args:
        anchor: token of node 0.
        values: log-probabilities of the best tokens of each depth, best first, as many as
            :func:`candidates_needed` says.
        tokens: those tokens.
        budget: number of rows besides node 0. Where fewer prefixes are possible, the rest is padding.
        policy: which prefixes count as best.
        length: depths that the drafter has; the tree's ``max_depth``.
        implementation: kernel choice of the search; its result is the same.

    Raises:
        ValueError: ``budget < 1`` or ``length < 1`` (use :func:`root_only_tree` for a tree of one row).
    """
    if budget < 1 or length < 1:
        raise ValueError(f"a tree needs budget >= 1 and block length >= 1, got {budget} and {length}")
    spine = _spine(length, budget, policy)
    scores = policy.edge_scores(values)
    if scores is not values:  # the search relies on descending ranks, which the candidates have by themselves
        scores = lax.cummin(scores, axis=2)
    edges = _costs(scores)
    if spine == budget:  # nothing to search: the tree is the chain, up to where it becomes impossible
        total = lax.associative_scan(_join, edges[:, :, 0], axis=1)
        tree = chain_tree(anchor, tokens[:, :, 0], total < _IMPOSSIBLE)
        return dataclasses.replace(tree, max_depth=length, log_probs=_nats(total))
    if tree_search.search_serves(edges.shape[1], budget, implementation):
        left, right = pairs_of(budget)
        *fields, taken = tree_search.search(anchor, edges, tokens, left, right, budget=budget, spine=spine)
        tokens, parents, depths, ancestors, valid, order = fields
        return Tree(tokens, parents, depths, ancestors, valid, length, order, _nats(taken))
    costs, joins = _best_prefixes(edges, budget)
    levels, positions, order = _select(costs, spine, budget)
    tree = _assemble(anchor, tokens, _ranks(joins, levels, positions, edges.shape[1]), levels, order)
    taken = _take(costs.reshape(costs.shape[0], -1), jnp.maximum(levels, 0) * costs.shape[2] + positions)
    return dataclasses.replace(tree, max_depth=length, log_probs=_nats(taken))


def is_plain_chain(length: int, budget: int, policy: TreePolicy) -> bool:
    """Whether a policy's tree is the top-1 chain whatever the marginals are."""
    return _spine(length, budget, policy) == budget and type(policy).edge_scores is TreePolicy.edge_scores


def plain_chain(
    anchor: Int[Array, "B"], values: Float[Array, "B l 1"], tokens: Int[Array, "B l 1"], length: int
) -> Tree:
    """:func:`grow_tree` for policies of which :func:`is_plain_chain` is true, in fewer steps.

    A token that is impossible in the draft is a row as any other here: verified in vain.
    """
    tree = chain_tree(anchor, tokens[:, :, 0])
    log_probs = jnp.pad(jnp.cumsum(values[:, :, 0], axis=1), ((0, 0), (1, 0)))
    return dataclasses.replace(tree, max_depth=length, log_probs=log_probs)


def chain_tree(
    anchor: Int[Array, "B"], tokens: Int[Array, "B L"], valid: Bool[Array, "B L"] | None = None
) -> Tree:
    """The tree in which every node has one child: ``anchor`` followed by ``tokens``.

    Args:
        anchor: token of node 0.
        tokens: one drafted token per depth.
        valid: which of them are to be verified; must be a beginning of the chain. All, if not given.
    """
    batch, length = tokens.shape
    valid = jnp.ones((batch, length), bool) if valid is None else valid
    valid = jnp.concatenate([jnp.ones((batch, 1), bool), valid], axis=1)
    row = jnp.arange(length + 1, dtype=jnp.int32)
    both = valid[:, :, None] & valid[:, None, :]
    return Tree(
        tokens=jnp.where(valid, jnp.concatenate([anchor[:, None], tokens], axis=1), 0).astype(jnp.int32),
        parents=jnp.where(valid, row - 1, -1),
        depths=jnp.where(valid, row, 0),
        ancestors=((row[:, None] >= row) & both) | (row[:, None] == row),
        valid=valid,
        max_depth=length,
        order=jnp.where(valid, row, length + 1),
    )


def root_only_tree(anchor: Int[Array, "B"]) -> Tree:
    """The tree of node 0 alone: one autoregressive step."""
    return chain_tree(anchor, jnp.zeros((anchor.shape[0], 0), jnp.int32))


def walk(tree: Tree, target_tokens: Int[Array, "B N"]) -> Walk:
    """Descends from node 0 while the target's token at a row is one of its children.

    A row is reached exactly if every row from it up to node 0 carries the token that the target chose at
    its parent. Siblings have distinct tokens, so the rows reached form one path, and finding it takes no
    loop.

    Args:
        tree: the verified tree.
        target_tokens: the target's token after each row, greedy or sampled from its exact distribution.
            Values at padding rows are not used.
    """
    wanted = _take(target_tokens, jnp.maximum(tree.parents, 0))
    row = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)
    matched = tree.valid & ((row == 0) | (tree.tokens == wanted))
    accepted = jnp.all(~tree.ancestors | matched[:, None, :], axis=2)

    step = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)
    here = accepted[:, None, :] & (tree.depths[:, None, :] == step[:, None])
    path = jnp.max(jnp.where(here, row, -1), axis=2)  # -1 below the last accepted row
    count = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)
    path = jnp.where(path >= 0, path, jnp.max(path, axis=1, keepdims=True))
    tokens = _take(target_tokens, path)
    return Walk(path=path, count=count, bonus=tokens[:, -1], tokens=tokens)


def accepted_ranks(tree: Tree, walked: Walk) -> Int[Array, "B D"]:
    """For each token that a walk emits, its row's place among its siblings, from 0; -1 from the bonus on.

    Siblings are best first and a policy never skips one (it may only forbid a rank and all after it), so the place is
    the token's rank in the drafter's distribution of that depth.
    """
    row = jnp.arange(tree.parents.shape[1], dtype=jnp.int32)
    earlier = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (row < row[:, None])
    place = jnp.sum(earlier & tree.valid[:, None, :], axis=2, dtype=jnp.int32)
    # Entry d of the path is the row of depth d, and token d was emitted by accepting the row of depth d + 1.
    taken = jnp.pad(_take(place, walked.path[:, 1:]), ((0, 0), (0, 1)))
    return jnp.where(jnp.arange(taken.shape[1]) < walked.count[:, None] - 1, taken, -1)


def ancestor_index(parents: Int[Array, "B N"], k: int) -> Int[Array, "B N k"]:
    """Where the causal convolution finds the ``k`` inputs before each row of the tree.

    Entry ``[b, i, j - 1]`` is the row of the j-th ancestor of row i (j = 1: its parent). A row of depth d
    has d ancestors; for j > d the entry is ``-(j - d)``, a position in the committed window counted from
    its end: -1 is the newest committed token, the one just before the anchor. Padding rows read as node 0
    does: -1, -2, ... -k.
    """
    columns = []
    above = jnp.broadcast_to(jnp.arange(parents.shape[1], dtype=jnp.int32), parents.shape)
    for _ in range(k):
        above = jnp.where(above < 0, above - 1, _take(parents, jnp.maximum(above, 0)))
        columns.append(above)
    return jnp.stack(columns, axis=2)


def _take(values: Int[Array, "B M"], index: Int[Array, "B ..."]) -> Int[Array, "B ..."]:
    """``values[b, index[b, ...]]``; the index must be in bounds, which saves XLA the test."""
    flat = jnp.take_along_axis(values, index.reshape(index.shape[0], -1), axis=1, mode="promise_in_bounds")
    return flat.reshape(index.shape)


def _costs(scores: Float[Array, "B L K"]) -> Int[Array, "B L K"]:
    """Nats to integer costs; NaN and whatever is not above -1024 nats become impossible."""
    possible = scores > -_IMPOSSIBLE / _UNITS_PER_NAT
    units = jnp.round(jnp.where(possible, -jnp.minimum(scores.astype(jnp.float32), 0.0), 0.0) * _UNITS_PER_NAT)
    # Integers before the choice: fp32 would round the bound up, and two of it would leave int32.
    return jnp.where(possible, units.astype(jnp.int32), _IMPOSSIBLE)


def _nats(costs: Int[Array, "B n"]) -> Float[Array, "B N"]:
    """Costs of the rows after node 0 as scores of all rows."""
    return jnp.pad(-costs.astype(jnp.float32) / _UNITS_PER_NAT, ((0, 0), (1, 0)))


def _join(left: Int[Array, "..."], right: Int[Array, "..."]) -> Int[Array, "..."]:
    """Saturating sum of two costs; associative."""
    return jnp.minimum(left + right, _IMPOSSIBLE)


def _smallest(costs: Int[Array, "... M"], k: int) -> tuple[Int[Array, "... k"], Int[Array, "... k"]]:
    """The ``k`` smallest values in ascending order, equal ones by position, and their positions."""
    values, index = lax.top_k(-costs, k)
    return -values, index


def _best_prefixes(
    edges: Int[Array, "B L K"], budget: int
) -> tuple[Int[Array, "B L W"], list[Int[Array, "B _ W"]]]:
    """For each depth its best complete prefixes in order, as many as the tree can hold.

    Returns:
        Costs (``W = budget``), and for each doubling step which of ``pairs_of`` each entry was joined from,
        for the depths that the step joins (all but the first ``2**step``). Unused entries are impossible.
    """
    length, k = edges.shape[1:]
    costs = jnp.pad(edges, ((0, 0), (0, 0), (0, budget - k)), constant_values=_IMPOSSIBLE)
    left, right = pairs_of(budget)
    kept = min(budget, len(left))
    fill = ((0, 0), (0, 0), (0, budget - kept))
    joins = []
    span = 1
    while span < length:
        # Depths up to `span` are complete; a deeper segment is joined with the one that ends where it begins.
        sums, pairs = _smallest(_join(costs[:, :-span, left], costs[:, span:, right]), kept)
        joins.append(jnp.pad(pairs, fill))
        costs = jnp.concatenate([costs[:, :span], jnp.pad(sums, fill, constant_values=_IMPOSSIBLE)], axis=1)
        span *= 2
    return costs, joins


def _select(
    costs: Int[Array, "B L W"], spine: int, budget: int
) -> tuple[Int[Array, "B n"], Int[Array, "B n"], Int[Array, "B n"]]:
    """The ``budget`` best entries over all depths, in row order.

    Returns:
        For each row after node 0: index of its depth (-1: padding), position in the list of that depth, and as
        the how manieth it was taken, from 1.
    """
    batch, length, width = costs.shape
    reserved = (np.arange(width) == 0) & (np.arange(length) < spine)[:, None]
    keys = jnp.where(reserved & (costs < _IMPOSSIBLE), -1, costs)
    keys, entry = _smallest(keys.reshape(batch, -1), budget)
    # The lists are ordered, so the number of an entry is the row order: depth, then best first.
    taken = jnp.broadcast_to(jnp.arange(1, budget + 1, dtype=jnp.int32), entry.shape)
    entry, taken = lax.sort((jnp.where(keys < _IMPOSSIBLE, entry, length * width), taken), num_keys=1)
    return jnp.where(entry < length * width, entry // width, -1), entry % width, taken


def _ranks(
    joins: list[Int[Array, "B _ W"]], levels: Int[Array, "B n"], positions: Int[Array, "B n"], length: int
) -> Int[Array, "B n L"]:
    """Undoes the joins for the selected prefixes: the rank at each depth, -1 below their own depth."""
    # held[b, n, t]: position of the segment that ends at depth t, -1 if none does.
    held = jnp.where(levels[:, :, None] == np.arange(length), positions[:, :, None], -1)
    for step in reversed(range(len(joins))):
        span, width = 1 << step, joins[step].shape[2]
        lists = jnp.arange(length - span, dtype=jnp.int32) * width
        joined = held[:, :, span:]
        pair = _take(joins[step].reshape(held.shape[0], -1), lists + jnp.maximum(joined, 0))
        left, right = (jnp.where(joined >= 0, jnp.asarray(side)[pair], -1) for side in pairs_of(width))
        # At each depth at most one of the two ends.
        right = jnp.concatenate([held[:, :, :span], right], axis=2)
        held = jnp.maximum(right, jnp.pad(left, ((0, 0), (0, 0), (0, span)), constant_values=-1))
    return held


def _assemble(
    anchor: Int[Array, "B"],
    tokens: Int[Array, "B L K"],
    ranks: Int[Array, "B n L"],
    levels: Int[Array, "B n"],
    order: Int[Array, "B n"],
) -> Tree:
    """Turns selected prefixes into a tree; a row's ancestors are the rows whose ranks begin its own."""
    batch, length, k = tokens.shape
    own_rank = jnp.max(jnp.where(levels[:, :, None] == np.arange(length), ranks, 0), axis=2)
    own_token = _take(tokens.reshape(batch, -1), jnp.maximum(levels, 0) * k + own_rank)
    tokens = jnp.where(levels >= 0, own_token, 0)

    root = ((0, 0), (1, 0))
    valid = jnp.pad(levels >= 0, root, constant_values=True)
    ranks = jnp.pad(ranks, (*root, (0, 0)), constant_values=-1)
    begins = jnp.all((ranks[:, None] < 0) | (ranks[:, None] == ranks[:, :, None]), axis=3)
    row = np.arange(valid.shape[1], dtype=np.int32)
    ancestors = (begins & valid[:, :, None] & valid[:, None, :]) | (row[:, None] == row)
    # Rows are sorted by depth, so the parent is the last ancestor before the row itself.
    parents = jnp.max(jnp.where(ancestors & (row < row[:, None]), row, -1), axis=2)
    return Tree(
        tokens=jnp.concatenate([anchor[:, None].astype(jnp.int32), tokens], axis=1),
        parents=parents,
        depths=jnp.pad(levels + 1, root),
        ancestors=ancestors,
        valid=valid,
        max_depth=length,
        order=jnp.where(valid, jnp.pad(order, root), order.shape[1] + 1),
    )

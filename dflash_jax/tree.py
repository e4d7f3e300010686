"""Token trees on the device: construction from the drafter's marginals, ancestor mask, and the walk.

A *prefix* of depth d is a tuple of d ranks; rank r at depth t is the r-th best token of the drafter's
distribution t. Its score is the sum of the edge scores that the policy gives (``tree_policy.py``), and the
best tree of ``budget`` nodes is the set of the best prefixes, found as DDTree finds it, one node a step:

* **Candidates.** Every node that is taken has one candidate, its best child that is not taken yet. The best candidate
  of all is the next node: whatever else is not taken yet lies behind one of them, and a prefix never scores better than
  its own beginning, nor than the sibling before it.
* **Fixed point.** Negated edge scores become integer *costs* in units of 2**-20 nat, as fine as fp32
  resolves a sum of 16 nats. Integer sums do not depend on the order of addition, so a tree is the same on every
  backend. A sum that reaches 1024 nats stays there and means *impossible*: such prefixes are never nodes.

**Order.** Nodes are taken in this order: reserved spine nodes, then by descending score, then by smaller depth, then by
the parent that was taken first, then by rank; equal log-probabilities are ranked by token id. A parent always precedes
its children, ties included.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.sharding import Vocabulary
from dflash_jax.tree_policy import BestFirst, SpineFirst, TreePolicy
from pallas_kernels import tree_search
from pallas_kernels.dispatch import Implementation
from pallas_kernels.tree_search.costs import IMPOSSIBLE as _IMPOSSIBLE
from pallas_kernels.tree_search.costs import UNITS_PER_NAT as _UNITS_PER_NAT
from pallas_kernels.tree_search.costs import cost_of

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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens", "parents", "depths", "ancestors", "valid", "order", "log_probs", "earlier", "words", "paths"
    ],
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
        order: when the policy took a row: node 0 is 0, the best prefix 1. The tree of a smaller budget b, if the
            policy takes its spine first in both, is the rows of order <= b. Budget + 1 for padding rows.
        log_probs: score of the row's prefix in nats (0 for node 0), under the policies here its log-probability;
            None where a chain was not built from scores.
        earlier: what :func:`ancestor_index` says of them, where the search has been asked for it and says so itself.
        words: ``ancestors`` as words of bits (``pallas_kernels.ancestry.packed``), where the search gives them as well.
        paths: what the delta rule takes in their place, where the search has been asked for it
            (``gdn_scan.path_rows``).
        max_depth: static upper bound of the depths (``L``).
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depths: Int[Array, "B N"]
    ancestors: Bool[Array, "B N N"]
    valid: Bool[Array, "B N"]
    order: Int[Array, "B N"] | None = None
    log_probs: Float[Array, "B N"] | None = None
    earlier: Int[Array, "B N W"] | None = None
    words: Int[Array, "B N S"] | None = None
    paths: Int[Array, "B N P"] | None = None
    max_depth: int = dataclasses.field(kw_only=True)


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
) -> tuple[Float[Array, "B L K"], Int[Array, "B L K"], Int[Array, "B L+2 K+2"] | None]:
    """The ``k`` best tokens of each depth, best first, equal values in the order of their ids.

    The only step that reads the drafter's vocabulary, of which each device may hold a slice.

    Returns:
        Their log-probabilities, their token ids, and their costs for :func:`grow_tree` where a kernel says them.
    """
    local = min(k, logits.shape[-1])
    if k > 1 and tree_search.top_candidates_serve(logits, local, implementation):
        values, tokens, normaliser, costs = tree_search.top_candidates(logits, k=local)
        values, tokens = vocabulary.merge_top_k(values, tokens, logits.shape[-1], k)
        values = values - vocabulary.merge_log_normaliser(normaliser)[..., None]
        return values, tokens, costs if vocabulary.shards == 1 else None
    values, tokens = vocabulary.top_k(logits, k)
    return values - vocabulary.log_normaliser(logits)[..., None], tokens, None


def build_tree(
    anchor: Int[Array, "B"], log_probs: Float[Array, "B L V"], budget: int, policy: TreePolicy | None = None
) -> Tree:
    """:func:`grow_tree` from whole marginals.

    Args:
        anchor: token of node 0.
        log_probs: the drafter's fp32 log-softmax at temperature 1, whatever the temperature of the request;
            index 0 of ``L`` is depth 1. -inf marks an impossible token.
        budget: number of rows besides node 0.
        policy: which prefixes count as best; :class:`BestFirst` if not given.

    Raises:
        ValueError: as of :func:`grow_tree`.
    """
    policy = BestFirst() if policy is None else policy
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
    window: int = 0,
    costs: Int[Array, "B l+2 K+2"] | None = None,
    paths: int = 0,
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
        window: ancestors of each row that are wanted as well, see ``Tree.earlier``.
        paths: ``P`` of ``Tree.paths``, greater than ``length``; 0 for none.
        costs: those of the values, ``bordered``, which a policy of other scores does not use. The same as if not given.

    Raises:
        ValueError: ``budget < 1`` or ``length < 1`` (use :func:`root_only_tree` for a tree of one row).
    """
    if budget < 1 or length < 1:
        raise ValueError(f"a tree needs budget >= 1 and block length >= 1, got {budget} and {length}")
    spine = _spine(length, budget, policy)
    scores = policy.edge_scores(values)
    if scores is not values:  # the search relies on descending ranks, which the candidates have by themselves
        scores = lax.cummin(scores, axis=2)
    if spine == budget:  # nothing to search: the tree is the chain, up to where it becomes impossible
        total = lax.associative_scan(_join, cost_of(scores)[:, :, 0], axis=1)
        tree = chain_tree(anchor, tokens[:, :, 0], total < _IMPOSSIBLE)
        return dataclasses.replace(tree, max_depth=length, log_probs=_nats(total))
    if tree_search.search_serves(scores.shape, budget, implementation):
        if costs is None or scores is not values:
            costs = tree_search.bordered(cost_of(scores))
        found = tree_search.search(anchor, costs, tokens, budget=budget, spine=spine, window=window, paths=paths)
        return Tree(*found, max_depth=length)
    tree = _assemble(anchor, tokens, *_take_best(cost_of(scores), spine, budget))
    return dataclasses.replace(tree, max_depth=length)


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


def _nats(costs: Int[Array, "B n"]) -> Float[Array, "B N"]:
    """Costs of the rows after node 0 as scores of all rows."""
    return jnp.pad(-costs.astype(jnp.float32) / _UNITS_PER_NAT, ((0, 0), (1, 0)))


def _join(left: Int[Array, "..."], right: Int[Array, "..."]) -> Int[Array, "..."]:
    """Saturating sum of two costs; associative."""
    return jnp.minimum(left + right, _IMPOSSIBLE)


def _take_best(
    edges: Int[Array, "B L K"], spine: int, budget: int
) -> tuple[Int[Array, "B N"], Int[Array, "B N"], Int[Array, "B N"], Int[Array, "B N"]]:
    """The ``budget`` best prefixes, node by node in the order in which they are taken; node 0 is the anchor.

    Returns:
        For each node its parent, its rank, its depth and its cost. Nodes that are not there have depth -1, and all of
        them come last.
    """
    batch, length, k = edges.shape
    flat, node = edges.reshape(batch, -1), jnp.arange(budget + 1, dtype=jnp.int32)

    def edge(level: Int[Array, "B N"], rank: Int[Array, "B N"]) -> Int[Array, "B N"]:
        cost = _take(flat, jnp.clip(level, 0, length - 1) * k + jnp.minimum(rank, k - 1))
        return jnp.where((level < length) & (rank < k), cost, _IMPOSSIBLE)

    chain = lax.associative_scan(_join, edges[:, :spine, 0], axis=1)
    base = jnp.pad(chain, ((0, 0), (1, 0)))
    base = jnp.pad(base, ((0, 0), (0, budget - spine)), constant_values=_IMPOSSIBLE)
    held = jnp.sum(chain < _IMPOSSIBLE, axis=1, dtype=jnp.int32)  # reserved nodes that are possible
    there = node <= held[:, None]
    following = (node < held[:, None]).astype(jnp.int32)  # rank of the node's candidate
    depth = jnp.where(there, node, -1)
    cost = jnp.where(there, _join(base, edge(depth, following)), _IMPOSSIBLE)
    parent, rank = jnp.where(there, node - 1, -1), jnp.zeros_like(depth)

    def take(step: Int[Array, ""], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        base, cost, depth, following, parent, rank = carry
        best = jnp.min(cost, axis=1, keepdims=True)
        tied = jnp.where(cost == best, depth * node.shape[0] + node, jnp.iinfo(jnp.int32).max)
        own = jnp.min(tied, axis=1, keepdims=True) % node.shape[0]
        index = held[:, None] + 1 + step
        possible = (best < _IMPOSSIBLE) & (index <= budget)
        above, at, before = _take(depth, own), _take(following, own), _take(base, own)
        old, new = possible & (node == own), possible & (node == index)
        beside, below = _join(before, edge(above, at + 1)), _join(best, edge(above + 1, jnp.zeros_like(at)))
        return (
            jnp.where(new, best, base),
            jnp.where(new, below, jnp.where(old, beside, cost)),
            jnp.where(new, above + 1, depth),
            jnp.where(new, 0, jnp.where(old, at + 1, following)),
            jnp.where(new, own, parent),
            jnp.where(new, at, rank),
        )

    carry = (base, cost, depth, following, parent, rank)
    base, _, depth, _, parent, rank = lax.fori_loop(0, budget - jnp.min(held), take, carry)
    return parent, rank, depth, base


def _assemble(
    anchor: Int[Array, "B"],
    candidates: Int[Array, "B L K"],
    parent: Int[Array, "B N"],
    rank: Int[Array, "B N"],
    depth: Int[Array, "B N"],
    cost: Int[Array, "B N"],
) -> Tree:
    """Turns nodes into rows, sorted by depth and then as they were taken."""
    (batch, size), (_, length, k) = depth.shape, candidates.shape
    node, there = jnp.arange(size, dtype=jnp.int32), depth >= 0
    key = jnp.where(there, depth, length + 1) * size + node
    _, order = lax.sort((key, jnp.broadcast_to(node, key.shape)), num_keys=1)  # node of each row
    row = jnp.sum(key[:, None, :] < key[:, :, None], axis=2, dtype=jnp.int32)  # row of each node
    valid, depths, cost = _take(there, order), _take(depth, order), _take(cost, order)
    above = _take(parent, order)
    parents = jnp.where(above >= 0, _take(row, jnp.maximum(above, 0)), -1)
    tokens = _take(candidates.reshape(batch, -1), jnp.maximum(depths - 1, 0) * k + _take(rank, order))
    tokens = jnp.where(node == 0, anchor[:, None].astype(jnp.int32), jnp.where(valid, tokens, 0))

    def climb(_: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        ancestors, at = carry
        ancestors |= at[:, :, None] == node
        return ancestors, jnp.where(at >= 0, _take(parents, jnp.maximum(at, 0)), -1)

    start = (jnp.zeros((batch, size, size), bool), jnp.broadcast_to(node, key.shape))
    ancestors, _ = lax.fori_loop(0, length + 1, climb, start)
    depths, order = jnp.where(valid, depths, 0), jnp.where(valid, order, size)
    return Tree(tokens, parents, depths, ancestors, valid, order, _nats(cost[:, 1:]), max_depth=length)

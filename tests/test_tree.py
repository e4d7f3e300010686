"""Tree construction against exhaustive search, and the walk and ancestor tables against plain Python."""

import dataclasses
import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.sharding import Vocabulary
from dflash_jax.tree import (
    BestFirst,
    SpineFirst,
    Tree,
    ancestor_index,
    build_tree,
    chain_tree,
    root_only_tree,
    top_candidates,
    walk,
)

build = jax.jit(build_tree, static_argnums=(2, 3))
chain, root_only, descend = jax.jit(chain_tree), jax.jit(root_only_tree), jax.jit(walk)
SLOTS = 8
IMPOSSIBLE = 1024 << 20
ANCHOR = 7


@dataclasses.dataclass(frozen=True)
class Cautious(SpineFirst):
    """The example in TreePolicy's docstring."""

    doubt: float = 0.25

    def edge_scores(self, log_probs):
        depth = jnp.arange(log_probs.shape[1])[None, :, None]
        rank = jnp.arange(log_probs.shape[2])
        return jnp.where(rank < 3, log_probs - self.doubt * depth, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Shallow(BestFirst):
    """Nothing below depth 2."""

    def edge_scores(self, log_probs):
        return jnp.where(jnp.arange(log_probs.shape[1])[None, :, None] < 2, log_probs, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Broken(BestFirst):
    """Scores that rise with the rank, positive ones and NaN among them."""

    def edge_scores(self, log_probs):
        rank = jnp.arange(log_probs.shape[2])
        return jnp.where(rank == 4, jnp.nan, rank - 2.5 + 0 * log_probs)


def costs_of(scores):
    """Scores in nats -> integer costs, as documented: units of 2**-20 nat, 1024 nats or NaN impossible."""
    scores = np.asarray(scores, np.float32)
    units = np.rint(-np.minimum(np.nan_to_num(scores, neginf=-2000.0), 0).astype(np.float64) * 2**20)
    return np.where(scores > -1024, units, IMPOSSIBLE).astype(np.int64)


def exhaustive(log_probs, budget, spine, scores=None):
    """The tree by its definition: rows (ranks, token, parent) after node 0, from all prefixes."""
    tokens = np.argsort(-log_probs, axis=1, kind="stable")
    costs = costs_of(np.take_along_axis(log_probs, tokens, axis=1) if scores is None else scores)
    taken = {(): 0}  # in order, with the cost
    for _ in range(budget):
        best = None
        for number, (above, cost) in enumerate(taken.items()):
            if (depth := len(above)) == len(costs):
                continue
            for rank, edge in enumerate(costs[depth].tolist()):
                ranks, total = (*above, rank), cost + edge
                reserved = depth < spine and not any(ranks)
                key = (not reserved, 0 if reserved else total, depth, number, rank)
                if not reserved and spine == budget:
                    continue  # a chain, whether or not it is possible to its end
                if ranks not in taken and total < IMPOSSIBLE and (best is None or key < best[0]):
                    best = key, ranks, total
        if best is None:
            break
        taken[best[1]] = best[2]
    best = sorted(list(taken)[1:], key=len)  # stable
    row = {(): 0} | {ranks: i + 1 for i, ranks in enumerate(best)}
    return [(ranks, int(tokens[len(ranks) - 1, ranks[-1]]), row[ranks[:-1]]) for ranks in best]


def assert_rows(tree, slot, rows):
    """The slot holds exactly these rows, node 0 before and padding after them."""
    count = len(rows) + 1
    padding = tree.tokens.shape[1] - count
    assert tree.tokens[slot].tolist() == [ANCHOR, *(token for _, token, _ in rows), *[0] * padding]
    assert tree.parents[slot].tolist() == [-1, *(parent for *_, parent in rows), *[-1] * padding]
    assert tree.depths[slot].tolist() == [0, *(len(ranks) for ranks, *_ in rows), *[0] * padding]
    assert tree.valid[slot].tolist() == [True] * count + [False] * padding


def assert_well_formed(tree):
    """Topological rows, depths from parents, distinct siblings, ancestors = closure of parents."""
    tokens, parents, depths, ancestors, valid = (
        np.asarray(x) for x in (tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.valid)
    )
    for slot in range(len(tokens)):
        closure = np.eye(tokens.shape[1], dtype=bool)
        children = set()
        assert valid[slot, 0] and parents[slot, 0] == -1 and depths[slot, 0] == 0
        count = valid[slot].sum()
        assert valid[slot, :count].all()
        for i in range(1, count):
            parent = parents[slot, i]
            assert 0 <= parent < i and depths[slot, i] == depths[slot, parent] + 1
            assert depths[slot, i] >= depths[slot, i - 1] and depths[slot, i] <= tree.max_depth
            assert (parent, tokens[slot, i]) not in children
            children.add((parent, tokens[slot, i]))
            closure[i] |= closure[parent]
        assert (parents[slot, count:] == -1).all() and (tokens[slot, count:] == 0).all()
        np.testing.assert_array_equal(ancestors[slot], closure)


def batch(log_probs, budget, policy):
    """Builds on the device and checks the form; log_probs [slots, L, V]."""
    anchor = jnp.full(len(log_probs), ANCHOR, jnp.int32)
    tree = jax.device_get(build(anchor, jnp.asarray(log_probs, jnp.float32), budget, policy))
    assert_well_formed(tree)
    return tree


def softmaxed(seed, shape, sharpness=2.0):
    logits = sharpness * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))


# Block length, vocabulary, budget: budget below the block length; an odd length; a budget above the number of
# prefixes (2 + 4 + 8 + 16 = 30); a single depth; a single node.
SHAPES = [(5, 3, 3), (3, 4, 9), (4, 2, 40), (1, 5, 3), (3, 3, 1), (7, 2, 21)]


@pytest.mark.parametrize("policy", [BestFirst(), SpineFirst()], ids=["best", "spine"])
@pytest.mark.parametrize(("length", "vocab", "budget"), SHAPES)
def test_equals_exhaustive_search(length, vocab, budget, policy):
    # Ties of every kind, certain (0) and impossible (-inf) tokens, and sums past the 1024 nats.
    coarse = st.sampled_from([0.0, 0.0, -0.5, -1.0, -1.0, -2.0, -600.0, -1024.0, -1500.0, -np.inf])
    value = st.one_of(coarse, st.floats(-30, 0, width=32))
    grid = st.lists(value, min_size=length * vocab, max_size=length * vocab)

    @settings(max_examples=12, deadline=None)
    @given(st.lists(grid, min_size=SLOTS, max_size=SLOTS))
    def check(values):
        log_probs = np.asarray(values, np.float32).reshape(SLOTS, length, vocab) + 0.0  # no -0
        tree = batch(log_probs, budget, policy)
        spine = min(length, budget) if isinstance(policy, SpineFirst) else 0
        for slot in range(SLOTS):
            assert_rows(tree, slot, exhaustive(log_probs[slot], budget, spine))

    check()


def heap_best(costs, budget):
    """The costs of the `budget` best prefixes, by the sibling-or-first-child heap of DDTree."""
    heap, found = [(costs[0, 0], 0, 0)], []  # cost, depth index, rank
    while len(found) < budget:
        cost, depth, rank = heapq.heappop(heap)
        found.append(cost)
        if rank + 1 < costs.shape[1]:
            heapq.heappush(heap, (cost - costs[depth, rank] + costs[depth, rank + 1], depth, rank + 1))
        if depth + 1 < len(costs):
            heapq.heappush(heap, (cost + costs[depth + 1, 0], depth + 1, 0))
    return sorted(found)


def row_costs(tree, log_probs, slot):
    """Cost of every row after node 0, added up along its path."""
    total = [0]
    for i in range(1, tree.tokens.shape[1]):
        depth = tree.depths[slot, i]
        edge = costs_of(log_probs[slot, depth - 1, tree.tokens[slot, i]])
        total.append(total[tree.parents[slot, i]] + int(edge))
    return total[1:]


@pytest.mark.parametrize("budget", [15, 63])
def test_real_block_length_equals_the_heap(budget):
    sharpness = np.linspace(0.3, 12, SLOTS, dtype=np.float32)[:, None, None]
    log_probs = softmaxed(0, (SLOTS, 15, 90), sharpness)
    tree = batch(log_probs, budget, BestFirst())
    for slot in range(SLOTS):
        costs = costs_of(-np.sort(-log_probs[slot], axis=1))
        assert sorted(row_costs(tree, log_probs, slot)) == heap_best(costs, budget)


def test_spine_first_holds_the_chain_and_the_best_of_the_rest():
    log_probs = softmaxed(1, (SLOTS, 15, 90))
    best, spine = batch(log_probs, 63, BestFirst()), batch(log_probs, 63, SpineFirst())
    for slot in range(SLOTS):
        node, chain = 0, log_probs[slot].argmax(1)
        for token in chain:
            (node,) = np.nonzero((spine.parents[slot] == node) & (spine.tokens[slot] == token))[0]
        # Besides the spine it keeps the cheapest rows that best-first has, however many of them fit.
        rest = set(row_costs(spine, log_probs, slot)) - set(
            np.cumsum(costs_of(log_probs[slot].max(1))).tolist()
        )
        assert rest <= set(row_costs(best, log_probs, slot))


def test_siblings_and_depths_are_best_first():
    log_probs = softmaxed(2, (SLOTS, 15, 90))
    tree = batch(log_probs, 63, SpineFirst())
    for slot in range(SLOTS):
        keys = list(zip(tree.depths[slot, 1:], row_costs(tree, log_probs, slot), strict=True))
        assert keys == sorted(keys)


def test_default_policy_with_the_block_length_as_budget_is_the_chain():
    log_probs = softmaxed(3, (SLOTS, 5, 11))
    tree = batch(log_probs, 5, SpineFirst())
    expected = chain(jnp.full(SLOTS, ANCHOR), jnp.asarray(log_probs.argmax(2)))
    assert_well_formed(expected)
    assert expected.log_probs is None  # nobody scored it
    scores = np.cumsum(log_probs.max(2), axis=1)
    np.testing.assert_allclose(tree.log_probs[:, 1:], scores, atol=1e-5)
    tree = dataclasses.replace(tree, log_probs=None)
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert expected.parents[0].tolist() == [-1, 0, 1, 2, 3, 4]
    assert expected.max_depth == tree.max_depth == 5


@pytest.mark.parametrize("budget", [4, 6])
def test_spine_ends_where_it_becomes_impossible(budget):
    log_probs = softmaxed(10, (SLOTS, 4, 3))
    log_probs = np.where(np.arange(4)[:, None] == 2, -np.inf, log_probs)
    tree = batch(log_probs, budget, SpineFirst())
    for slot in range(SLOTS):
        assert_rows(tree, slot, exhaustive(log_probs[slot], budget, 4))
    # A budget that the spine takes whole is a shorter chain; a larger one goes to other prefixes.
    assert tree.valid.sum(1).tolist() == [3 if budget == 4 else 7] * SLOTS


def test_root_only_tree_is_one_autoregressive_step():
    tree = root_only(jnp.array([3, 4]))
    assert_well_formed(tree)
    assert tree.tokens.tolist() == [[3], [4]]
    result = descend(tree, jnp.array([[8], [9]]))
    assert (result.path.tolist(), result.count.tolist()) == ([[0], [0]], [1, 1])
    assert (result.bonus.tolist(), result.tokens.tolist()) == ([8, 9], [[8], [9]])


def test_slots_do_not_see_each_other():
    log_probs = softmaxed(4, (SLOTS, 3, 4))
    order = np.random.default_rng(5).permutation(SLOTS)
    tree, permuted = batch(log_probs, 9, SpineFirst()), batch(log_probs[order], 9, SpineFirst())
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(permuted), strict=True):
        np.testing.assert_array_equal(one[order], other)


def test_custom_policies():
    log_probs = softmaxed(6, (SLOTS, 3, 4))
    cautious, shallow = batch(log_probs, 9, Cautious()), batch(log_probs, 15, Shallow())
    for slot in range(SLOTS):
        scores = (
            -np.sort(-log_probs[slot], axis=1) - np.float32(0.25) * np.arange(3, dtype=np.float32)[:, None]
        )
        scores[:, 3] = -np.inf
        assert_rows(cautious, slot, exhaustive(log_probs[slot], 9, 3, scores))
        assert max(np.bincount(cautious.parents[slot, 1:])) <= 3
    assert shallow.depths.max() == 2  # 4 + 16 prefixes for 15 rows
    assert batch(log_probs, 25, Shallow()).valid.sum(1).tolist() == [21] * SLOTS


def test_broken_policy_still_gives_a_tree():
    log_probs = softmaxed(7, (SLOTS, 3, 6))
    tree = batch(log_probs, 30, Broken())
    # Every rank before the NaN counts as much as the first, -2.5 nats, and the rest as impossible.
    scores = np.full((3, 6), -2.5)
    scores[:, 4:] = -np.inf
    for slot in range(SLOTS):
        assert_rows(tree, slot, exhaustive(log_probs[slot], 30, 0, scores))


def test_nan_depth_ends_the_tree():
    log_probs = softmaxed(8, (SLOTS, 3, 4))
    log_probs = np.where(np.arange(3)[:, None] == 1, np.nan, log_probs)
    tree = batch(log_probs, 9, BestFirst())
    assert tree.depths.max() == 1 and tree.valid.sum(1).tolist() == [5] * SLOTS


def test_top_candidates_break_ties_by_token_id():
    values, tokens, _ = top_candidates(jnp.log(jnp.array([[[0.1, 0.3, 0.1, 0.3, 0.2]]])), 4, Vocabulary())
    assert tokens.tolist() == [[[1, 3, 4, 0]]]
    assert np.allclose(np.exp(values), [[[0.3, 0.3, 0.2, 0.1]]])


@pytest.mark.parametrize(("budget", "length"), [(0, 3), (3, 0)])
def test_empty_trees_are_refused(budget, length):
    with pytest.raises(ValueError, match="budget >= 1 and block length >= 1"):
        build_tree(jnp.zeros(1, jnp.int32), jnp.zeros((1, length, 4)), budget)


def python_walk(tree, slot, target_tokens):
    """The walk one step at a time: path and emitted tokens."""
    path, emitted = [0], []
    while True:
        token = int(target_tokens[path[-1]])
        emitted.append(token)
        child = [
            i
            for i in range(tree.tokens.shape[1])
            if tree.valid[slot, i] and tree.parents[slot, i] == path[-1] and tree.tokens[slot, i] == token
        ]
        if not child:
            return path, emitted
        path += child


@pytest.mark.parametrize(("length", "vocab", "budget"), [(3, 3, 20), (4, 2, 40)])
def test_walk_equals_plain_python(length, vocab, budget):
    depth = length + 1
    reached = set()
    for seed in range(6):
        tree = batch(softmaxed(seed, (SLOTS, length, vocab), 0.7), budget, BestFirst())
        # In every other slot the target may choose a token that no node has.
        highest = vocab + np.arange(SLOTS)[:, None] % 2
        target = np.random.default_rng(seed).integers(0, highest, tree.tokens.shape).astype(np.int32)
        result = jax.device_get(descend(jax.tree.map(jnp.asarray, tree), jnp.asarray(target)))
        for slot in range(SLOTS):
            path, emitted = python_walk(tree, slot, target[slot])
            count = len(path)
            assert result.count[slot] == count == len(emitted)
            assert result.path[slot].tolist() == path + path[-1:] * (depth - count)
            assert result.tokens[slot].tolist() == emitted + emitted[-1:] * (depth - count)
            assert result.bonus[slot] == emitted[-1]
            reached.add(count)
    assert {1, depth} <= reached  # both a miss at node 0 and a whole path were seen


def test_walk_never_takes_a_padding_row():
    tree = chain(jnp.array([5]), jnp.array([[0, 0, 0]]), jnp.array([[True, False, False]]))
    result = descend(tree, jnp.zeros((1, 4), jnp.int32))  # the token of padding rows, everywhere
    assert result.count.tolist() == [2]
    assert result.path.tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize("budget", [9, 40])
def test_ancestor_index_equals_plain_python(budget):
    tree = batch(softmaxed(9, (SLOTS, 4, 2), 1.0), budget, SpineFirst())
    index = np.asarray(ancestor_index(jnp.asarray(tree.parents), 3))
    assert index.shape == (SLOTS, budget + 1, 3)
    for slot, row in itertools.product(range(SLOTS), range(budget + 1)):
        expected, above = [], row
        for _ in range(3):
            above = above - 1 if above < 0 else int(tree.parents[slot, above])
            expected.append(above)
        assert index[slot, row].tolist() == expected
        depth = tree.depths[slot, row]
        for j in range(1, 4):
            if j > depth:
                assert index[slot, row, j - 1] == -(j - depth)
            else:
                ancestors = np.nonzero(tree.ancestors[slot, row])[0]
                assert index[slot, row, j - 1] == ancestors[::-1][j]


def test_tree_is_a_pytree_with_a_static_depth():
    tree = root_only(jnp.array([1]))
    assert len(jax.tree.leaves(tree)) == 6  # all fields but the depth, and scores, which only a search gives
    assert isinstance(jax.jit(functools.partial(jax.tree.map, lambda x: x))(tree), Tree)


@pytest.mark.parametrize("value", [-np.inf, np.nan, -1e9])
@pytest.mark.parametrize(("policy", "budget"), [(SpineFirst(), 7), (SpineFirst(), 30), (BestFirst(), 30)])
def test_marginals_without_a_possible_token_give_the_anchor_alone(value, policy, budget):
    """Costs of several impossible depths add up without wrapping around."""
    tree = build_tree(jnp.array([5]), jnp.full((1, 7, 16), value, jnp.float32), budget, policy)
    np.testing.assert_array_equal(np.asarray(tree.valid[0]), np.arange(budget + 1) == 0)

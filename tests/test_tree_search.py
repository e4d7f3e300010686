"""The kernels that build a tree against the reference, to the last bit: candidates, ties, impossible prefixes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import tree
from dflash_jax.sharding import Vocabulary
from dflash_jax.tree_policy import BestFirst, SpineFirst
from pallas_kernels import tree_search as op
from pallas_kernels.ancestry import LENGTH, SHARED, packed, paths_of, unpacked
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.tree_search import candidates_kernel, search_kernel
from pallas_kernels.tree_search.costs import IMPOSSIBLE, UNITS_PER_NAT, cost_of
from pallas_kernels.tree_search.shapes import BUDGETS, VOCABULARIES, cases

KERNELS = [True, pytest.param(False, marks=pytest.mark.gpu)]  # interpreted, compiled
FIELDS = ("tokens", "parents", "depths", "ancestors", "valid", "order", "log_probs")


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are built with the kernels; interpreted, they are served everywhere."""
    if request.param:
        monkeypatch.setattr(op, "top_candidates_serve", lambda *_: True)
        monkeypatch.setattr(op, "search_serves", lambda *_: True)
        for name, module in (("top_candidates", candidates_kernel), ("search", search_kernel)):
            own = getattr(module, name)
            monkeypatch.setattr(op, name, lambda *a, own=own, **k: own(*a, **k, interpret=True))


def logits_of(kind: str, rng: np.random.Generator, *shape: int) -> jax.Array:
    x = 3 * rng.normal(size=shape).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    if kind == "impossible":
        x[..., ::3] = -np.inf
    if kind == "few":  # fewer possible tokens than candidates
        x[..., 5:] = -np.inf
    return jnp.asarray(x)


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize("kind", ["normal", "ties", "impossible", "few"])
@pytest.mark.parametrize(("vocab", "k"), [(2048, 31), (2048, 15), (256, 63), (128 * 70, 63), (49152, 31)])
def test_candidates_are_those_of_top_k(kernels: None, kind: str, vocab: int, k: int):
    x = logits_of(kind, np.random.default_rng(0), 2, 3, vocab)
    values, tokens, normaliser, costs = op.top_candidates(x, k=k)
    want, ids = jax.lax.top_k(x, k)
    assert np.array_equal(values, want) and np.array_equal(tokens, ids)
    np.testing.assert_allclose(normaliser, jax.nn.logsumexp(x, axis=-1), rtol=1e-6)
    assert costs.shape == (2, 5, k + 2)
    assert np.array_equal(costs[:, :3, :k], cost_of(values - normaliser[..., None]))
    assert np.all(costs[:, :3, k] == IMPOSSIBLE) and np.all(costs[:, 3, 0] == IMPOSSIBLE)


def test_costs_are_rounded_nats():
    """To the nearest, halves to even; what cannot be a sum of costs is impossible."""
    scores = np.concatenate([-np.geomspace(2.0**-23, 1100, 5000), [0.0, -0.0, 1.0, -np.inf, np.nan]]).astype(np.float32)
    scores = np.concatenate([scores, -(np.arange(9) + 0.5) / UNITS_PER_NAT]).astype(np.float32)
    possible = scores > -IMPOSSIBLE / UNITS_PER_NAT
    exact = np.rint(-np.minimum(scores[possible], 0).astype(np.float64) * UNITS_PER_NAT)
    got = np.asarray(cost_of(jnp.asarray(scores)))
    assert np.array_equal(got[possible], exact) and np.all(got[~possible] == IMPOSSIBLE)


def check_paths(got: np.ndarray, parents: np.ndarray) -> None:
    """The rows of every path, in any order, and each row in exactly one as its own; after them a length of 0."""
    for found, wanted, above in zip(got, paths_of(parents, got.shape[2]), parents, strict=True):
        lengths = found[:, 0] >> LENGTH
        count = np.count_nonzero(lengths)
        assert np.all(lengths[:count])
        rows = [path[:size] for path, size in zip(found, lengths[:count], strict=False)]
        want = [path[: path[0] >> LENGTH] & (SHARED - 1) for path in wanted]
        assert sorted((row & (SHARED - 1)).tolist() for row in rows) == sorted(x.tolist() for x in want if len(x))
        own = np.concatenate([row[row & SHARED == 0] & (SHARED - 1) for row in rows])
        assert sorted(own) == list(range(len(above)))


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize("policy", [SpineFirst(), BestFirst()])
@pytest.mark.parametrize(
    ("length", "k", "budget"),
    [
        (15, 31, 31), (15, 63, 63), (9, 31, 31), (1, 5, 5), (2, 7, 7), (3, 4, 6), (7, 15, 15), (5, 2, 11), (16, 40, 40),
        (15, 64, 127), (15, 64, 255),
    ],
)
def test_trees_are_those_of_the_reference(kernels: None, policy: Any, length: int, k: int, budget: int):
    rng = np.random.default_rng(length)
    for kind in ("normal", "ties", "impossible", "unlikely", "short"):
        scores = -np.sort(rng.exponential(60 if kind == "unlikely" else 0.5, size=(2, length, k)), axis=2)
        if kind == "ties":
            scores = np.round(scores)
        if kind == "impossible":
            scores[:, :, k // 2 :] = -np.inf
        if kind == "short":
            scores[0, min(1, length - 1) :] = -np.inf
        values = jnp.asarray(scores, jnp.float32)
        tokens = jnp.asarray(rng.integers(0, 1000, size=values.shape), jnp.int32)
        anchor = jnp.asarray([3, 4], jnp.int32)
        size = 16 if length < 16 else 32
        got = tree.grow_tree(anchor, values, tokens, budget, policy, length, "pallas", window=3, paths=size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(op, "search_serves", lambda *_: False)
            want = tree.grow_tree(anchor, values, tokens, budget, policy, length)
        for name in FIELDS:
            assert np.array_equal(getattr(got, name), getattr(want, name)), (kind, name)
        if not tree.is_plain_chain(length, budget, policy):
            assert np.array_equal(got.earlier, tree.ancestor_index(want.parents, 3)), kind
            assert got.paths is not None
            check_paths(np.asarray(got.paths), np.asarray(want.parents))
            if budget < 128:
                assert np.array_equal(got.words, packed(want.ancestors)), kind
                assert np.array_equal(unpacked(got.words), want.ancestors), kind
        assert got.max_depth == want.max_depth
        if isinstance(policy, BestFirst):  # costs of its own: of their border only what must be impossible counts
            costs = np.array(op.bordered(cost_of(values)))
            rest = np.ones(costs.shape[1:], bool)
            rest[:length, : k + 1] = rest[length, 0] = False
            costs[:, rest] = rng.integers(0, 100, size=(2, rest.sum()))
            own = tree.grow_tree(anchor, values, tokens, budget, policy, length, "pallas", costs=jnp.asarray(costs))
            assert all(np.array_equal(getattr(own, name), getattr(want, name)) for name in FIELDS), kind


@pytest.mark.gpu
def test_a_round_asks_for_them():
    x = logits_of("normal", np.random.default_rng(1), 1, 15, 2048)
    values, tokens, costs = tree.top_candidates(x, 31, Vocabulary(), "pallas")
    want, ids, _ = tree.top_candidates(x, 31, Vocabulary(), "xla")
    assert np.array_equal(tokens, ids)
    np.testing.assert_allclose(values, want, rtol=1e-5, atol=1e-5)
    one, other = (
        tree.grow_tree(jnp.zeros(1, jnp.int32), want, ids, 31, SpineFirst(), 15, name) for name in ("pallas", "xla")
    )
    assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in FIELDS)
    own = tree.grow_tree(jnp.zeros(1, jnp.int32), values, tokens, 31, BestFirst(), 15, "pallas", costs=costs)
    other = tree.grow_tree(jnp.zeros(1, jnp.int32), values, tokens, 31, BestFirst(), 15, "xla")
    assert all(np.array_equal(getattr(own, name), getattr(other, name)) for name in FIELDS)


@pytest.mark.gpu
def test_what_the_kernels_do_not_take_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="100 tokens are no multiple of 128"):
        op.top_candidates_serve(jnp.ones((1, 100)), 3, "pallas")
    with pytest.raises(UnsupportedError, match="65 candidates are more than 64"):
        op.top_candidates_serve(jnp.ones((1, 1024)), 65, "pallas")
    with pytest.raises(UnsupportedError, match="1024 nodes of 64 candidates over 15 depths: at most 1023 over 32"):
        op.search_serves((1, 15, 64), 1024, "pallas")
    assert not op.search_serves((1, 15, 64), 1024)


def test_every_named_case_traces_and_has_its_own_name():
    names = [name for name, function, arguments in cases("any") if jax.eval_shape(function, *arguments)]
    assert len(names) == len(set(names)) == 2 * len(VOCABULARIES) + len(BUDGETS)

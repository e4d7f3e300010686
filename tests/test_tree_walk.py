"""The kernel that settles a round against its reference: random trees, stop tokens, limits, slots at rest."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import settle as reference
from dflash_jax.round import DecodeState, RoundSpec
from dflash_jax.tree import SpineFirst, grow_tree, root_only_tree
from pallas_kernels import tree_walk as op
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.tree_walk import kernel
from pallas_kernels.tree_walk.shapes import ROWS, cases

KERNELS = [True, pytest.param(False, marks=pytest.mark.gpu)]  # interpreted, compiled
VOCAB, SLOTS = 7, 6  # few tokens, so that walks get far


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are settled with the kernel; interpreted, it is served everywhere."""
    if request.param:
        monkeypatch.setattr(op, "tree_walk_serves", lambda *_: True)
        monkeypatch.setattr(op, "tree_walk", functools.partial(kernel.tree_walk, interpret=True))


def state_of(rng: np.random.Generator, stops: int, bins: int) -> DecodeState:
    def numbers(low: int, high: int, *size: int) -> jax.Array:
        return jnp.asarray(rng.integers(low, high, size=(SLOTS, *size)), jnp.int32)

    return DecodeState(
        cache=None, block_tables=None, taps=None, num_taps=None,  # type: ignore[arg-type]
        lengths=numbers(0, 99), anchor=numbers(0, VOCAB), active=jnp.asarray(rng.random(SLOTS) < 0.8),
        remaining=numbers(1, 20), stop_ids=numbers(-1, 3 * VOCAB, stops), histogram=numbers(0, 9, bins),
    )  # fmt: skip


def check(state: DecodeState, tree: Any, chosen: jax.Array, spec: RoundSpec) -> reference.Settled:
    got = reference.settle(state, tree, chosen, spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "tree_walk_serves", lambda *_: False)
        want = reference.settle(state, tree, chosen, spec)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, own), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert own.dtype == other.dtype and own.shape == other.shape, path
        if own.dtype == jnp.float32:
            np.testing.assert_allclose(own, other, rtol=1e-5)
        else:
            assert np.array_equal(own, other), path
    return got


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize("buckets", [(), (0, 3, 7, 15)])
@pytest.mark.parametrize(("length", "budget"), [(7, 7), (7, 15), (5, 20), (15, 63), (2, 4)])
def test_rounds_come_to_what_the_reference_says(kernels: None, buckets: tuple[int, ...], length: int, budget: int):
    rng = np.random.default_rng(length + budget)
    spec = RoundSpec(budget, length + 1, buckets=buckets)
    counts = set()
    for trial in range(12):
        scores = -np.sort(rng.exponential(0.4, size=(SLOTS, length, VOCAB)), axis=2)
        if trial % 3 == 2:
            scores[:2, 1:, 1:] = -np.inf  # few prefixes: rows are left over
        tokens = np.stack([[rng.permutation(VOCAB) for _ in range(length)] for _ in range(SLOTS)])
        k = min(budget, VOCAB)
        k = 1 if budget == length else k
        tree = grow_tree(
            jnp.zeros((SLOTS,), jnp.int32), jnp.asarray(scores[..., :k], jnp.float32),
            jnp.asarray(tokens[..., :k], jnp.int32), budget, SpineFirst(), length,
        )  # fmt: skip
        # The target likes what the drafter likes best, or anything.
        best = np.concatenate([tokens[:, :, 0], tokens[:, -1:, 1]], axis=1)[np.arange(SLOTS)[:, None], tree.depths]
        anything = rng.integers(0, VOCAB, size=best.shape)
        chosen = jnp.asarray(np.where(rng.random(best.shape) < 0.9, best, anything), jnp.int32)
        settled = check(state_of(rng, 1 + trial % 3, length + 2), tree, chosen, spec)
        counts |= set(np.asarray(settled.count).tolist())
    assert 0 in counts and len(counts) > min(3, length)


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
def test_one_row(kernels: None):
    rng = np.random.default_rng(3)
    for _ in range(5):
        state = state_of(rng, 2, 2)
        chosen = jnp.asarray(rng.integers(0, VOCAB, size=(SLOTS, 1)), jnp.int32)
        settled = check(state, root_only_tree(state.anchor), chosen, RoundSpec(0, buckets=(0, 7)))
        assert np.array_equal(settled.count, state.active)


@pytest.mark.gpu
def test_wide_trees_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="256 tree rows are more than 128"):
        op.tree_walk_serves(256, "pallas")
    assert not op.tree_walk_serves(256)


def test_every_named_case_traces_and_has_its_own_name():
    names = [name for name, function, arguments in cases("any") if jax.eval_shape(function, *arguments)]
    assert len(names) == len(set(names)) == 2 * len(ROWS)

"""The round's contract: a tree row equals its path run alone, a commit equals autoregressive decoding."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import Cache, commit, commit_causal, init_cache
from dflash_jax.round import RoundSpec, verify
from dflash_jax.target import Rows, Target
from dflash_jax.tree import Tree
from tests.models import VOCAB, random_drafter, random_target

PAGE, PAGES = 16, 8
SPEC = RoundSpec(budget=1, block_size=2)


def close(actual: object, expected: object, tolerance: float = 1e-5) -> None:
    """Relative to the expected array's norm."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(actual).all()
    assert np.linalg.norm(actual - expected) <= tolerance * max(np.linalg.norm(expected), 1e-6)


@dataclasses.dataclass(frozen=True)
class Slots:
    """What `verify` reads of a decode state."""

    cache: Cache
    block_tables: jax.Array
    lengths: jax.Array


def make_tree(parents: np.ndarray, tokens: np.ndarray) -> Tree:
    """A tree of one slot from parents in topological order."""
    rows = len(parents)
    ancestors, depths = np.eye(rows, dtype=bool), np.zeros(rows, np.int32)
    for row in range(1, rows):
        ancestors[row] |= ancestors[parents[row]]
        depths[row] = depths[parents[row]] + 1
    return Tree(
        tokens=jnp.asarray(tokens)[None], parents=jnp.asarray(parents)[None], depths=jnp.asarray(depths)[None],
        ancestors=jnp.asarray(ancestors)[None], valid=jnp.ones((1, rows), bool), max_depth=int(depths.max()),
    )  # fmt: skip


@functools.cache
def target() -> Target:
    return random_target(3)


@functools.cache
def functions() -> dict:
    model = target()

    @jax.jit
    def prefill(cache: Cache, tokens: jax.Array, count: jax.Array, table: jax.Array) -> Cache:
        zero = jnp.zeros((1,), jnp.int32)
        rows = Rows(tokens[None], jnp.arange(len(tokens))[None], (jnp.arange(len(tokens)) < count)[None])
        out = model(rows, dataclasses.replace(model.empty_context(1)))
        return commit_causal(cache, out.updates, table, zero, zero, count[None])

    @jax.jit
    def run(slots: tuple, tree: Tree) -> tuple:
        out = verify(model, Slots(*slots), tree, (0, 2), SPEC)
        return model.logits(out.hidden), out.taps, out.updates

    @jax.jit
    def apply(slots: tuple, updates: object, path: jax.Array, count: jax.Array) -> Cache:
        return commit(slots[0], updates, slots[1], slots[2], path, count)

    return {"prefill": prefill, "run": run, "commit": apply}


def context(prompt: np.ndarray, poison: bool = True) -> tuple:
    """Caches, scattered block table and length of one slot after a prompt; unused pages hold NaN."""
    cache = init_cache(target().config, None, slots=1, pages=PAGES, page_size=PAGE, dtype=jnp.float32)
    if poison:
        cache = dataclasses.replace(cache, kv=jnp.full_like(cache.kv, jnp.nan))
    table = jnp.asarray([[5, 2, 7, 0, 3, 1, 6, 4]], jnp.int32)
    padded = np.zeros(64, np.int32)
    padded[: len(prompt)] = prompt
    cache = functions()["prefill"](cache, jnp.asarray(padded), jnp.int32(len(prompt)), table)
    return cache, table, jnp.asarray([len(prompt)], jnp.int32)


def random_parents(rng: np.random.Generator, rows: int, max_depth: int, shape: str) -> np.ndarray:
    parents, depths = np.full(rows, -1, np.int32), np.zeros(rows, int)
    for row in range(1, rows):
        allowed = np.flatnonzero(depths[:row] < max_depth)
        parents[row] = allowed[-1] if shape == "deep" and rng.random() < 0.8 else rng.choice(allowed)
        depths[row] = depths[parents[row]] + 1
    return parents


def path_of(parents: np.ndarray, row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = int(parents[row])
    return path[::-1]


def check_tree(rng: np.random.Generator, rows: int, max_depth: int, shape: str, prompt: np.ndarray) -> None:
    """Every row's logits and taps against its path decoded one token at a time; then the commit of one path."""
    call = functions()
    slots = context(prompt)
    parents = random_parents(rng, rows, max_depth, shape)
    repeated = len(set(prompt.tolist())) == 1
    tokens = np.full(rows, prompt[0], np.int32) if repeated else rng.integers(0, VOCAB, rows).astype(np.int32)
    logits, taps, updates = call["run"](slots, make_tree(parents, tokens))

    # Depth first, so that a prefix is decoded once; the state after each row is kept for its children.
    states: dict[int, tuple] = {-1: slots}
    one = np.full(1, -1, np.int32)
    for row in range(rows):
        cache, table, length = states[int(parents[row])]
        alone = call["run"]((cache, table, length), make_tree(one, tokens[row : row + 1]))
        close(logits[0, row], alone[0][0, 0])
        close(taps[0, row], alone[1][0, 0])
        path, count = jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32)
        states[row] = (call["commit"]((cache, table, length), alone[2], path, count), table, length + 1)

    leaf = int(rng.integers(0, rows))
    path = path_of(parents, leaf)
    padded = np.full((1, 17), path[-1], np.int32)
    padded[0, : len(path)] = path
    committed = call["commit"](slots, updates, jnp.asarray(padded), jnp.asarray([len(path)], jnp.int32))
    expected = states[leaf][0]
    close(committed.recurrent, expected.recurrent)
    close(committed.conv, expected.conv)
    used = int(slots[2][0]) + len(path)
    table = np.asarray(slots[1][0])
    got, want = (
        np.asarray(x.kv)[:, table].reshape(x.kv.shape[0], -1, *x.kv.shape[3:]) for x in (committed, expected)
    )
    close(got[:, :used], want[:, :used])
    assert np.isnan(got[:, used:]).all()  # no rejected row reached a page


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    seed=st.integers(0, 2**31), rows=st.sampled_from([1, 2, 7, 16, 33]), shape=st.sampled_from(["deep", "bushy"]),
    length=st.integers(1, 63), repeated=st.booleans(),
)  # fmt: skip
def test_every_tree_row_equals_its_path(
    seed: int, rows: int, shape: str, length: int, repeated: bool
) -> None:
    rng = np.random.default_rng(seed)
    prompt = np.full(length, 7) if repeated else rng.integers(0, VOCAB, length)
    check_tree(rng, rows, 15, shape, prompt.astype(np.int32))


@pytest.mark.parametrize("repeated", [False, True])
def test_a_tree_of_129_rows_equals_its_paths(repeated: bool) -> None:
    rng = np.random.default_rng(0)
    prompt = np.full(40, 7) if repeated else rng.integers(0, VOCAB, 40)
    check_tree(rng, 129, 16, "deep", prompt.astype(np.int32))


def test_count_zero_commits_nothing() -> None:
    slots = context(np.arange(20, dtype=np.int32))
    tree = make_tree(np.array([-1, 0], np.int32), np.array([3, 4], np.int32))
    updates = functions()["run"](slots, tree)[2]
    after = functions()["commit"](slots, updates, jnp.zeros((1, 2), jnp.int32), jnp.zeros((1,), jnp.int32))
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(slots[0]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_wrong_ancestors_are_noticed() -> None:
    """The comparison above is sharp: a row that sees its sibling no longer equals its path."""
    slots = context(np.arange(20, dtype=np.int32))
    tree = make_tree(np.array([-1, 0, 0], np.int32), np.array([3, 4, 5], np.int32))
    leaky = dataclasses.replace(tree, ancestors=tree.ancestors.at[0, 2, 1].set(True))
    right, wrong = functions()["run"](slots, tree)[0], functions()["run"](slots, leaky)[0]
    close(wrong[0, :2], right[0, :2])
    assert np.linalg.norm(wrong[0, 2] - right[0, 2]) > 1e-3 * np.linalg.norm(right[0, 2])


def test_draft_writes_accepted_rows_only() -> None:
    """Draft KV of rejected rows reaches no page (only `num_taps` rows are written, at their positions)."""
    from dflash_jax.round import DecodeState, draft

    model = target()
    drafter = random_drafter(model)
    cache = init_cache(model.config, drafter.config, slots=2, pages=PAGES, page_size=PAGE, dtype=jnp.float32)
    assert cache.draft_kv is not None
    cache = dataclasses.replace(cache, draft_kv=jnp.full_like(cache.draft_kv, jnp.nan))
    features = jax.random.normal(jax.random.key(0), (2, 8, 2 * model.config.hidden_size))
    zeros = jnp.zeros((2,), jnp.int32)
    state = DecodeState(
        cache=cache, block_tables=jnp.asarray([[1, 3], [0, 2]], jnp.int32), lengths=jnp.asarray([17, 3], jnp.int32),
        anchor=zeros, taps=features, num_taps=jnp.asarray([3, 3], jnp.int32), active=jnp.ones((2,), bool),
        remaining=zeros, stop_ids=jnp.full((2, 1), -1), histogram=jnp.zeros((2, 9), jnp.int32),
    )  # fmt: skip
    idle, _ = draft(model, drafter, dataclasses.replace(state, active=jnp.zeros((2,), bool)), RoundSpec(7, 8))
    assert np.isnan(np.asarray(idle)).all()  # taps of a slot that has ended are nobody's context
    pages, logits = draft(model, drafter, state, RoundSpec(7, 8))
    log_probs = jax.nn.log_softmax(logits)
    written = np.isfinite(np.asarray(pages)).all(axis=(0, 3, 4, 5))
    expected = np.zeros((PAGES, PAGE), bool)
    expected[1, 14:16] = expected[3, 0] = True  # positions 14, 15, 16 of slot 0
    expected[0, 0:3] = True
    np.testing.assert_array_equal(written, expected)
    # Slot 0's context is 17 tokens of which 14 are poison: only slot 1 is finite.
    assert np.isfinite(np.asarray(log_probs[1])).all()
    close(np.exp(np.asarray(log_probs[1], np.float64)).sum(axis=-1), np.ones(7))

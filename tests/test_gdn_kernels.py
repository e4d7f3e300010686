"""The delta rule and what surrounds it: every implementation against one fp64 recurrence, path by path, token by token.

Interpreted kernels run on the CPU with small shapes; compiled ones are marked `gpu`.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.tree import ancestor_index
from pallas_kernels import gdn_mixer, gdn_scan
from pallas_kernels.ancestry import LENGTH, SHARED, bit, packed, paths_of
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.gdn_mixer import kernel as mixer_kernel
from pallas_kernels.gdn_mixer import reference as mixer_reference
from pallas_kernels.gdn_mixer.configs import Config
from pallas_kernels.gdn_scan import (
    chunk_kernel,
    commit_kernel,
    path_kernel,
    reference,
    step_kernel,
    tree_kernel,
)
from pallas_kernels.gdn_scan.configs import (
    TABLES,
    ChunkConfig,
    CommitConfig,
    StepConfig,
    TreeConfig,
    table_for,
)
from pallas_kernels.gdn_scan.dots import DOT_MODES, dot, unit_lower_solve
from pallas_kernels.gdn_scan.shapes import MODELS, TREE_ROWS, cases

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
KEY_HEADS, VALUE_HEADS, DIM = 1, 2, 32
IMPLEMENTATIONS = (
    "xla",
    "interpret",
    pytest.param("compiled", marks=pytest.mark.gpu),
)
DTYPES = (jnp.float32, jnp.bfloat16)


@dataclasses.dataclass
class Rows:
    """Operands of the delta rule, and the tree."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    g: jax.Array
    state: jax.Array
    parents: np.ndarray

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        return self.q, self.k, self.v, self.beta, self.g

    @property
    def ancestors(self) -> np.ndarray:
        slots, rows = self.parents.shape
        mask = np.broadcast_to(np.eye(rows, dtype=bool), (slots, rows, rows)).copy()
        for slot in range(slots):
            for row in range(rows):
                if self.parents[slot, row] >= 0:
                    mask[slot, row] |= mask[slot, self.parents[slot, row]]
        return mask

    @property
    def tree_operands(self) -> tuple[jax.Array, ...]:
        """The rule's in its tree form: path sums in the place of g."""
        q, k, v, beta, g = self.operands
        total = np.einsum("bij,bjh->bih", self.ancestors.astype(np.float64), np.asarray(g, np.float64))
        return q, k, v, beta, jnp.asarray(total, jnp.float32)


def problem(
    rows: int, *, slots: int = 1, dtype: Any = jnp.float32, seed: int = 0, chain: bool = False,
    alike: bool = False, used: tuple[int, ...] | None = None, dim: int = DIM,
) -> Rows:
    """Random rows; `alike`: one repeated key, written at full strength, never forgotten; `used`: rows, then padding."""
    rng = np.random.default_rng(seed)

    def unit(*shape: int) -> np.ndarray:
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = unit(slots, rows, KEY_HEADS, dim), unit(slots, rows, KEY_HEADS, dim)
    v = rng.normal(size=(slots, rows, VALUE_HEADS, dim))
    beta = rng.uniform(0.05, 0.95, (slots, rows, VALUE_HEADS))
    g = -rng.exponential(0.4, (slots, rows, VALUE_HEADS))
    if alike:
        k, beta, g = np.repeat(k[:, :1], rows, 1), np.full_like(beta, 0.9999), np.full_like(g, -1e-5)
    parents = np.array([[-1, *(r - 1 if chain else rng.integers(r) for r in range(1, rows))] for _ in range(slots)])
    for slot, count in enumerate(used or ()):
        for x in (k, v, beta, g):
            x[slot, count:] = 0.0
        parents[slot, count:] = -1
    state = rng.normal(size=(slots, VALUE_HEADS, dim, dim))
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)] + [jnp.asarray(x, jnp.float32) for x in (beta, g, state)]
    return Rows(*arrays, parents)


def walk(task: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """fp64: the recurrence along every root path; outputs, innovations, path sums, and the state after each row."""
    q, k, v, beta, g, start = (np.asarray(x, np.float64) for x in (*task.operands, task.state))
    q, k = (np.repeat(x, VALUE_HEADS // KEY_HEADS, 2) for x in (q, k))
    out, u, total = np.zeros_like(v), np.zeros_like(v), np.zeros_like(g)
    after = np.zeros((*v.shape[:2], *start.shape[1:]))
    for slot, row in np.ndindex(*task.parents.shape):
        parent = task.parents[slot, row]
        before = start[slot] if parent < 0 else after[slot, parent]
        total[slot, row] = g[slot, row] + (0.0 if parent < 0 else total[slot, parent])
        state = np.exp(g[slot, row])[:, None, None] * before
        u[slot, row] = beta[slot, row][:, None] * (v[slot, row] - np.einsum("hkv,hk->hv", state, k[slot, row]))
        after[slot, row] = state + k[slot, row][:, :, None] * u[slot, row][:, None, :]
        out[slot, row] = np.einsum("hkv,hk->hv", after[slot, row], q[slot, row]) * q.shape[-1] ** -0.5
    return out, u, total, after


def relative(actual: Any, expected: Any) -> float:
    """‖actual − expected‖ / ‖expected‖; NaN never passes a comparison with a bound."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


def tree_rule(
    implementation: str, task: Rows, *, tile: int = 16, two_sweeps: bool = False, ahead: bool = False, layer: int = 1
) -> tuple[jax.Array, ...]:
    """The tree rule on a stack of states whose other layers are NaN."""
    ancestors, states = jnp.asarray(task.ancestors), jnp.full((3, *task.state.shape), jnp.nan).at[layer].set(task.state)
    if implementation != "interpret":
        kind = "pallas" if implementation == "compiled" else "xla"
        rule = functools.partial(gdn_scan.tree_delta_rule, layer=layer, implementation=kind)
        return jax.jit(rule)(*task.tree_operands, states, ancestors)
    mode = "bf16x3" if task.k.dtype == jnp.float32 else "bf16x2"
    config = TreeConfig(tile, 16, 16, mode, two_sweeps=two_sweeps, ahead=ahead, narrow=64 if ahead else 0)
    rule = functools.partial(tree_kernel.tree_delta_rule, config=config, interpret=True)
    return jax.jit(rule)(*task.tree_operands, states, jnp.array([layer]), packed(ancestors))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_one_row_kernel_is_the_recurrence(dtype: Any):
    task = problem(1, slots=2, dtype=dtype)
    states = jnp.full((3, *task.state.shape), jnp.nan).at[1].set(task.state)
    rule = functools.partial(step_kernel.step_delta_rule, config=StepConfig(16, 4), interpret=True)
    results = jax.jit(rule)(*task.operands, states, jnp.array([1]))
    for name, a, b in zip(("out", "u"), results, walk(task), strict=False):
        assert relative(a, b) <= TOLERANCE[dtype], name


def check_tree(implementation: str, task: Rows, **options: Any) -> None:
    expected = walk(task)
    bound = TOLERANCE[jnp.bfloat16 if task.k.dtype == jnp.bfloat16 else jnp.float32]
    for name, a, b in zip(("out", "u"), tree_rule(implementation, task, **options), expected, strict=False):
        assert a.dtype == jnp.float32
        assert relative(a, b) <= bound, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17])
def test_tree_rule_is_the_recurrence_along_every_path(implementation: str, dtype: Any, rows: int):
    check_tree(implementation, problem(rows, slots=2, dtype=dtype, seed=rows))


@pytest.mark.parametrize("implementation", ["xla", pytest.param("compiled", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [2, 15, 16, 31, 33, 63, 64, 65, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_rule_at_every_size(implementation: str, dtype: Any, rows: int):
    check_tree(implementation, problem(rows, dtype=dtype, seed=rows))


@pytest.mark.parametrize("tile", [16, 32])
def test_interpreted_tree_rule_over_several_tiles(tile: int):
    check_tree("interpret", problem(33, seed=tile), tile=tile, two_sweeps=tile == 32)


@pytest.mark.parametrize("rows", [2, 16, 31, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_tree_rule_that_reads_ahead(dtype: Any, rows: int):
    check_tree("interpret", problem(rows, slots=2, dtype=dtype, seed=rows), ahead=True)
    check_tree("interpret", problem(rows, dtype=dtype, chain=True, alike=True), ahead=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_rule_with_one_repeated_key(implementation: str, dtype: Any):
    """A prompt of one token: powers of A grow to thousands here, and any form that needs them cancels."""
    check_tree(implementation, problem(24, dtype=dtype, chain=True, alike=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_rows_of_a_tree_change_nothing(implementation: str):
    whole = problem(20, slots=2, used=(20, 13), seed=3)
    check_tree(implementation, whole)
    out, u = tree_rule(implementation, whole)
    assert not np.asarray(u)[1, 13:].any()
    short = Rows(*(x[1:, :13] for x in whole.operands), whole.state[1:], whole.parents[1:, :13])
    np.testing.assert_allclose(out[1:, :13], tree_rule(implementation, short)[0], atol=1e-6)


def by_path(implementation: str, task: Rows, parents: np.ndarray, rows: Any = slice(None)) -> tuple[jax.Array, ...]:
    """The tree rule path by path, of some rows, whose parents are given."""
    kind = "bf16x3" if task.k.dtype == jnp.float32 else "bf16x2"
    config = TreeConfig(16, 32, 32, kind, num_stages=1, narrow=64)
    q, k, v, beta, total = (x[:, rows] for x in task.tree_operands)
    states = jnp.full((2, *task.state.shape), jnp.nan).at[1].set(task.state)
    paths = jnp.asarray(paths_of(parents, 16))
    rule = functools.partial(path_kernel.tree_delta_rule, config=config, interpret=implementation == "interpret")
    return jax.jit(rule)(q, k, v, beta, total, states, jnp.array([1]), paths)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "chain"), [(33, False), (16, True)])
def test_paths_are_the_recurrence(implementation: str, dtype: Any, rows: int, chain: bool):
    task = problem(rows, slots=2, dtype=dtype, seed=rows, chain=chain, alike=chain)
    for name, a, b in zip(("out", "u"), by_path(implementation, task, task.parents), walk(task), strict=False):
        assert relative(a, b) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_a_path_of_a_tree_is_a_chain_to_the_last_bit(implementation: str):
    task = problem(33, dtype=jnp.bfloat16, seed=7)
    whole = by_path(implementation, task, task.parents)
    for entries in paths_of(task.parents, 16)[0]:
        rows = entries[: entries[0] >> LENGTH] & (SHARED - 1)
        chain = np.arange(len(rows))[None] - 1
        if len(rows):
            for a, b in zip(by_path(implementation, task, chain, rows), whole, strict=True):
                assert np.array_equal(a[0], b[0, rows])


def test_trees_of_few_narrow_heads_go_by_paths_where_that_was_measured(monkeypatch: pytest.MonkeyPatch):
    def wanted(device: str, *arguments: Any) -> int:
        monkeypatch.setattr(gdn_scan.api, "target_device", lambda: SimpleNamespace(device_kind=device))
        return gdn_scan.path_rows(*arguments)

    few = jnp.bfloat16, 256, 32, 15
    assert wanted("NVIDIA H200", *few) == wanted("NVIDIA H200", jnp.bfloat16, 512, 64, 7) == 16
    assert not wanted("NVIDIA RTX A6000", *few) and not wanted("cpu", *few)
    for other in ((jnp.float32, *few[1:]), (jnp.bfloat16, 1024, 32, 15)):
        assert not wanted("NVIDIA H200", *other)
    assert not wanted("NVIDIA H200", jnp.bfloat16, 256, 16, 15)  # one tile
    assert not wanted("NVIDIA H200", jnp.bfloat16, 256, 64, 31)


@pytest.mark.parametrize("mode", [m for m in DOT_MODES if m != "bf16"])
def test_products_are_as_exact_as_their_names_say(mode: str):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(32, 32)), jnp.float32) for _ in range(2))
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    bound = 2e-5 if mode == "bf16x2" else 5e-7
    assert relative(jax.jit(functools.partial(dot, mode=mode, interpret=True))(a, b), exact) < bound
    half = a.astype(jnp.bfloat16)
    exact = np.asarray(half, np.float64) @ np.asarray(b, np.float64)
    assert relative(jax.jit(functools.partial(dot, mode=mode, interpret=True))(half, b), exact) < bound


@pytest.mark.parametrize("size", [16, 32, 64])
def test_a_solution_depends_on_what_is_below_the_diagonal_alone(size: int):
    rng = np.random.default_rng(size)
    below, above = np.tril(rng.normal(size=(size, size)), -1) / 2, np.triu(rng.normal(size=(size, size))) * 100
    right = rng.normal(size=(size, 32))
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    solve = functools.partial(unit_lower_solve, row=row, column=column, mode="bf16x3", interpret=True)
    alone, beside = (jax.jit(solve)(jnp.float32(a), jnp.float32(right)) for a in (below, below + above))
    assert np.array_equal(alone, beside)
    assert relative(alone, np.linalg.solve(np.eye(size) + below, right)) < 1e-5


def commit(
    implementation: str, state: jax.Array, k: jax.Array, u: jax.Array, total: jax.Array, path: Any, count: Any
) -> jax.Array:
    arrays = (state, k, u, total, jnp.asarray(path), jnp.asarray(count))
    if implementation != "interpret":
        kind = "pallas" if implementation == "compiled" else "xla"
        return jax.jit(functools.partial(gdn_scan.commit_path, implementation=kind))(*arrays)
    config = CommitConfig(16, "bf16x3")
    return jax.jit(functools.partial(commit_kernel.commit_path, config=config, interpret=True))(*arrays)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_commit_is_the_state_at_the_end_of_the_path(implementation: str, dtype: Any):
    """Three slots: a path, a whole path, and none; a rejected row that holds NaN must not be felt."""
    tasks = [problem(9, slots=3, dtype=dtype, seed=s, chain=True) for s in (1, 2)]
    path, count = np.array([[0, 1, 2, 8, 8], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]), np.array([3, 5, 0])
    results = [walk(t) for t in tasks]
    k, u, total = (
        jnp.stack(x) for x in ([t.k for t in tasks], [r[1] for r in results], [r[2] for r in results])
    )
    u, total = u.astype(jnp.float32).at[:, :, 8].set(jnp.nan), total.astype(jnp.float32)
    k = k.at[:, :, 8].set(jnp.nan)
    state = jnp.stack([t.state for t in tasks])
    new = commit(implementation, state, k, u, total, path, count)
    for layer, result in enumerate(results):
        for slot, last in ((0, 2), (1, 4)):
            assert relative(new[layer, slot], result[3][slot, last]) <= 2e-6
    assert np.array_equal(np.asarray(new[:, 2]).view(np.int32), np.asarray(state[:, 2]).view(np.int32))


def chunk_rule(implementation: str, task: Rows, chunk: int = 16) -> tuple[jax.Array, jax.Array]:
    if implementation != "interpret":
        kind = "pallas" if implementation == "compiled" else "xla"
        rule = functools.partial(gdn_scan.chunk_delta_rule, chunk=chunk, implementation=kind)
        return jax.jit(rule)(*task.operands, task.state)
    mode = "bf16x3" if task.k.dtype == jnp.float32 else "bf16x2"
    config = ChunkConfig(chunk, 16, 16, mode, prepare_block_dk=16)
    return jax.jit(functools.partial(chunk_kernel.chunk_delta_rule, config=config, interpret=True))(
        *task.operands, task.state
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alike", [False, True])
def test_chunk_rule_is_the_recurrence(implementation: str, dtype: Any, alike: bool):
    """Two slots, the second ragged: its padding leaves its state where it was."""
    task = problem(37, slots=2, dtype=dtype, chain=True, alike=alike, used=(37, 21))
    out, final = chunk_rule(implementation, task)
    expected = walk(task)
    bound = TOLERANCE[dtype]
    for slot, count in ((0, 37), (1, 21)):
        assert relative(out[slot, :count], expected[0][slot, :count]) <= bound
        assert relative(final[slot], expected[3][slot, count - 1]) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 65, 1000])
def test_compiled_chunk_rule_at_real_widths(rows: int):
    task = problem(rows, dtype=jnp.bfloat16, chain=True, dim=128)
    expected = walk(task)
    out, final = chunk_rule("compiled", task)
    assert relative(out, expected[0]) <= 1e-2
    assert relative(final, expected[3][:, -1]) <= 1e-2


@pytest.mark.gpu
def test_compiled_kernels_give_the_same_bits_every_time():
    """A missing barrier shows as results that move between runs."""
    task = problem(64, slots=4, dtype=jnp.bfloat16, dim=128)
    first, whole = tree_rule("compiled", task), chunk_rule("compiled", task)
    for _ in range(20):
        again = (*tree_rule("compiled", task), *chunk_rule("compiled", task))
        for a, b in zip((*first, *whole), again, strict=True):
            assert np.array_equal(a, b)


def front_arrays(rows: int, dtype: Any, causal: bool) -> tuple[Any, ...]:
    rng = np.random.default_rng(rows)
    slots, channels = 2, (2 * KEY_HEADS + VALUE_HEADS) * DIM
    parents = jnp.asarray([[-1, *(rng.integers(r) for r in range(1, rows))] for _ in range(slots)], jnp.int32)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return (
        normal(slots, rows, channels), normal(slots, 3, channels), None if causal else ancestor_index(parents, 3),
        normal(channels, 1, 4), normal(slots, rows, VALUE_HEADS), 30 * normal(slots, rows, VALUE_HEADS),
        normal(VALUE_HEADS).astype(jnp.float32), normal(VALUE_HEADS).astype(jnp.float32),
        jnp.arange(rows) < jnp.array([[rows], [rows - 2]]),
        None if causal else ancestor_index(parents, rows),
    )  # fmt: skip


def front_oracle(arrays: tuple[Any, ...]) -> list[np.ndarray]:
    """fp64, one row at a time, its ancestors found by following the taps."""
    inputs, window, _, weight, strength, decay, a_log, dt_bias, *_ = (
        None if x is None else np.asarray(x, np.float64) for x in arrays
    )
    taps, valid = arrays[2], np.asarray(arrays[8])
    total = inputs * weight[:, 0, 3]
    for slot, row in np.ndindex(*inputs.shape[:2]):
        for j in range(3):
            tap = row - 1 - j if taps is None else int(taps[slot, row, j])
            total[slot, row] += (inputs[slot, tap] if tap >= 0 else window[slot, 3 + tap]) * weight[:, 0, 2 - j]
    mixed = total / (1 + np.exp(-total))
    heads = mixed.reshape(*mixed.shape[:2], -1, DIM)
    qk = heads[:, :, : 2 * KEY_HEADS]
    qk = qk / np.sqrt(np.sum(qk * qk, -1, keepdims=True) + 1e-6)
    beta = np.where(valid[..., None], 1 / (1 + np.exp(-strength)), 0)
    g = np.where(valid[..., None], -np.exp(a_log) * np.logaddexp(decay + dt_bias, 0), 0)
    if taps is not None:
        own = g.copy()
        for slot, row in np.ndindex(*inputs.shape[:2]):
            g[slot, row] += sum(own[slot, tap] for tap in arrays[9][slot, row] if tap >= 0)
    return [qk[:, :, :KEY_HEADS], qk[:, :, KEY_HEADS:], heads[:, :, 2 * KEY_HEADS :], beta, g]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "causal"), [(11, False), (11, True), (37, False)])
def test_front(implementation: str, dtype: Any, rows: int, causal: bool):
    """One joined projection, and the window among those of other layers, which hold NaN."""
    arrays = front_arrays(rows, dtype, causal)
    inputs, window, taps, weight, strength, decay, a_log, dt_bias, valid, above = arrays
    own = jnp.eye(rows, dtype=bool)
    ancestors = None if above is None else own | jnp.any(above[..., None] == jnp.arange(rows), axis=2)
    unused = jnp.full((*inputs.shape[:2], VALUE_HEADS * DIM), jnp.nan, dtype)
    projected = jnp.concatenate([inputs, unused, strength, decay], axis=-1)
    windows = jnp.stack([jnp.full_like(window, jnp.nan), window])
    options: dict[str, Any] = {"key_heads": KEY_HEADS, "key_dim": DIM}
    if implementation == "interpret":
        width = projected.shape[-1]
        starts = width - 2 * VALUE_HEADS, width - VALUE_HEADS
        front = functools.partial(
            mixer_kernel.gdn_front, **options, starts=starts, config=Config(4, 4), interpret=True
        )
        operands = (
            jnp.array([1]), projected, windows, taps, weight, projected, projected, a_log, dt_bias, valid,
            None if causal else packed(ancestors),
        )  # fmt: skip
    else:
        kind = "pallas" if implementation == "compiled" else "xla"
        front = functools.partial(gdn_mixer.gdn_front, **options, ancestors=ancestors, layer=1, implementation=kind)
        operands = (projected, windows, taps, weight, a_log, dt_bias, valid)
    results = jax.jit(front)(*operands)
    for name, a, b in zip(("q", "k", "v", "beta", "g"), results, front_oracle(arrays), strict=True):
        assert a.dtype == (dtype if name in "qkv" else jnp.float32)
        assert relative(a, b) <= TOLERANCE[dtype], name
    assert not np.asarray(results[3])[1, rows - 2 :].any()
    assert not causal or not np.asarray(results[4])[1, rows - 2 :].any()


def test_masks_are_packed_bit_by_bit():
    mask = np.random.default_rng(0).random((2, 45, 45)) < 0.5
    words = packed(jnp.asarray(mask))
    assert words.shape == (2, 45, 2) and words.dtype == jnp.int32
    rows = jnp.arange(45)
    assert np.array_equal(bit(words[:, :, rows // 32], rows), mask)


def test_a_tree_has_both_taps_and_ancestors():
    inputs, window, taps, weight, strength, decay, *others, _ = front_arrays(5, jnp.float32, False)
    with pytest.raises(ValueError, match="with both"):
        gdn_mixer.gdn_front(
            jnp.concatenate([inputs, strength, decay], axis=-1), window, taps, weight, *others,
            key_heads=KEY_HEADS, key_dim=DIM,
        )  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm(implementation: str, dtype: Any):
    """The gates lie between other columns, which hold NaN."""
    rng = np.random.default_rng(0)
    heads, start = 3, 2 * DIM
    x, z, weight = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 5, heads, DIM), (2, 5, heads, DIM), (DIM,))
    )
    z = z.astype(dtype)
    other = jnp.full((2, 5, start), jnp.nan, dtype)
    gates = jnp.concatenate([other, z.reshape(2, 5, -1), other[..., :7]], axis=-1)
    if implementation == "interpret":
        out = mixer_kernel.gated_norm(x, gates, weight, eps=1e-6, start=start, config=Config(8, 4), interpret=True)
    else:
        kind = "pallas" if implementation == "compiled" else "xla"
        out = gdn_mixer.gated_norm(x, gates, weight, eps=1e-6, start=start, implementation=kind)
    x64, z64 = np.asarray(x, np.float64), np.asarray(z, np.float64)
    normed = x64 / np.sqrt(np.mean(x64 * x64, -1, keepdims=True) + 1e-6) * np.asarray(weight)
    assert out.dtype == dtype
    assert relative(out, normed * z64 / (1 + np.exp(-z64))) <= TOLERANCE[dtype]


def test_a_shape_without_a_kernel_is_refused_by_name():
    task = problem(4, dim=8)
    arrays = (*task.operands, task.state)
    with pytest.raises(UnsupportedError, match="key head dim 8"):
        gdn_scan.chunk_delta_rule(*arrays, implementation="pallas")
    with pytest.raises(UnsupportedError, match="129 rows"):
        gdn_scan.tree_delta_rule(
            *problem(129).tree_operands, task.state, jnp.ones((1, 129, 129), bool), implementation="pallas"
        )
    with pytest.raises(UnsupportedError, match="head dim 12"):
        gdn_mixer.gated_norm(jnp.ones((2, 1, 12)), jnp.ones((2, 12)), jnp.ones(12), eps=1e-6, implementation="pallas")
    out, final = gdn_scan.chunk_delta_rule(*arrays)  # "auto" takes XLA
    expected = reference.chunk_delta_rule(*arrays)
    assert np.array_equal(out, expected[0]) and np.array_equal(final, expected[1])


def test_every_device_has_a_config_for_every_shape():
    for kind in (*TABLES, "some other device"):
        for dtype in DTYPES:
            assert set(table_for(kind, dtype).tree) == {max(16, rows) for rows in TREE_ROWS}


def test_every_named_case_traces_and_has_its_own_name():
    names = []
    for name, function, arguments in cases("NVIDIA RTX A6000"):
        jax.eval_shape(function, *arguments)
        names.append(name)
    assert len(names) == len(set(names)) and all(any(m in name for name in names) for m in MODELS)


def test_the_reference_front_keeps_the_inputs_dtype():
    q, _, v, beta, _ = mixer_reference.gdn_front(
        *front_arrays(5, jnp.bfloat16, True)[:9], key_heads=KEY_HEADS, key_dim=DIM
    )
    assert q.dtype == v.dtype == jnp.bfloat16 and beta.dtype == jnp.float32

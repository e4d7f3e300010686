"""Tree attention: every implementation against one dense fp64 oracle, over the cases that page tables get wrong."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import UnsupportedError, resolve
from pallas_kernels.tree_attention import kernel, reference, tree_attention
from pallas_kernels.tree_attention.configs import (
    MAX_SPLITS,
    TABLES,
    Config,
    config_for,
    split_count,
    table_for,
)
from pallas_kernels.tree_attention.shapes import SHAPES, cases

PAGE = 16
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
# Tiles smaller than the operands, and enough programs that every case with two blocks of keys is split.
SPLIT = Config(block_rows=16, block_keys=16, programs=1000, min_blocks=1, num_warps=4, num_stages=2)
WHOLE = dataclasses.replace(SPLIT, block_rows=32, programs=1)


@dataclasses.dataclass
class Problem:
    """Operands in the op's order, and its options."""

    arrays: tuple[Any, ...]
    options: dict[str, Any]


def ancestor_mask(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """Ancestor-or-self matrix of a random tree in topological order."""
    mask = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        mask[node] |= mask[rng.integers(node)]
    return mask


def problem(
    lengths: list[int] | None, *, nodes: int = 7, heads: int = 6, kv_heads: int = 2, dim: int = 64, table: int = 4,
    window: int | None = None, causal: bool = False, full: bool = False, dtype: Any = jnp.float32, seed: int = 0,
    page: int = PAGE,
) -> Problem:
    """A random problem whose unused page entries, whole unused pages and other layers are NaN."""
    rng = np.random.default_rng(seed)
    batch, layer = len(lengths or [0]), 1
    q = rng.normal(size=(batch, nodes, heads, dim))
    kv = rng.normal(size=(batch, nodes, 2, kv_heads, dim))
    masks = [np.ones((nodes, nodes), bool) if full else ancestor_mask(rng, nodes) for _ in range(batch)]
    mask = None if causal else jnp.array(np.stack(masks))
    pages = tables = used = None
    if lengths is not None:
        pages = np.full((3, batch * table + 2, page, 2, kv_heads, dim), np.nan)
        # Table entries past the slot's pages name no page at all.
        tables = np.full((batch, table), 10**6, np.int32)
        free = rng.permutation(pages.shape[1])
        for slot, length in enumerate(lengths):
            for entry in range(min(table, -(-length // page))):
                number, free = free[0], free[1:]
                tables[slot, entry] = number
                pages[layer, number, : length - entry * page] = rng.normal(
                    size=(min(page, length - entry * page), 2, kv_heads, dim)
                )
        pages, tables, used = jnp.array(pages, dtype), jnp.array(tables), jnp.array(lengths, jnp.int32)
    start = np.array(lengths or [0])[:, None]
    positions = jnp.array(start + (np.arange(nodes) if causal or full else np.arange(nodes) // 2), jnp.int32)
    arrays = (jnp.array(q, dtype), jnp.array(kv, dtype), mask, pages, layer, tables, used)
    return Problem(arrays, {"scale": dim**-0.5, "window": window, "positions": positions})


def oracle(task: Problem) -> np.ndarray:
    """Row by row in fp64, with the keys that the row may see and no others."""
    q, kv, mask, pages, layer, tables, lengths = task.arrays
    q, kv = np.asarray(q, np.float64), np.asarray(kv, np.float64)
    batch, nodes, heads, _ = q.shape
    group = heads // kv.shape[3]
    window, positions = task.options["window"], np.asarray(task.options["positions"])
    out = np.empty_like(q)
    for slot in range(batch):
        context = np.zeros((0, *kv.shape[2:]))
        if pages is not None:
            length, size = int(lengths[slot]), pages.shape[2]
            entries = np.asarray(tables)[slot, : -(-length // size)]
            context = np.asarray(pages[layer], np.float64)[entries].reshape(-1, *kv.shape[2:])[:length]
        for node in range(nodes):
            first = 0 if window is None else max(positions[slot, node] - window + 1, 0)
            rows = np.arange(nodes) <= node if mask is None else np.asarray(mask)[slot, node]
            seen = np.concatenate([context[first:], kv[slot][rows]])
            for head in range(heads):
                keys, values = seen[:, 0, head // group], seen[:, 1, head // group]
                logits = keys @ q[slot, node, head] * task.options["scale"]
                weights = np.exp(logits - logits.max())
                out[slot, node, head] = weights @ values / weights.sum()
    return out


def run_reference(task: Problem) -> jax.Array:
    layer = task.arrays[4]

    @jax.jit
    def call(*arrays):
        return reference.tree_attention(*arrays[:4], layer, *arrays[4:], **task.options)

    return call(*task.arrays[:4], *task.arrays[5:])


def run_kernel(task: Problem, config: Config, interpret: bool) -> jax.Array:
    layer = task.arrays[4]

    @jax.jit
    def call(*arrays):
        return kernel.tree_attention(
            *arrays[:4], layer, *arrays[4:], config=config, interpret=interpret, **task.options
        )

    return call(*task.arrays[:4], *task.arrays[5:])


def run_api(task: Problem) -> jax.Array:
    layer = task.arrays[4]

    @jax.jit
    def call(*arrays):
        return tree_attention(*arrays[:4], layer, *arrays[4:], implementation="pallas", **task.options)

    return call(*task.arrays[:4], *task.arrays[5:])


Run = Callable[[Problem], jax.Array]
IMPLEMENTATIONS = [
    pytest.param(run_reference, id="xla"),
    pytest.param(lambda task: run_kernel(task, SPLIT, True), id="pallas-interpret-split"),
    pytest.param(lambda task: run_kernel(task, WHOLE, True), id="pallas-interpret-whole"),
    pytest.param(lambda task: run_kernel(task, SPLIT, False), id="pallas-split", marks=pytest.mark.gpu),
    pytest.param(run_api, id="pallas", marks=pytest.mark.gpu),
]

# Contexts on a page's border and beside it, none at all, a full table; all in ragged batches.
CASES = {
    "ragged": {"lengths": [0, 1, PAGE - 1, PAGE]},
    "borders": {"lengths": [PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 4 * PAGE]},
    "no pages": {"lengths": None},
    "one row": {"lengths": [3 * PAGE + 5, 0], "nodes": 1},
    "many rows": {"lengths": [PAGE + 3], "nodes": 33, "heads": 4},
    "equal heads": {"lengths": [20], "heads": 2},
    "head dim 128": {"lengths": [PAGE + 2], "dim": 128, "heads": 4, "kv_heads": 1},
    "head dim 256": {"lengths": [PAGE + 2], "dim": 256, "heads": 6, "kv_heads": 1},
    "block": {"lengths": [PAGE + 7, 3], "full": True, "nodes": 16},
    "causal": {"lengths": [PAGE + 7, 0], "causal": True, "nodes": 35},
    "causal, no pages": {"lengths": None, "causal": True, "nodes": 20},
    "window less": {"lengths": [2 * PAGE + 3, 5], "window": PAGE - 1},
    "window a page": {"lengths": [2 * PAGE, PAGE + 1], "window": PAGE},
    "window more": {"lengths": [3 * PAGE - 1, PAGE], "window": PAGE + 1},
    "window 1": {"lengths": [PAGE + 1], "window": 1},
    "causal block in a window": {"lengths": [3 * PAGE + 2], "window": 20, "causal": True, "nodes": 16},
    "larger pages": {"lengths": [70, 31], "page": 32, "table": 3},
}


def assert_close(got: jax.Array, want: np.ndarray, dtype: Any) -> None:
    assert got.dtype == dtype
    error = np.abs(np.asarray(got, np.float64) - want)
    assert np.all(error <= TOLERANCE[dtype] * (np.abs(want) + np.abs(want).max())), f"off by {error.max():.1e}"


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case: str, run: Run) -> None:
    task = problem(**CASES[case])
    assert_close(run(task), oracle(task), jnp.float32)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["borders", "head dim 256", "causal", "window less"])
def test_bfloat16_equals_the_oracle(case: str, run: Run) -> None:
    task = problem(**CASES[case], dtype=jnp.bfloat16)
    assert_close(run(task), oracle(task), jnp.bfloat16)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_large_logits_do_not_overflow(run: Run) -> None:
    task = problem([40, 3])
    q, *others = task.arrays
    task.arrays = (q * 300, *others)
    # The softmax is nearly one-hot here, and errors of the logits are errors of its exponent.
    np.testing.assert_allclose(np.asarray(run(task), np.float64), oracle(task), atol=2e-2)


def test_the_layer_may_be_traced() -> None:
    task = problem([PAGE + 1, 9])
    layer = jnp.int32(task.arrays[4])

    @jax.jit
    def call(layer):
        arrays = (*task.arrays[:4], layer, *task.arrays[5:])
        return kernel.tree_attention(*arrays, config=SPLIT, interpret=True, **task.options)

    assert_close(call(layer), oracle(task), jnp.float32)


@pytest.mark.gpu
def test_compiled_results_repeat() -> None:
    shape = SHAPES["qwen3.6-27b-64"]
    task = problem(
        [1000, 0, 64, 129], nodes=shape.rows, heads=shape.heads, kv_heads=shape.kv_heads, dim=shape.head_dim,
        table=16, page=64, dtype=jnp.bfloat16,
    )
    layer = task.arrays[4]
    call = jax.jit(
        lambda *arrays: tree_attention(
            *arrays[:4], layer, *arrays[4:], implementation="pallas", **task.options
        )
    )
    arrays = (*task.arrays[:4], *task.arrays[5:])
    first = np.asarray(call(*arrays), np.float32)
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(call(*arrays), np.float32), first)


def test_splits_stay_within_what_there_is() -> None:
    assert split_count(SPLIT, programs=1, blocks=5) == 5
    assert split_count(SPLIT, programs=1, blocks=10**6) == MAX_SPLITS
    assert split_count(SPLIT, programs=500, blocks=10**6) == 2
    assert split_count(dataclasses.replace(SPLIT, min_blocks=4), programs=1, blocks=3) == 1


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("kind", [*TABLES, "some other device"])
def test_config_tables_are_sound(kind: str) -> None:
    for (width, dim), buckets in table_for(kind).items():
        bounds = [most for most, _ in buckets]
        assert bounds[-1] is None and bounds[:-1] == sorted(bounds[:-1])
        for _, config in buckets:
            assert is_power_of_two(config.block_rows) and config.block_rows >= 16
            assert is_power_of_two(config.block_keys) and config.block_keys >= 16
            assert is_power_of_two(config.num_warps)
        for rows in (1, 16, 17, 10_000):
            config = config_for(kind, {2: jnp.bfloat16, 4: jnp.float32}[width], dim, rows)
            assert config in [c for _, c in buckets]


def test_cases_trace() -> None:
    names = set()
    for name, function, arguments in cases("NVIDIA RTX A6000"):
        names.add(name)
        if "batch8" in name or "window" in name or "prefill" in name:
            out = jax.eval_shape(function, *arguments)
            assert out.shape == arguments[0].shape and out.dtype == arguments[0].dtype
    assert len(names) == 2 * len(SHAPES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 32}, "head dim 32"),
        ({"dtype": jnp.float16}, "dtype float16"),
        ({"page": 24}, "page size 24"),
    ],
)
def test_unsupported_shapes_are_named(change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "unsupported_device", lambda device: None)
    task = problem([20], **change)
    with pytest.raises(UnsupportedError, match=words):
        tree_attention(*task.arrays, implementation="pallas", **task.options)
    # "auto" serves the same call with XLA.
    assert np.all(np.isfinite(tree_attention(*task.arrays, implementation="auto", **task.options)))


def test_mixed_dtypes_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "unsupported_device", lambda device: None)
    q, kv, mask, pages, *others = problem([20]).arrays
    with pytest.raises(UnsupportedError, match="queries are float32"):
        tree_attention(q, kv, mask, pages.astype(jnp.bfloat16), *others, scale=1.0, implementation="pallas")


@dataclasses.dataclass
class Device:
    """What dispatch reads of a device."""

    device_kind: str
    compute_capability: str = "8.6"
    platform: str = "gpu"
    client: Any = None


def test_devices_without_the_kernels_are_named() -> None:
    assert dispatch.unsupported_device(Device("NVIDIA RTX A6000")) is None
    assert dispatch.unsupported_device(Device("NVIDIA H200", "9.0")) is None
    assert dispatch.unsupported_device(Device("NVIDIA GB10", "12.1")) is None
    assert "7.5" in dispatch.unsupported_device(Device("Tesla T4", "7.5"))
    assert "'cpu'" in dispatch.unsupported_device(Device("cpu", platform="cpu"))


def test_resolve_prefers_pallas_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "target_device", lambda: Device("NVIDIA RTX A6000"))
    assert resolve("tree_attention", "auto") == "pallas"
    assert resolve("tree_attention", "xla") == "xla"
    assert resolve("tree_attention", "auto", "an odd shape") == "xla"
    monkeypatch.setattr(dispatch, "target_device", lambda: Device("Tesla T4", "7.5"))
    assert resolve("tree_attention", "auto") == "xla"
    with pytest.raises(UnsupportedError, match=r"tree_attention.*Tesla T4"):
        resolve("tree_attention", "pallas")
    with pytest.raises(UnsupportedError, match="no Pallas kernel"):
        resolve("no_such_op", "pallas")
    with pytest.raises(ValueError, match="none of"):
        resolve("tree_attention", "triton")

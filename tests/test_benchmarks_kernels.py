"""The kernel benchmark: its loops, floors and figures, its command line on a CPU; and what dispatch says it chose."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernels, timing
from benchmarks.kernel_cases import ACCEPTED, Case, Layer, attention_case, cases, smoke_cases
from benchmarks.kernels import Machine, compare, figures, main, prepare, program, smoke
from benchmarks.timing import Loop, looped, medians
from dflash_jax.loading import load
from dflash_jax.programs import Programs
from dflash_jax.round import RoundSpec
from pallas_kernels import dispatch
from pallas_kernels.gdn_scan.shapes import MODELS
from pallas_kernels.tree_attention.shapes import SHAPES, TIMED_LENGTHS

LAYER = Layer("bundled", MODELS["bundled"], jnp.float32)


def operands_of(case: Case) -> tuple[Any, ...]:
    return jax.jit(case.build)(jax.random.key(0))


def nbytes(*arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)


# ---------------------------------------------------------------- loops


def test_a_loop_takes_off_the_start_and_the_empty_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def started(trips: jax.Array) -> None:
        clock[0] += 0.5 + int(trips) * (4 * 0.010 + 0.002)  # the start; four calls and the loop's own cost a trip

    loop = Loop(started, (), calls=4, overhead=0.002)
    assert medians([loop], samples=3, seconds=0.42) == [pytest.approx(0.010)]
    assert loop.trips == 10


def test_loops_take_turns() -> None:
    order = []

    class Fake:
        def __init__(self, name: str, times: list[float]):
            self.name, self.times = name, times

        def calibrate(self, seconds: float) -> None:
            order.append(f"{self.name} warms up")

        def sample(self) -> float:
            order.append(self.name)
            return self.times.pop()

    assert medians([Fake("a", [1, 2, 9]), Fake("b", [5, 3, 4])], samples=3, seconds=1.0) == [2, 4]
    assert order == ["a warms up", "b warms up", "a", "b", "a", "b", "a", "b"]


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_calls_follow_each_other_and_go_round_the_layers(implementation: str) -> None:
    def call(operands: Any, layer: Any, implementation: Any, config: Any) -> tuple[jax.Array, ...]:
        return (2 * operands[0] + operands[1][layer],)

    table = jnp.array([1.0, 10.0, 100.0])
    case = Case(
        "double", "double/3", lambda key: (), call, chain=((0, 0),), nudged=(), moved=1.0, flops=0.0, layers=3
    )
    step, calls = program(case, implementation)
    assert calls == (24 if implementation == "pallas" else 1)
    trips = 2
    carry = ((jnp.float32(0),), (jnp.float32(0),) if implementation == "xla" else ())
    (chained,), _ = jax.jit(looped(step))(trips, (jnp.float32(0), table), carry)
    want = np.float32(0)
    for i in range(trips * calls):
        want = np.float32(2 * want + np.float32(table[i % 3]))
    assert chained == want


@pytest.mark.parametrize("case", [LAYER.tree(4), LAYER.commit(4)], ids=lambda case: case.op)
def test_the_loop_of_a_case_computes_its_calls(case: Case) -> None:
    operands = list(operands_of(case))
    loop = prepare(case, "xla", tuple(operands), 0.0)
    assert loop.calls == case.divide
    _, results = loop.program(jnp.int32(3), *loop.operands)
    for i in range(3):
        want = case.call(tuple(operands), i % case.layers, "xla", None)
        for result, place in case.chain:
            operands[place] = want[result]
    for got, expected in zip(results, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_chain_connects_arrays_of_one_shape(dtype: Any) -> None:
    seen = set()
    for case in [*cases(dtype), *smoke_cases(dtype)]:
        operands = jax.eval_shape(case.build, jax.random.key(0))
        results = jax.eval_shape(lambda x, c=case: c.call(x, np.int32(0), "xla", None), operands)
        for result, place in case.chain:
            got, wanted = results[result], operands[place]
            # Equal dtypes too: a conversion between calls would be timed with them.
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), case.name
        assert all(jnp.issubdtype(operands[i].dtype, jnp.floating) for i in (*case.nudged, *case.pallas_nudged))
        seen.add(case.name)
    assert {f"tree_attention/{name}/{n}" for name, lengths in TIMED_LENGTHS.items() for n in lengths} <= seen


# ---------------------------------------------------------------- floors and figures


def test_floor_bytes_are_those_of_the_arrays() -> None:
    layer = Layer("27b", MODELS["qwen3.6-27b"], jnp.bfloat16)
    case = layer.tree(64)
    *rows, states, mask = jax.eval_shape(case.build, jax.random.key(0))
    results = jax.eval_shape(lambda x: case.call(x, np.int32(0), "xla", None), (*rows, states, mask))
    assert case.moved == nbytes(*rows, mask, *results) + nbytes(states) // layer.heads.layers

    case = layer.chunk(8192)
    operands = jax.eval_shape(case.build, jax.random.key(0))
    results = jax.eval_shape(lambda x: case.call(x, np.int32(0), "xla", None), operands)
    assert case.moved == nbytes(*operands, *results)

    case = layer.commit(64)
    states, k, u, *_ = jax.eval_shape(case.build, jax.random.key(0))
    assert case.moved * case.divide == 2 * nbytes(states) + nbytes(k, u) * ACCEPTED // 64

    case = layer.norm(64)
    x, z, _ = jax.eval_shape(case.build, jax.random.key(0))
    assert case.moved == nbytes(x, z, z)


@pytest.mark.parametrize(("name", "seen"), [("drafter", 4096), ("drafter-window", 2048)])
def test_attention_floor_counts_the_tokens_in_sight(name: str, seen: int) -> None:
    case = attention_case(name, SHAPES[name], 4096, jnp.bfloat16)
    q, kv, _, pages, *_ = jax.eval_shape(case.build, jax.random.key(0))
    token = nbytes(pages) // (pages.shape[0] * pages.shape[1] * pages.shape[2])
    assert case.moved == seen * token + nbytes(kv, q, q)
    assert case.flops == 2 * 2 * 128 * 32 * 16 * (seen + 16)
    assert case.layers * seen * token >= 150e6


def test_figures_are_shares_of_the_measured_limits() -> None:
    case = dataclasses.replace(LAYER.norm(16), moved=4e6, flops=1e9)
    row = figures(case, {"pallas": 4e-6, "xla": 12e-6}, Machine(0.0, 2e12, 1e15))
    assert row["microseconds"] == pytest.approx(4) and row["bytes_per_second"] == pytest.approx(1e12)
    assert row["share_of_copy_bandwidth"] == pytest.approx(0.5)
    assert row["share_of_matrix_throughput"] == pytest.approx(0.25)
    assert row["larger_floor"] == "bytes" and row["times_larger_floor"] == pytest.approx(2)
    assert row["xla_ratio"] == pytest.approx(3) and row["torch_ratio"] is None
    assert "3.00x" in kernels.line(row) and "50.0%" in kernels.line(row)


def test_check_measures_the_error_and_sees_runs_that_differ() -> None:
    def call(operands: Any, layer: Any, implementation: Any, config: Any) -> tuple[jax.Array, ...]:
        return (operands[0] * (1.01 if implementation == "pallas" else 1.0),)

    case = Case("op", "op/1", lambda key: (), call, chain=((0, 0),), nudged=(), moved=1.0, flops=0.0)
    found = compare(case, (jnp.arange(8.0),))
    assert found["relative_errors"] == [pytest.approx(0.01, rel=1e-3)] and found["repeatable"]
    calls = iter(range(10**6))

    def unsteady(operands: Any, layer: Any, implementation: Any, config: Any) -> tuple[jax.Array, ...]:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return (operands[0] + jax.pure_callback(lambda: np.float32(next(calls)), shape),)

    assert not compare(dataclasses.replace(case, call=unsteady), (jnp.arange(8.0),))["repeatable"]


# ---------------------------------------------------------------- command line


def test_times_the_reference_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    argv = ["--implementation", "xla", "--op", r"(gdn_front|commit_path)/bundled/16$", "--quick"]
    assert main([*argv, "--dtype", "float32", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert [row["case"] for row in record["cases"]] == ["gdn_front/bundled/16", "commit_path/bundled/16"]
    assert record["dtype"] == "float32" and record["torch"] is None and record["machine"]["bandwidth"] > 1e6
    for row in record["cases"]:
        assert row["case"] in out and row["microseconds"] == pytest.approx(row["seconds"]["xla"] * 1e6)
        assert 0 < row["microseconds"] < 1e6 and row["xla_ratio"] is None


def test_a_run_out_of_time_says_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--implementation", "xla", "--op", "gated_norm/bundled/16$", "--quick", "--seconds", "0"]
    assert main(argv) == 1
    assert "gated_norm/bundled/16: left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "use --implementation xla"),
        (["--implementation", "xla", "--op", "("], "not a regular expression"),
        (["--implementation", "xla", "--op", "nothing"], "no case has a match; ops are chunk_delta_rule,"),
        (["--implementation", "xla", "--sweep"], "leave them out"),
        (["--implementation", "xla", "--json", "no/such/folder/x.json"], "no folder no/such/folder"),
    ],
)
def test_what_cannot_run_is_one_line_and_status_2(argv, words, capsys: pytest.CaptureFixture[str]) -> None:
    if not argv and dispatch.unsupported_device(dispatch.target_device()) is None:
        pytest.skip("this device runs the kernels")
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_smoke_runs_one_small_case_an_op(capsys: pytest.CaptureFixture[str]) -> None:
    ops = {case.op for case in cases(jnp.float32)} - {"gdn_layer"}  # which is made of the others
    assert {case.op for case in smoke_cases(jnp.float32)} == ops
    assert main(["--smoke", "--op", "commit|norm", "--implementation", "xla", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == "commit_path/bundled/16: ok\ngated_norm/bundled/16: ok\n"
    bad = dataclasses.replace(LAYER.norm(16), call=lambda *_: (jnp.array(jnp.nan),))
    with pytest.raises(FloatingPointError, match="gated_norm/bundled/16"):
        smoke([bad], "xla")


# ---------------------------------------------------------------- which implementation ran


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "unsupported_device", lambda device: None)


def test_recording_collects_choices_inside_it_alone(any_device: None) -> None:
    dispatch.resolve("gdn_mixer", "auto")
    with dispatch.recording() as outer:
        dispatch.resolve("gdn_scan", "auto")
        with dispatch.recording() as inner:
            dispatch.resolve("tree_attention", "auto", "an odd shape")
            dispatch.resolve("tree_attention", "auto")
    dispatch.resolve("gdn_mixer", "auto")
    assert outer == {"gdn_scan": {"pallas"}} and inner == {"tree_attention": {"xla", "pallas"}}


def test_a_choice_is_logged_once_with_its_reason(any_device: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        for _ in range(2):
            dispatch.resolve("tree_attention", "auto", "head dim 7 of this test")
    assert [r.getMessage() for r in caplog.records] == ["op 'tree_attention' runs with xla: head dim 7 of this test"]


def test_programs_say_what_was_compiled_for_a_round(any_device: None) -> None:
    programs = Programs(load(dtype="float32").target, None)

    def compiled(spec: RoundSpec, refused: str | None) -> None:
        def function(x: jax.Array) -> tuple[jax.Array, None]:
            dispatch.resolve("gdn_scan", "auto")
            dispatch.resolve("tree_attention", "auto", refused)
            return x, None

        programs._get((spec, refused), "decode", function, (jnp.zeros(1),))

    compiled(RoundSpec(0, context_pages=1), None)
    compiled(RoundSpec(0, context_pages=2), "odd")
    assert programs.kernels(RoundSpec(0, context_pages=1)) == {"gdn_scan": "pallas", "tree_attention": "pallas"}
    assert programs.kernels(RoundSpec(0, context_pages=2)) == {"gdn_scan": "pallas", "tree_attention": "xla"}
    both = programs.kernels(RoundSpec(0, context_pages=1), RoundSpec(0, context_pages=2))
    assert both == {"gdn_scan": "pallas", "tree_attention": "pallas+xla"}
    assert programs.kernels(RoundSpec(0, context_pages=3)) == {}

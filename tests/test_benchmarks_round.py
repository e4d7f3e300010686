"""The round benchmark: its floors, its table on a cut shape, and the breakdown of a trace."""

import gzip
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks import breakdown
from benchmarks import round as bench
from benchmarks.round import Case, floor_bytes, main, prefill_operations, weight_bytes
from benchmarks.shapes import configs
from dflash_jax.random_weights import abstract_drafter, abstract_target


def test_floor_of_the_27b_shape_is_that_of_its_documentation():
    target, drafter = configs("qwen3.6-27b")
    models = abstract_target(target, jnp.bfloat16, None), abstract_drafter(drafter, jnp.bfloat16, None)
    sizes = [
        sum(leaf.get_value().size * 2 for path, leaf in nnx.to_flat_state(nnx.state(m)) if path[0] != "embed_tokens")
        for m in models
    ]
    assert abs(sizes[0] / 51.25e9 - 1) < 1e-3  # a decode step's weights
    ar, chain = (floor_bytes(Case(m, 1024, 1), target, drafter, *sizes, 2) for m in ("ar", "chain"))
    states = 3 * 48 * 48 * 128 * 128 * 4
    assert ar == sizes[0] + 65536 * 1024 + states  # 64 KiB of keys and values a token
    draft_kv = 5 * 2 * 8 * 128 * 2 * 1024
    assert chain - ar == sizes[1] + 248320 * 5120 * 2 + draft_kv
    assert floor_bytes(Case("ar", 1024, 4), target, drafter, *sizes, 2) - sizes[0] == 4 * (ar - sizes[0])
    # The drafter's windowed layers stop at their window.
    far = [floor_bytes(Case("chain", c, 1), target, drafter, *sizes, 2) for c in (2048, 4096)]
    assert far[1] - far[0] == 2048 * (65536 + 2 * 8 * 128 * 2)


def test_weights_that_are_not_read_do_not_count():
    target, _ = configs("bundled")
    module = abstract_target(target, jnp.float32, None)
    everything = sum(leaf.get_value().size for _, leaf in nnx.to_flat_state(nnx.state(module)))
    embedding = target.vocab_size * target.hidden_size
    assert prefill_operations(module, nnx.List([])) == 2 * (everything - embedding - target.hidden_size)


def test_weight_bytes_leaves_out_what_is_named():
    from dflash_jax.random_weights import random_target

    target, _ = configs("bundled", 2)
    module = random_target(target, jnp.float32)
    assert weight_bytes(module) - weight_bytes(module, ("embed_tokens",)) == 4 * target.vocab_size * target.hidden_size


def test_a_table_of_a_cut_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "out.json"
    argv = ["--shape", "bundled", "--layers", "4", "--dtype", "float32", "--contexts", "64", "--repeats", "1"]
    argv += ["--methods", "ar,chain", "--tau", "chain=2"]
    assert main([*argv, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["method"] for row in rows] == ["ar", "chain"]
    for row in rows:
        assert row["c"] == pytest.approx(row["seconds"][0] / rows[0]["seconds"][0])
        assert row["floor_bytes"] > 0 and row["context"] == 64
    assert rows[1]["tokens_per_second"] == pytest.approx(2 / rows[1]["seconds"][0])
    assert "floor ms" in capsys.readouterr().out


def test_bad_arguments(capsys: pytest.CaptureFixture[str]):
    assert main(["--shape", "bundled", "--tp", "3"]) == 2
    assert "--tp 3 does not divide" in capsys.readouterr().err
    for argv in (["--methods", "tree:0"], ["--methods", "mtp"], ["--contexts", "x"], ["--shape", "gpt"]):
        with pytest.raises(SystemExit):
            bench.build_parser().parse_args(argv)


def test_kernels_of_the_first_device_are_sorted_by_what_they_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def name(pid: int, tid: int | None, value: str) -> dict:
        kind = "process_name" if tid is None else "thread_name"
        return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": value}}

    def event(pid: int, kernel: str, micros: float, op: str = "") -> dict:
        args = {"args": {"hlo_op": op}} if op else {}
        return {"ph": "X", "pid": pid, "tid": 7, "ts": 0, "dur": micros, "name": kernel} | args

    events = [
        name(1, None, "/device:GPU:0"), name(2, None, "/device:GPU:1"), name(3, None, "/host:CPU"),
        *(name(pid, 7, "Stream #1(Compute)") for pid in (1, 2)), name(3, 7, "python"),
        event(1, "gemm_fusion_dot_3", 60), event(1, "gdn_tree_64", 20), event(1, "ncclDevKernel_AllReduce", 15),
        event(1, "loop_add_fusion", 5, "fusion.3"), event(1, "one_shot_sum_kernel", 4, "all-reduce.7"),
        event(1, "linear", 3), event(1, "linear__1", 4), event(1, "attention_front__2", 9), event(1, "tree_search", 1),
        event(1, "tree_walk", 2), event(1, "draft_chunks", 3), event(1, "draft_candidates", 2),
        event(2, "gemm_fusion_dot_3", 99), event(3, "gdn_tree_64", 99),
    ]  # fmt: skip
    (tmp_path / "plugins").mkdir()
    with gzip.open(tmp_path / "plugins" / "vm.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = breakdown.read(breakdown.newest_trace(tmp_path))
    assert {kind: round(share.seconds * 1e6) for kind, share in found.items()} == {
        "products": 67, "delta rule": 20, "collectives": 19, "attention front": 9, "tree": 8, breakdown.OTHER: 5
    }  # fmt: skip
    assert breakdown.main([str(tmp_path), "--rounds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "33.5 us" in printed and "2.5 us loop_add_fusion" in printed
    assert breakdown.main([str(tmp_path / "nothing")]) == 2

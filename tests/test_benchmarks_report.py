"""The report of the benchmarks: every record's figures are in it, and what is no record is said."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from benchmarks import acceptance
from benchmarks import round as bench_round
from benchmarks.kernels import Machine, figures
from benchmarks.report import kind_of, main
from benchmarks.torch_round import Table
from dflash_jax import SamplingParams
from serve.load_driver import Load, Part, Sample
from serve.load_figures import summarise
from serve.proto import dflash_pb2 as pb
from tests.models import save_random_pair


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    """A record of each benchmark; those of round and acceptance are really run, at sizes that a test can."""
    folder, pair = tmp_path_factory.mktemp("records"), tmp_path_factory.mktemp("pair")
    words = ["--shape", "bundled", "--layers", "2", "--dtype", "float32", "--contexts", "64", "--repeats", "1"]
    assert bench_round.main([*words, "--methods", "ar,tree:3", "--json", str(folder / "round.json")]) == 0
    target, drafter = save_random_pair(pair)
    (pair / "prompts.txt").write_text("The owl\n")
    words = ["--model", str(target), "--draft-model", str(drafter), "--set", str(pair / "prompts.txt")]
    words += ["--methods", "ar,ddtree:3", "--max-new-tokens", "8", "--repeats", "1", "--dtype", "float32"]
    assert acceptance.main([*words, "--json", str(folder / "acceptance.json")]) == 0
    machine = Machine(1e-6, 4e12, 8e14)
    case = SimpleNamespace(name="tree_attention/27b/64", op="tree_attention", moved=8_000_000, flops=1_000)
    rows = [figures(case, {"pallas": 8e-6, "xla": 2e-5}, machine)]
    kernels = {"device": "NVIDIA H200", "jax": "0.11.2", "dtype": "bfloat16", "seconds": 3.0, "torch": None}
    (folder / "kernels.json").write_text(json.dumps(kernels | {"machine": asdict(machine), "cases": rows}))
    table = Table()
    table.add("Qwen3-8B", 1, [0.006, 0.007, 0.008])
    table.add("Qwen3-8B", 16, [0.014])
    torch = {"device": "NVIDIA H200", "torch": "2.9", "transformers": "5.1", "fla": False, "context": 1024}
    torch |= {"layers": None, "tiny": False, "wall_seconds": 9.0}
    torch |= {"rows": table.lines, "errors": {"27b": "OutOfMemoryError: too large"}}
    (folder / "torch.json").write_text(json.dumps(torch))
    divergence = {
        "device": "NVIDIA H200", "jax": "0.11.2", "model": "bundled", "sets": ["heldout"], "methods": ["ar", "dflash"],
        "prompts": 24, "tokens": {"ar": 3834, "dflash": 3821}, "parted": {"dflash": 3}, "positions_measured": 3834,
        "depth_error": 0.123, "depth_error_median": 0.004, "unit_roundoff": 0.00390625, "passed": False,
        "findings": [{"explained": True}, {"explained": False}],
    }  # fmt: skip
    (folder / "divergence.json").write_text(json.dumps(divergence))
    plan = Load((b"",), SamplingParams(), (8,), 0, concurrency=4, rate=None, requests=None, seconds=2.0)
    usage = pb.Usage(rounds=2, mean_accepted_length=2.5).SerializeToString()
    sample = Sample(0, 0.0, "finished", "", [0.5, 0.75], [1, 4], 1.0, usage)
    rows = [summarise(name, plan, [Part(0.0, 2.0, [sample], 0.1, 0.2)]) for name in ("ar", "ddtree")]
    load = {"settings": {"address": "10.0.0.7:1", "concurrency": "4", "plot": "a.svg"}, "device": "NVIDIA H200"}
    load |= {"jax": "0.11.2", "dtype": "bfloat16", "model": "bundled", "server": {"slots": 64}, "points": rows}
    (folder / "load.json").write_text(json.dumps(load))
    (folder / "other.json").write_text("[1, 2]")
    return folder


def test_the_report_has_every_record(records: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(records)]) == 0
    assert capsys.readouterr().out == f"wrote {records / 'report.md'}\n"
    text = (records / "report.md").read_text()
    row = next(r for r in json.loads((records / "round.json").read_text())["rows"] if r["method"] == "tree:3")
    assert f"| tree:3 | 64 | 1 | {1e3 * row['seconds'][0]:.3f} | 0.000 |" in text and f"| {row['c']:.3f} |" in text
    for line in json.loads((records / "acceptance.json").read_text())["methods"]:
        assert f"| {line['method']} | {line['tree_budget']} | {line['tau']:.2f} |" in text
    assert "| tree_attention/27b/64 | 8.00 | bytes | 4.00 | 2.50 × |  |" in text
    assert "| Qwen3-8B | 1 | 7.000 | 1.00 |  |" in text and "| Qwen3-8B | 16 | 14.000 | 2.00 |  |" in text
    assert "**27b failed**: OutOfMemoryError: too large" in text
    assert "**FAILED: 1 beyond rounding**" in text and "| dflash | 3821 | 3/24 |" in text
    assert "left out: other.json" in text
    assert "    python -m serve.load --concurrency 4\n" in text and "with 64 slots" in text
    assert "| ddtree | 4 | 1 | 0 | 0 | 2.5 | 0.50 | 500.0 / 500.0 / 500.0 | 250.0 / 250.0 | 62.5 / 62.5 |" in text
    assert "NVIDIA H200, torch 2.9, transformers 5.1" in text and "NVIDIA H200, jax 0.11.2, bfloat16" in text
    assert "python -m benchmarks.round --shape bundled --dtype float32 --tp 1 --methods ar,tree:3" in text
    assert "--methods ar,ddtree:3" in text and "--max-new-tokens 8" in text


def test_its_pictures_are_there_and_are_svg(records: Path):
    assert main([str(records)]) == 0
    text = (records / "report.md").read_text()
    shown = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert {"round-times.svg", "acceptance-speed-t0.svg", "load-load.svg"} <= set(shown) and len(shown) >= 5
    assert sorted(path.name for path in records.glob("*.svg")) == sorted(shown)
    for name in shown:
        assert ElementTree.parse(records / name).getroot().tag.endswith("svg")


def test_each_record_is_told_from_the_others(records: Path):
    kinds = {path.stem: kind_of(json.loads(path.read_text())) for path in records.glob("*.json")}
    assert kinds == {
        "round": "round", "acceptance": "acceptance", "kernels": "kernels", "torch": "torch_round",
        "divergence": "divergence", "load": "load", "other": None,
    }  # fmt: skip


def test_wrong_use_is_one_line(tmp_path: Path, records: Path, capsys: pytest.CaptureFixture[str]):
    def error(folder: Path) -> str:
        assert main([str(folder)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    assert "is not a folder" in error(tmp_path / "no")
    assert "no *.json of a benchmark" in error(tmp_path)
    (tmp_path / "a.json").write_text("{")
    assert "a.json: is not JSON" in error(tmp_path)
    record = json.loads((records / "round.json").read_text())
    del record["tp"]
    (tmp_path / "a.json").write_text(json.dumps(record))
    assert "a record of benchmarks.round without 'tp'" in error(tmp_path)

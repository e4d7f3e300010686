"""The PyTorch side of the round benchmark: its command line, clocks and table; nothing here needs PyTorch."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import torch_round
from benchmarks.published import SHAPES
from benchmarks.torch_round import (
    SECTIONS,
    TINY,
    WARMUP,
    Table,
    build_parser,
    main,
    run_sections,
    shape,
    timed,
)

ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------- command line


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_packages_one_line_and_status_2(missing, monkeypatch, capsys) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else sys)
    assert main(["--device", "cpu", "--tiny"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"error: {missing} is not installed") and "needs torch and transformers" in err


def test_imports_without_jax() -> None:
    code = "import sys; sys.modules['jax'] = sys.modules['flax'] = None; import benchmarks.torch_round"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_json_folder_that_is_not_there_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "no/such/folder/x.json"]) == 2
    assert "--json no/such/folder/x.json: there is no folder no/such/folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sections", "8b,9b"], "'9b' is none of 8b, dflash, 27b, compiled"),
        (["--layers", "0"], "expected a positive number, found '0'"),
        (["--context", "1K"], "expected a positive number, found '1K'"),
        (["--iterations", "-3"], "expected a positive number, found '-3'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_bad_flags_end_with_status_2(argv, words, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_defaults() -> None:
    args = build_parser().parse_args([])
    assert (args.sections, args.context, args.seconds) == (list(SECTIONS), 1024, 140)
    assert args.iterations >= 20 and args.layers is None and not args.tiny
    assert build_parser().parse_args(["--sections", "27b,8b"]).sections == ["27b", "8b"]


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_are_the_published_ones_until_cut(name: str) -> None:
    before = json.dumps(SHAPES)
    target, drafter = shape(name, None, False)
    published = SHAPES[name][0].get("text_config", SHAPES[name][0])
    assert {key: value for key, value in published.items() if key in target} == target
    assert target.keys() == published.keys() - {"model_type", "architectures"}
    assert drafter["num_target_layers"] == target["num_hidden_layers"]

    target, drafter = shape(name, 4, True)
    assert target["num_hidden_layers"] == drafter["num_target_layers"] == 4
    assert max(drafter["dflash_config"]["target_layer_ids"]) < 4
    for raw in (target, drafter):
        assert raw["hidden_size"] == TINY["hidden_size"] and raw["vocab_size"] == TINY["vocab_size"]
    assert drafter["dflash_config"]["mask_token_id"] < TINY["vocab_size"]
    assert target.keys() == published.keys() - {"model_type", "architectures"}  # none added by TINY
    assert json.dumps(SHAPES) == before


# ---------------------------------------------------------------- clocks and table


def test_times_steps_alone_and_drops_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pending, taken = [0.0], [0.0], []
    monkeypatch.setattr(torch_round.time, "perf_counter", lambda: clock[0])

    def prepare() -> None:
        pending[0] += 100.0  # work for the device, which it does until someone waits

    def step() -> None:
        taken.append(len(taken))
        pending[0] += 50.0 if len(taken) <= WARMUP else 1.0 + len(taken)

    def synchronize() -> None:
        clock[0] += pending[0]
        pending[0] = 0.0

    seconds = timed(step, prepare, synchronize, 4)
    assert seconds == [2.0 + WARMUP + i for i in range(4)]


def test_c_is_over_the_first_row_of_the_same_code(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    table.add("eager", 1, [2.0, 1.0, 9.0])
    table.add("graph", 1, [0.5])
    table.add("eager", 16, [3.0], "a note")
    table.add("graph", 64, [0.75])
    table.add("loop", 16, [1.0])
    assert [line["c"] for line in table.lines] == [1, 1, 1.5, 1.5, None]
    head, first, *_, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["what", "rows", "ms", "spread", "c"]
    assert first.split() == ["eager", "1", "2000.000", "8000.000", "1.00"]
    assert last.split() == ["loop", "16", "1000.000", "0.000", "-"]


def test_a_section_that_fails_is_one_line_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    ran = []

    def bad() -> None:
        raise RuntimeError("no memory\nand a long story")

    sections = {"a": bad, "b": lambda: ran.append("b")}
    assert run_sections(sections, 60.0, lambda: ran.append("clean")) == {"a": "RuntimeError: no memory"}
    assert ran == ["clean", "b", "clean"]
    assert capsys.readouterr().out == "a: RuntimeError: no memory\n"


def test_out_of_time_breaks_off_one_section_and_leaves_out_the_rest(capsys) -> None:
    ran, before = [], signal.getsignal(signal.SIGALRM)

    def slow() -> None:
        try:
            time.sleep(60)
        except TimeoutError:  # as a library does that tries another way
            try:
                time.sleep(60)
            except TimeoutError as error:
                raise RuntimeError("the worker gave no answer") from error

    began = time.monotonic()
    errors = run_sections({"a": slow, "b": lambda: ran.append("b")}, 0.1, lambda: None)
    assert time.monotonic() - began < 30
    assert errors.keys() == {"a", "b"} and not ran
    assert errors["a"] == "TimeoutError: broken off, see --seconds"
    assert errors["b"] == "TimeoutError: left out, see --seconds"
    assert capsys.readouterr().out.count("\n") == 2
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

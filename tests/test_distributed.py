"""Several processes as one run: their settings, and two of them on this machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import convert.__main__
import dflash_jax
from dflash_jax import Completion, SamplingParams, UserError, distributed
from tests.models import save_random_pair

ROOT = Path(__file__).parents[1]
PROMPTS = ["Tell me about owls", "Once upon a time"]
TOKENS, BUDGET = 24, 7


def test_settings_come_from_flags_and_then_from_variables():
    variables = {"JAX_COORDINATOR_ADDRESS": "one:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert distributed.settings(None, None, None, {}) is None
    assert distributed.settings(None, None, None, variables) == ("one:1", 2, 1)
    assert distributed.settings("two:2", None, 0, variables) == ("two:2", 2, 0)
    assert distributed.settings("[::1]:9", 1, 0, {}) == ("[::1]:9", 1, 0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("a:1", None, 0), "--num-processes (or JAX_NUM_PROCESSES)"),
        ((None, 2, None), "--coordinator (or JAX_COORDINATOR_ADDRESS) and --process-id"),
        (("a", 2, 0), "--coordinator a: expected HOST:PORT"),
        (("a:99999", 2, 0), "--coordinator a:99999"),
        (("a:1", 0, 0), "--num-processes 0"),
        (("a:1", 2, 2), "--process-id 2: must be 0 to 1"),
        (("a:1", 2, -1), "--process-id -1"),
        (("a:1", "two", 0), "--num-processes (or JAX_NUM_PROCESSES): expected a whole number"),
    ],
)
def test_settings_that_make_no_sense(given, named):
    with pytest.raises(UserError) as caught:
        distributed.settings(*given, {})
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_an_unreachable_coordinator_is_named(monkeypatch):
    monkeypatch.setattr(distributed, "WAIT_SECONDS", 0)
    with pytest.raises(
        UserError, match=f"--coordinator localhost:{(port := free_port())}: process 0 does not answer"
    ):
        distributed.connect(f"localhost:{port}", 2, 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run_two(*arguments: str) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of both processes of one run of the command line."""
    shared = {k: v for k, v in os.environ.items() if k not in distributed.VARIABLES.values()}
    shared |= {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}"}
    command = [
        sys.executable,
        "-m",
        "dflash_jax.generate",
        *arguments,
        "--num-processes",
        "2",
        "--process-id",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": shared}
    processes = [subprocess.Popen([*command, str(i)], **pipes) for i in range(2)]
    try:
        return [(p.returncode, *output) for p in processes for output in [p.communicate(timeout=300)]]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return save_random_pair(tmp_path_factory.mktemp("pair"))


def completions(target: Path, drafter: Path, tp: int) -> list[Completion]:
    engine = dflash_jax.load(target, drafter, dtype="float32", tp=tp)
    return engine.generate(
        PROMPTS, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, method="ddtree", tree_budget=BUDGET)
    )


@pytest.fixture(scope="module")
def expected(pair) -> list[Completion]:
    """What one device makes of the safetensors folders."""
    return completions(*pair, tp=1)


@pytest.mark.parametrize("budget", [BUDGET, pytest.param("auto", marks=pytest.mark.slow)])
def test_two_processes_give_the_tokens_of_one_device(pair, expected, budget):
    """With an adaptive budget too, which each chooses for itself: they hang where they choose differently."""
    models = [
        "--model",
        str(pair[0]),
        "--draft-model",
        str(pair[1]),
        "--dtype",
        "float32",
        "--tp",
        "2",
        "--no-chat",
    ]
    decoding = [
        "--method",
        "ddtree",
        "--tree-budget",
        str(budget),
        "--max-new-tokens",
        str(TOKENS),
        "--ignore-eos",
    ]
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    (status, out, err), (other_status, other_out, other_err) = run_two(*models, *decoding, *prompts, "--json")
    assert (status, other_status) == (0, 0), f"{err}\n{other_err}"
    assert other_out == ""
    results = [json.loads(line) for line in out.splitlines()]
    assert [r["token_ids"] for r in results] == [list(c.token_ids) for c in expected]
    if budget != "auto":  # which goes by the clock
        assert [r["rounds"] for r in results] == [c.rounds for c in expected]


@pytest.mark.parametrize("layout", ["safetensors", "orbax"])
def test_two_devices_give_the_tokens_of_one(pair, expected, layout, tmp_path):
    folders = list(pair)
    if layout == "orbax":
        folders = [tmp_path / folder.name for folder in pair]
        for source, folder in zip(pair, folders, strict=True):
            assert convert.__main__.main([str(source), str(folder)]) == 0
    found = completions(folders[0], folders[1], tp=2)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_devices_left_over_are_refused():
    (status, out, err), (other_status, other_out, other_err) = run_two("--prompt", "a", "--tp", "1")
    assert (status, out, other_status, other_out) == (2, "", 2, "")
    for text in (err, other_err):
        assert "--tp 1: 2 processes have 2 devices; use --tp 2" in text

"""The command line on the bundled pair: what it prints, what it refuses. One engine serves all tests that decode."""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file, save_file

from dflash_jax import generate, loading
from dflash_jax.engine import Engine
from dflash_jax.generate import main
from dflash_jax.request import Completion, SamplingParams

TARGET, DRAFTER = loading.BUNDLED_TARGET, loading.BUNDLED_DRAFTER
STORY = "Once upon a time"
PROMPTS = [
    {"text": STORY},
    {"messages": [{"role": "user", "content": "Write simple steps for my sister about how to sew on a button."}]},
]
TOKENS = 48
# The default, auto, chooses by the time of day: how many rounds a text takes is certain with a fixed budget alone.
BUDGET = 15
STORY_PARAMS = SamplingParams(method="ddtree", max_new_tokens=TOKENS, tree_budget=BUDGET)
OPS = {"add_norm", "attention_front", "gdn_mixer", "gdn_scan", "linear", "tree_attention", "tree_walk"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    # One slot: prompts of one call then share their compiled programs with calls of a single prompt.
    return loading.load(dtype="float32", max_slots=1)


@pytest.fixture
def cli(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command line on the shared engine; returns (status, stdout, stderr)."""
    monkeypatch.setattr(loading, "load", lambda *args, **kwargs: engine)

    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(a) for a in argv])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(p) for p in PROMPTS) + "\n")
    return path


@pytest.fixture(scope="module")
def story(engine: Engine) -> Completion:
    return engine.generate([STORY], STORY_PARAMS)[0]


def objects(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def one_line(err: str) -> str:
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err


# ---------------------------------------------------------------- output


def test_json_has_the_fields_of_completion_and_methods_agree(cli, prompt_file):
    ids = {}
    for method in generate.COMPARED:
        status, out, err = cli("--json", "--method", method, "--prompt-file", prompt_file, "--max-new-tokens", TOKENS)
        assert (status, err) == (0, "")
        answers = objects(out)
        assert len(answers) == len(PROMPTS)
        ops = OPS | {"draft_candidates", "scalars", "tree_search"} if method == "ddtree" else OPS
        for answer in answers:
            assert list(answer) == [f.name for f in dataclasses.fields(Completion)]
            assert answer["kernels"] == dict.fromkeys(ops, "xla")
            assert answer["method"] == method and answer["completion_tokens"] == len(answer["token_ids"]) == TOKENS
            assert sum(answer["accepted_length_histogram"]) == answer["rounds"] > 0
            assert sum(answer["tree_budgets"].values()) == answer["rounds"]
        assert answers[0]["token_ids"] != answers[1]["token_ids"]
        ids[method] = [answer["token_ids"] for answer in answers]
    assert ids["ar"] == ids["dflash"] == ids["ddtree"]


def test_stream_prints_the_text_in_pieces(cli, engine, story, monkeypatch):
    chunks = list(engine.stream(STORY, STORY_PARAMS))
    assert len(chunks) > 2 and "".join(c.text for c in chunks) == story.text
    pieces = []

    class Spy(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return super().write(text)

    out = Spy()
    monkeypatch.setattr(sys, "stdout", out)
    status, _, err = cli(
        "--stream", "--no-chat", "--prompt", STORY, "--max-new-tokens", TOKENS, "--tree-budget", BUDGET
    )
    assert status == 0 and out.getvalue() == story.text + "\n"
    assert [p for p in pieces if p][:-1] == [c.text for c in chunks if c.text]
    assert err.count("\n") == 1 and f"{TOKENS} tokens" in err and "τ" in err
    assert "chosen by auto: there is a drafter" in err


@pytest.mark.parametrize("method", ["ar", "ddtree"])
def test_stop_string_ends_the_text_before_it(cli, story, method):
    stop = story.text[30:37]
    status, out, _ = cli("--json", "--no-chat", "--prompt", STORY, "--method", method, "--stop", "@@", "--stop", stop)
    (answer,) = objects(out)
    assert status == 0
    assert answer["text"] == story.text[: story.text.index(stop)]
    assert answer["finish_reason"] == "stop" and answer["stop"] == stop


def test_token_limit_inside_an_accepted_block(cli, engine, story):
    emitted = 0
    for chunk in engine.stream(STORY, STORY_PARAMS):
        if len(chunk.token_ids) >= 4:
            break
        emitted += len(chunk.token_ids)
    else:
        pytest.fail("no round accepted four tokens")
    limit = emitted + 2
    words = ["--json", "--no-chat", "--prompt", STORY, "--tree-budget", BUDGET]
    _, out, _ = cli(*words, "--method", "ddtree", "--max-new-tokens", limit)
    (answer,) = objects(out)
    assert answer["token_ids"] == story.token_ids[:limit] and answer["finish_reason"] == "length"


@pytest.mark.parametrize("arguments", [["-"], ["--prompt", "-"], ["--prompt-file", "-"]])
def test_standard_input(cli, story, monkeypatch, arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO(STORY + "\n"))
    status, out, _ = cli(*arguments, "--no-chat", "--max-new-tokens", TOKENS)
    assert status == 0 and out == story.text + "\n"


def test_prompt_files_of_every_kind(cli, tmp_path, prompt_file):
    (tmp_path / "lines.txt").write_text(f"{STORY}\n\nThe old dog\n")
    (tmp_path / "array.json").write_text(json.dumps(PROMPTS))
    status, out, _ = cli(
        "--json", "--max-new-tokens", 4, "--no-chat", "--prompt", "The old dog",
        "--prompt-file", tmp_path / "lines.txt", "--prompt-file", prompt_file, "--prompt-file", tmp_path / "array.json",
    )  # fmt: skip
    ids = [answer["token_ids"] for answer in objects(out)]
    assert status == 0 and len(ids) == 7
    assert ids[0] == ids[2] and ids[1] == ids[3] == ids[5] and ids[4] == ids[6]


def test_chat_is_the_default_and_takes_a_system_message(cli, engine):
    lengths = []
    for flags in ([], ["--chat"], ["--no-chat"], ["--system", "Be brief."], ["--no-thinking"]):
        _, out, _ = cli("--json", "--max-new-tokens", 1, "--prompt", STORY, *flags)
        lengths.append(objects(out)[0]["prompt_tokens"])
    default, chat, plain, system, not_thinking = lengths
    assert plain == len(engine.tokenizer.encode(STORY))
    assert default == chat == not_thinking == len(engine.encode_chat([{"role": "user", "content": STORY}])) > plain
    assert system > chat


def test_compare_prints_a_table_and_that_all_agree(cli, engine, prompt_file, story):
    words = ["--compare", "--prompt-file", prompt_file, "--max-new-tokens", TOKENS, "--tree-budget", BUDGET]
    status, out, err = cli(*words)
    assert (status, err) == (0, "")
    assert out.count(story.text) == 1 and "--- prompt 2: Write simple steps" in out
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("method"))
    methods = ["ar", *(["mtp"] if engine.mtp is not None else []), "dflash", "ddtree"]
    end = start + 1 + len(methods)
    table = {row.split()[0]: row.split()[1:] for row in lines[start + 1 : end]}
    assert list(table) == methods
    assert int(table["ar"][0]) == 2 * (TOKENS - 1) and float(table["ar"][1]) == float(table["ar"][3]) == 1.0
    assert int(table["ar"][0]) > int(table["dflash"][0]) >= int(table["ddtree"][0])
    assert float(table["dflash"][1]) > 1.5
    assert lines[end].startswith("identical tokens")


def test_sampling_flags_reach_the_request_and_logprobs_are_printed(cli, engine, story):
    banned = story.token_ids[1]
    params = SamplingParams(
        method="ddtree", max_new_tokens=TOKENS, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=7, logprobs=2,
        presence_penalty=0.2, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias=((banned, -50.0), (9, 1.0)),
        tree_budget=BUDGET,
    )  # fmt: skip
    flags = ["--method", "ddtree", "--max-new-tokens", TOKENS, "--temperature", 0.9, "--top-k", 50, "--top-p", 0.95]
    flags += ["--min-p", 0.01, "--seed", 7, "--logprobs", 2, "--presence-penalty", 0.2, "--frequency-penalty", 0.1]
    flags += ["--repetition-penalty", 1.1, "--logit-bias", f"{banned}=-50", "--logit-bias", "9=1"]
    flags += ["--tree-budget", BUDGET]
    args = generate.build_parser().parse_args([str(flag) for flag in flags])
    assert generate._sampling_params(args) == params
    status, out, err = cli("--json", "--no-chat", "--prompt", STORY, *flags)
    (answer,) = objects(out)
    assert (status, err) == (0, "") and answer["seed"] == 7 and banned not in answer["token_ids"]
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"] != story.token_ids
    assert all(len(entry["top"]) == 2 for entry in answer["logprobs"])


def test_compare_notices_a_difference(cli, engine, monkeypatch):
    honest = Engine.generate

    def one_token_off(self, prompts, params):
        (answer,) = honest(self, prompts, params)
        ids = answer.token_ids
        if params.method == "dflash":
            ids = [*ids[:3], ids[3] + 1, *ids[4:]]
        return [dataclasses.replace(answer, token_ids=ids)]

    monkeypatch.setattr(Engine, "generate", one_token_off)
    status, out, err = cli("--compare", "ar,dflash", "--no-chat", "--prompt", STORY, "--max-new-tokens", TOKENS)
    assert status == 1
    assert "NOT identical" in out and err == "prompt 1: dflash differs from ar at token 3\n"


def test_profile_writes_a_trace(cli, tmp_path):
    status, _, _ = cli("--no-chat", "--prompt", STORY, "--max-new-tokens", 3, "--profile", tmp_path / "trace")
    assert status == 0 and list((tmp_path / "trace").rglob("*.xplane.pb"))


# ---------------------------------------------------------------- the process


def process(*argv: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *argv]
    return subprocess.run(
        command, cwd=Path(__file__).parents[1], text=True, capture_output=True, timeout=120, check=False, **options
    )


def test_flags_are_read_before_jax_is_imported():
    code = (
        "import sys; from dflash_jax.generate import main; status = main(sys.argv[1:]); "
        "assert 'jax' not in sys.modules; sys.exit(status)"
    )
    shown = process("-c", code, "--help")
    assert shown.returncode == 0 and shown.stderr == ""
    assert all(f"{group}:" in shown.stdout for group in ("models", "prompts", "decoding", "sampling", "output"))
    refused = process("-c", code, "--max-new-tokens", "many")
    assert refused.returncode == 2 and refused.stdout == ""
    assert "--max-new-tokens" in one_line(refused.stderr)


def test_a_closed_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # argparse ignores an error at once
    with os.fdopen(write, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "dflash_jax.generate", "--help"], cwd=Path(__file__).parents[1],
            stdout=pipe, stderr=subprocess.PIPE, env=buffered, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


def test_interrupt(monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load", interrupted)
    assert main(["--prompt", STORY]) == 130
    assert capsys.readouterr().err.strip() == ""


def test_choices_are_those_of_load():
    assert generate.DTYPES == loading.DTYPES and generate.KERNELS == loading.IMPLEMENTATIONS


def rewritten(source: Path, folder: Path, change=None, **config) -> Path:
    """A copy of a model folder with other config keys and with its tensors put through `change`."""
    shutil.copytree(source, folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change is not None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path)
    return folder


def test_a_damaged_compile_cache_costs_only_time(tmp_path, capsys):
    def two_layers(tensors):  # the last linear and the first full one, which compile fast
        tensors = {k: v for k, v in tensors.items() if not k.startswith("mtp.")}
        renamed = {k: v for k, v in tensors.items() if ".layers." not in k}
        for new, old in enumerate((2, 3)):
            part = f".layers.{old}."
            renamed |= {k.replace(part, f".layers.{new}."): v for k, v in tensors.items() if part in k}
        return renamed

    types = ["linear_attention", "full_attention"]
    small = rewritten(
        TARGET, tmp_path / "small", two_layers, num_hidden_layers=2, layer_types=types, full_attention_interval=2
    )
    cache = tmp_path / "cache"
    command = ["--model", str(small), "--prompt", STORY, "--json", "--max-new-tokens", "3"]
    command += ["--compile-cache-dir", str(cache)]
    names = [
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_compilation_cache_max_size",
    ]  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    try:
        answers = []
        for _ in range(2):
            compilation_cache.reset_cache()
            assert main(command) == 0
            captured = capsys.readouterr()
            assert captured.err == ""
            answers.append(objects(captured.out)[0]["token_ids"])
            entries = list(cache.glob("*-cache"))
            assert entries
            for i, entry in enumerate(entries):
                entry.write_bytes(b"not a program" if i % 2 else entry.read_bytes()[:-100])
        assert answers[0] == answers[1]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "no prompt"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", " \n"], "--prompt is empty"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompt", "a", "--model", "nowhere/at/all"], "nowhere/at/all: no such folder"),
        (["--prompt", "a", "--draft-model", "./nowhere"], "./nowhere: no such folder"),
        (["--prompt", "a", "--method", "mtp", "--mtp-steps", "0"], "--mtp-steps"),
        (["--prompt", "a", "--method", "fast"], "--method"),
        (["--prompt", "a", "--compare", "ar,fast"], "'fast'"),
        (["--prompt", "a", "--compare", "--method", "ar"], "--compare"),
        (["--prompt", "a", "--model", str(TARGET), "--method", "ddtree"], "--draft-model"),
        (["--prompt", "a", "--model", str(TARGET), "--compare"], "--draft-model"),
        (["--prompt", "a", "--tp", "99"], "--tp 99: this run has"),
        (["--prompt", "a", "--tp", "0"], "--tp 0"),
        (["--prompt", "a", "--process-id", "1"], "--coordinator (or JAX_COORDINATOR_ADDRESS)"),
        (["--prompt", "a", "--temperature", "-0.7"], "--temperature"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature"),
        (["--prompt", "a", "--temperature", "1e-9"], "--temperature must be 0 (greedy) or at least 0.001"),
        (["--prompt", "a", "--top-p", "0"], "--top-p"),
        (["--prompt", "a", "--top-p", "1.5"], "--top-p"),
        (["--prompt", "a", "--top-k", "-1"], "--top-k"),
        (["--prompt", "a", "--min-p", "2"], "--min-p"),
        (["--prompt", "a", "--presence-penalty", "inf"], "--presence-penalty"),
        (["--prompt", "a", "--frequency-penalty", "nan"], "--frequency-penalty"),
        (["--prompt", "a", "--repetition-penalty", "0"], "--repetition-penalty"),
        (["--prompt", "a", "--logit-bias", "the=2"], "--logit-bias: expected TOKEN=BIAS"),
        (["--prompt", "a", "--logit-bias", "5=nan"], "--logit-bias"),
        (["--prompt", "a", "--logit-bias", "2048=1"], "--logit-bias names token 2048"),
        (["--prompt", "a", "--seed", "-1"], "--seed"),
        (["--prompt", "a", "--draft-sampling", "probabilistic"], "probabilistic needs --method dflash"),
        (["--prompt", "a", "--draft-sampling", "probabilistic", "--compare"], "--draft-sampling"),
        (["--prompt", "a", "--logprobs", "21", "--json"], "--logprobs must be 0 to 20"),
        (["--prompt", "a", "--logprobs", "2"], "--json"),
        (["--prompt", "a", "--block-size", "99"], "--block-size must be at most the drafter's 16"),
        (["--prompt", "a", "--tree-budget", "0"], "--tree-budget"),
        (["--prompt", "a", "--tree-budget", "1000000"], "--tree-budget"),
        (["--prompt", "a", "--tree-budget", "some"], "--tree-budget"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "a", "--max-model-len", "999999"], "--max-model-len"),
        (["--prompt", STORY, "--max-model-len", "4"], "--max-model-len 4"),
        (["--prompt", "a", "--kernels", "pallas"], "--kernels pallas"),
        (["--prompt", "a", "--thinking"], "chat_template.jinja"),
        (["--prompt", "a", "--no-chat", "--system", "b"], "--system"),
        (["--prompt", "a", "--json", "--stream"], "--stream"),
        (["--prompt", "a", "--stop", ""], "--stop"),
        (["--prompt", "a", "--compile-cache-dir", "/dev/null/x"], "--compile-cache-dir"),
        (["--prompt", "a", "--profile", "/dev/null/x"], "--profile"),
    ],
)
def test_bad_flags(capsys, arguments, named):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and named in one_line(err)


def truncated(folder: Path) -> Path:
    copy = rewritten(DRAFTER, folder)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    return copy


def missing_shard(folder: Path) -> Path:
    copy = rewritten(DRAFTER, folder)
    names = sorted(load_file(copy / "model.safetensors"))
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {name: f"model-0000{1 + (name == names[0])}-of-00002.safetensors" for name in names}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return copy


def wrong_shape(folder: Path) -> Path:
    return rewritten(DRAFTER, folder, lambda t: t | {"norm.weight": t["norm.weight"][:-1].copy()})


def other_width(folder: Path) -> Path:
    def halve(tensors):
        return {k: v[tuple(slice(n // 2 if n == 256 else n) for n in v.shape)].copy() for k, v in tensors.items()}

    return rewritten(DRAFTER, folder, halve, hidden_size=128)


def other_taps(folder: Path) -> Path:
    mask = json.loads((DRAFTER / "config.json").read_text())["dflash_config"]["mask_token_id"]
    return rewritten(DRAFTER, folder, dflash_config={"mask_token_id": mask, "target_layer_ids": [1, 5, 9]})


BROKEN_DRAFTERS = {
    "truncated": (truncated, "truncated"),
    "missing shard": (missing_shard, "model-00002-of-00002.safetensors"),
    "wrong shape": (wrong_shape, "norm.weight"),
    "width": (other_width, "another target: hidden_size 128"),
    "tap count": (other_taps, "fc.weight"),
    "layers": (lambda folder: rewritten(DRAFTER, folder, num_target_layers=32), "another target: made for 32 layers"),
    "vocabulary": (lambda folder: rewritten(DRAFTER, folder, vocab_size=4096), "another target: vocabulary 4096"),
    "DFlash2": (lambda folder: rewritten(DRAFTER, folder, architectures=["DFlash2DraftModel"]), "DFlash2"),
}


@pytest.mark.parametrize("kind", BROKEN_DRAFTERS)
def test_bad_drafters(tmp_path, capsys, kind):
    make, named = BROKEN_DRAFTERS[kind]
    folder = make(tmp_path / "broken")
    assert main(["--prompt", "a", "--model", str(TARGET), "--draft-model", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and str(folder) in one_line(err) and named in err


def test_unknown_model_type(tmp_path, capsys):
    folder = rewritten(TARGET, tmp_path / "other", model_type="gpt2")
    assert main(["--prompt", "a", "--model", str(folder)]) == 2
    assert "config.json" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("empty.txt", "\n \n", "empty.txt"),
        ("broken.jsonl", '{"prompt": "a"}\n{"prompt"\n', "broken.jsonl:2"),
        ("two.jsonl", '{"prompt": "a", "text": "b"}\n', "two.jsonl:1"),
        ("number.jsonl", '{"prompt": 3}\n', "number.jsonl:1"),
        ("messages.jsonl", '{"messages": ["hello"]}\n', "messages.jsonl:1"),
        ("object.json", '{"prompt": "a"}', "object.json"),
    ],
)
def test_bad_prompt_files(tmp_path, capsys, name, text, named):
    (tmp_path / name).write_text(text)
    assert main(["--prompt-file", str(tmp_path / name)]) == 2
    assert named in one_line(capsys.readouterr().err)

"""The protocol: generated code is that of the .proto file, and messages carry everything that the library has."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from dflash_jax import Chunk, Completion, Engine, SamplingParams, UserError
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.request import TokenLogprob
from dflash_jax.tokenizer import Tokenizer
from serve import messages
from serve.proto import dflash_pb2 as pb
from tests.models import VOCAB, random_target

ROOT = Path(__file__).parents[1]


def test_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outputs, "serve/proto/dflash.proto"]
    subprocess.run(command, cwd=ROOT, check=True)
    fresh = sorted((tmp_path / "serve/proto").iterdir())
    assert [path.name for path in fresh] == ["dflash_pb2.py", "dflash_pb2.pyi", "dflash_pb2_grpc.py"]
    for path in fresh:
        assert path.read_text() == (ROOT / "serve/proto" / path.name).read_text(), f"{path.name} is out of date"


def test_the_bounds_admit_the_generated_code() -> None:
    """It refuses older packages when it is imported."""
    bounds = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    made = (ROOT / "serve/proto/dflash_pb2.py").read_text(), (ROOT / "serve/proto/dflash_pb2_grpc.py").read_text()
    protobuf = re.search(r"Protobuf Python Version: ([\d.]+)", made[0])
    grpcio = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", made[1])
    assert protobuf is not None and grpcio is not None
    assert {f"protobuf>={protobuf[1]}", f"grpcio>={grpcio[1]}"} <= set(bounds)


def test_every_sampling_parameter_is_in_the_protocol() -> None:
    assert {f.name for f in pb.SamplingParams.DESCRIPTOR.fields} == {f.name for f in dataclasses.fields(SamplingParams)}
    assert messages.sampling_params(pb.SamplingParams()) == SamplingParams()


PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 2**31 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1e9]),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(1e-30, 1.0),
    min_p=st.floats(0.0, 1.0),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100)).map(lambda d: tuple(sorted(d.items()))),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    method=st.just("dflash"),
    tree_budget=st.one_of(st.just("auto"), st.integers(1, 1023)),
    block_size=st.one_of(st.none(), st.integers(2, 16)),
    seed=st.integers(0, 2**64 - 1),
    draft_sampling=st.sampled_from(["greedy", "probabilistic"]),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
    mtp_steps=st.integers(1, 15),
)


@hypothesis.given(PARAMS)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    sent = messages.sampling_message(params).SerializeToString()
    assert messages.sampling_params(pb.SamplingParams.FromString(sent)) == params


@pytest.mark.parametrize("method", ["auto", "ar", "mtp", "dflash", "ddtree"])
def test_methods_survive_the_wire(method) -> None:
    params = SamplingParams(method=method)
    assert messages.sampling_params(messages.sampling_message(params)) == params


NAN = float("nan")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.SamplingParams(temperature=NAN), "--temperature must be 0"),
        (pb.SamplingParams(top_p=NAN), "--top-p must be above 0"),
        (pb.SamplingParams(top_k=-1), "--top-k must be a whole number"),
        (pb.SamplingParams(min_p=2), "--min-p must be 0"),
        (pb.SamplingParams(max_new_tokens=0), "--max-new-tokens must be at least 1"),
        (pb.SamplingParams(presence_penalty=NAN), "--presence-penalty must be a finite"),
        (pb.SamplingParams(repetition_penalty=0), "--repetition-penalty must be above 0"),
        (pb.SamplingParams(logit_bias={3: NAN}), "--logit-bias takes TOKEN=BIAS"),
        (pb.SamplingParams(logit_bias={-3: 1.0}), "--logit-bias takes TOKEN=BIAS"),
        (pb.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "at most 1024 tokens, found 1025"),
        (pb.SamplingParams(stop=[""]), "--stop"),
        (pb.SamplingParams(stop=["x"] * 65), "--stop takes at most 64 strings, found 65"),
        (pb.SamplingParams(tree_budget=0), "--tree-budget must be"),
        (pb.SamplingParams(logprobs=21), "--logprobs must be 0 to 20"),
        (pb.SamplingParams(method=17), "--method has no value number 17"),  # type: ignore[arg-type]
        (pb.SamplingParams(draft_sampling=9), "--draft-sampling has no value number 9"),  # type: ignore[arg-type]
        (pb.SamplingParams(draft_sampling=pb.DRAFT_SAMPLING_PROBABILISTIC), "needs --method dflash"),
    ],
)
def test_what_no_request_can_have_is_refused(message: pb.SamplingParams, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        messages.sampling_params(message)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(random_target(), None, Tokenizer.from_folder(BUNDLED_TARGET), max_model_len=64)


def test_inputs_are_read_as_the_engine_reads_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = pb.Input(tokens=pb.TokenIds(ids=[5, 0, 95]))
    assert messages.input_ids(engine, given) == [5, 0, 95]
    words = (
        (pb.Input(), "input must have text, chat or tokens"),
        (pb.Input(text=""), "--prompt is empty"),
        (pb.Input(tokens=pb.TokenIds()), "--prompt is empty"),
        (pb.Input(tokens=pb.TokenIds(ids=[VOCAB])), "outside the vocabulary"),
        (pb.Input(tokens=pb.TokenIds(ids=[-1])), "outside the vocabulary"),
        (pb.Input(tokens=pb.TokenIds(ids=[1] * 64)), "more than --max-model-len 64"),
        (pb.Input(chat=pb.Chat()), "input.chat has no messages"),
    )
    for message, text in words:
        with pytest.raises(UserError, match=re.escape(text)):
            messages.input_ids(engine, message)
    # Text of the bundled tokenizer has ids that this small vocabulary lacks: they are looked at, not used.
    seen: list[list[int]] = []
    monkeypatch.setattr(engine, "encode", lambda x: seen.append(x) or x)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me about owls"}]
    chat = pb.Chat(messages=[pb.Message(**turn) for turn in turns])
    messages.input_ids(engine, pb.Input(chat=chat))
    messages.input_ids(engine, pb.Input(text="Tell me"))
    assert seen == [engine.encode_chat(turns), "Tell me"]
    chat.thinking = True
    with pytest.raises(UserError, match="this is a non-thinking model"):
        messages.input_ids(engine, pb.Input(chat=chat))
    chat.thinking = False
    messages.input_ids(engine, pb.Input(chat=chat))
    assert seen[-1] == engine.encode_chat(turns, enable_thinking=False)


COMPLETION = Completion(
    text="ab", token_ids=[4, 5, 1], finish_reason="stop", stop=1, prompt_tokens=7, completion_tokens=3,
    method="ddtree", rounds=2, mean_accepted_length=1.5, accepted_length_histogram=[0, 1, 1], tree_budget=31,
    tree_budgets={0: 1, 31: 1},
    prefill_seconds=0.25, decode_seconds=0.5, compile_seconds=0.0, tokens_per_second=4.0, device="cpu",
    dtype="float32", kernels={}, model="m", draft_model="d", seed=0,
)  # fmt: skip


def test_responses_carry_the_chunk() -> None:
    logprobs = (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))), TokenLogprob(1, -0.25, ()))
    message = messages.response(Chunk("b", (5, 1), COMPLETION, logprobs))
    assert (message.text, list(message.token_ids)) == ("b", [5, 1])
    got = [(p.token_id, p.logprob, [(t.token_id, t.logprob) for t in p.top]) for p in message.logprobs]
    assert got == [(5, -0.5, [(5, -0.5), (6, -1.5)]), (1, -0.25, [])]
    finished = message.finished
    assert (finished.reason, finished.stop_token_id) == (pb.FINISH_REASON_STOP, 1)
    for field in pb.Usage.DESCRIPTOR.fields:
        assert getattr(finished.usage, field.name) == getattr(COMPLETION, field.name)
    assert finished.usage.mean_accepted_length == 1.5
    by_string = dataclasses.replace(COMPLETION, stop="END")
    assert messages.response(Chunk("", (), by_string)).finished.stop_string == "END"
    by_length = dataclasses.replace(COMPLETION, stop=None, finish_reason="length")
    ended = messages.response(Chunk("", (), by_length)).finished
    assert (ended.WhichOneof("stop"), ended.reason) == (None, pb.FINISH_REASON_LENGTH)
    assert not messages.response(Chunk("b", (5,))).HasField("finished")

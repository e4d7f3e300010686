"""Random bodies and messages: what they get is an answer or a refusal that says why, and the server goes on.

Without a drafter there is one way to decode, so few programs are compiled.
"""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx2
import hypothesis
import hypothesis.strategies as st
import pydantic
import pytest

import dflash_jax
from dflash_jax import Engine
from serve.http import MAX_BODY_BYTES
from serve.openapi import (
    ASKED,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Error,
    Model,
    Models,
    document,
)
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.server import SERVICE, Server
from serve.transport import Transport
from tests.models import save_random_pair

GOOD: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "method": "ar", "ignore_eos": True}


class Served:
    """Both faces of one server."""

    def __init__(self, engine: Engine, **options: Any):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

        async def started() -> Server:
            server = Server(engine, "127.0.0.1", 0, max_queue=4, warm_up="none", http_port=0, **options)
            await server.start()
            return server

        self.server = asyncio.run_coroutine_threadsafe(started(), self.loop).result(60)
        assert self.server.http is not None
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{self.server.http.port}", timeout=120)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.server.port}", [("grpc.max_send_message_length", -1)])
        self.stub = pb_grpc.DFlashStub(self.channel)
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]
        self.text = self.good()

    def post(self, path: str, body: Any) -> httpx2.Response:
        """As Python writes JSON: with NaN and Infinity, and lone surrogates escaped."""
        return self.http.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())

    def good(self) -> str:
        """What a good request gets, the same over both protocols."""
        answer = self.post("/v1/completions", GOOD | {"model": self.model})
        assert answer.status_code == 200, answer.text
        params = pb.SamplingParams(max_new_tokens=3, ignore_eos=True, method=pb.METHOD_AR)
        request = pb.GenerateRequest(input=pb.Input(tokens=pb.TokenIds(ids=[5, 6, 7])), params=params)
        text = "".join(part.text for part in self.stub.Generate(request, timeout=120))
        assert answer.json()["choices"][0]["text"] == text
        return text

    def end(self) -> None:
        self.http.close()
        self.channel.close()
        asyncio.run_coroutine_threadsafe(self.server.stop(10), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target, _ = save_random_pair(tmp_path_factory.mktemp("pair"))
    one = Served(dflash_jax.load(target, None, dtype="float32", max_slots=2, max_model_len=64))
    yield one
    assert one.good() == one.text
    until = time.monotonic() + 30
    while one.server._worker.stats.running and time.monotonic() < until:
        time.sleep(0.02)  # they are of the last step
    stats = one.server._worker.stats
    assert (stats.running, stats.waiting, stats.pages_free) == (0, 0, stats.pages)
    one.end()


FUZZ = hypothesis.settings(max_examples=40, suppress_health_check=list(hypothesis.HealthCheck))
LIMITS = [0, 1, -1, 3, 2**31 - 1, 2**31, -(2**31), 2**63, 2**64, 10**30, -(10**400)]
NUMBERS = st.sampled_from(LIMITS) | st.integers()
FLOATS = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 1e308, 5e-324, 0.7, 1.0])
TEXTS = st.text(max_size=8) | st.sampled_from(["", "\ud800", "\0", "<tool_call>", "x" * 10_000, "--seed"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "bird"]), "content": TEXTS | JSON},
    optional={"tool_calls": JSON, "tool_call_id": TEXTS, "reasoning_content": TEXTS, "name": TEXTS},
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": FLOATS, "top_p": FLOATS, "min_p": FLOATS, "presence_penalty": FLOATS, "frequency_penalty": FLOATS,
    "repetition_penalty": FLOATS, "top_k": NUMBERS, "seed": NUMBERS, "max_tokens": NUMBERS, "logprobs": NUMBERS,
    "top_logprobs": NUMBERS, "n": NUMBERS, "stop": TEXTS | st.lists(TEXTS, max_size=3), "tree_budget": NUMBERS,
    "logit_bias": st.dictionaries(NUMBERS.map(str) | TEXTS, FLOATS, max_size=3), "stream": st.booleans(),
    "stream_options": JSON, "model": TEXTS, "tools": JSON, "tool_choice": JSON, "chat_template_kwargs": JSON,
    "draft_sampling": TEXTS, "mtp_steps": NUMBERS, "echo": JSON, "suffix": JSON, "other": JSON,
}  # fmt: skip


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """A few fields with any value of about their kind, or any at all."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True))
    return {name: draw(JSON if draw(st.integers(0, 9)) == 0 else FIELDS[name]) for name in names}


def check(answer: httpx2.Response, whole: type[pydantic.BaseModel], chunk: type[pydantic.BaseModel]) -> int:
    """That an answer is one of those that /openapi.json tells of; its status."""
    if answer.status_code != 200:
        error = Error.model_validate_json(answer.content).error
        assert answer.status_code in (400, 404, 413), answer.text
        assert error.message and "\n" not in error.message and error.type == "invalid_request_error"
    elif answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in answer.text.split("\n") if line]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            chunk.model_validate_json(line.removeprefix("data: "), strict=True)
    else:
        whole.model_validate_json(answer.content, strict=True)
    return answer.status_code


@FUZZ
@hypothesis.given(changes(), st.none() | st.lists(NUMBERS, max_size=3) | TEXTS | JSON)
@hypothesis.example({"temperature": math.nan}, None)
@hypothesis.example({"temperature": 1e308}, None)
@hypothesis.example({"temperature": 1.0, "top_p": 5e-324}, None)
@hypothesis.example({"repetition_penalty": 5e-324}, None)
@hypothesis.example({"logprobs": 20, "stream": True}, None)
@hypothesis.example({"stop": ["x"] * 10**6}, None)
@hypothesis.example({"presence_penalty": 1e308, "frequency_penalty": -1e308}, None)
@hypothesis.example({"logit_bias": {"5": 1e308, "6": -1e308}, "temperature": 0.7}, None)
def test_any_body_of_completions(served: Served, change: dict[str, Any], prompt: Any) -> None:
    body = GOOD | {"model": served.model} | change | ({} if prompt is None else {"prompt": prompt})
    check(served.post("/v1/completions", body), Completion, CompletionChunk)


@FUZZ
@hypothesis.given(changes(), st.lists(TURN, max_size=3) | JSON)
@hypothesis.example({"logprobs": True, "top_logprobs": 3, "stream": True}, [{"role": "user", "content": "x"}])
@hypothesis.example({"logprobs": True, "stream_options": {"include_usage": True}}, [{"role": "user", "content": "x"}])
def test_any_body_of_chats(served: Served, change: dict[str, Any], messages: Any) -> None:
    chat = {key: value for key, value in GOOD.items() if key != "prompt"}
    body = chat | {"model": served.model, "messages": messages} | change
    check(served.post("/v1/chat/completions", body), ChatCompletion, ChatChunk)


@FUZZ
@hypothesis.given(st.binary(max_size=40), st.integers(0, 200), st.sampled_from(["completions", "chat/completions"]))
def test_any_bytes_as_a_body(served: Served, raw: bytes, at: int, path: str) -> None:
    whole = json.dumps(GOOD | {"model": served.model}).encode()
    for body in (raw, whole[:at] + raw + whole[at:], whole[:at] + raw):
        answer = served.post(f"/v1/{path}", body)
        check(answer, Completion, CompletionChunk)


def test_a_literal_is_of_its_kind(served: Served) -> None:
    """Python takes 0 for False and True for 1, and JSON does not."""
    for name, values in {"echo": (False, 0), "n": (1, True), "best_of": (1, 1.0)}.items():
        for value, status in zip(values, (200, 400), strict=True):
            answer = served.post("/v1/completions", GOOD | {"model": served.model, name: value})
            assert check(answer, Completion, CompletionChunk) == status, (name, value)


def test_what_is_too_large_is_refused(served: Served) -> None:
    answer = served.post("/v1/completions", b'"' + b"x" * MAX_BODY_BYTES)
    assert check(answer, Completion, CompletionChunk) == 413
    for body in (b"[" * 10**6, b'{"a":' * 10**6, b'{"seed": ' + b"9" * 10**6 + b"}"):
        assert check(served.post("/v1/completions", body), Completion, CompletionChunk) == 400
    huge = pb.GenerateRequest(input=pb.Input(text="x" * (Transport().max_message_mib << 20)))
    with pytest.raises(grpc.RpcError) as caught:
        list(served.stub.Generate(huge, timeout=60))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # gRPC's own answer to it
    many = pb.GenerateRequest(input=pb.Input(text="x"), params=pb.SamplingParams(stop=["x"] * 10**6))
    assert refused(served, many)


# ---------------------------------------------------------------- gRPC


def failed(call: Callable[[], Any]) -> bool:
    """Whether a call is refused as one is for what is in it."""
    caught = None
    try:
        call()
    except grpc.RpcError as error:
        caught = error
    if caught is not None:
        assert caught.code() == grpc.StatusCode.INVALID_ARGUMENT, caught
        assert caught.details() and "\n" not in caught.details()
    return caught is not None


def refused(served: Served, message: Any, method: str = "Generate") -> bool:
    """Whether a message, or bytes, is refused as it should be; else it is answered."""
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    parts: list[pb.GenerateResponse] = []
    call = served.channel.unary_stream(
        f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=pb.GenerateResponse.FromString
    )
    if failed(lambda: parts.extend(call(raw, timeout=120))):
        return True
    assert parts[-1].HasField("finished") and not any(part.HasField("finished") for part in parts[:-1])
    return False


def values(field: Any, depth: int) -> st.SearchStrategy[Any]:
    """Any value of a field of a message."""
    kinds = {
        field.TYPE_MESSAGE: lambda: fields(field.message_type, depth - 1),
        field.TYPE_ENUM: lambda: st.integers(-1, 9),
        field.TYPE_STRING: lambda: TEXTS.filter(lambda text: "\ud800" not in text),
        field.TYPE_BOOL: st.booleans,
        field.TYPE_DOUBLE: lambda: FLOATS,
        field.TYPE_UINT64: lambda: st.sampled_from([0, 1, 2**64 - 1]) | st.integers(0, 2**64 - 1),
        field.TYPE_INT32: lambda: st.sampled_from([0, 1, -1, 3, 2**31 - 1, -(2**31)]) | st.integers(-50, 300),
    }
    return kinds[field.type]()


def fields(descriptor: Any, depth: int = 4) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the fields of a message, as keywords."""
    found: dict[str, st.SearchStrategy[Any]] = {}
    for field in descriptor.fields:
        if depth == 0 and field.type == field.TYPE_MESSAGE:
            continue
        if field.type == field.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
            key, value = (values(part, depth) for part in field.message_type.fields)
            found[field.name] = st.dictionaries(key, value, max_size=3)
        else:
            one = values(field, depth)
            found[field.name] = st.lists(one, max_size=3) if field.is_repeated else one
    return st.lists(st.sampled_from(sorted(found)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: found[name] for name in names})
    )


INPUT = fields(pb.Input.DESCRIPTOR)
PARAMS = fields(pb.SamplingParams.DESCRIPTOR)


@FUZZ
@hypothesis.given(INPUT, PARAMS)
@hypothesis.example({"tokens": {"ids": [5, 2**31 - 1]}}, {})
@hypothesis.example({"tokens": {"ids": [5, -1]}}, {})
@hypothesis.example({"tokens": {"ids": [5]}}, {"logit_bias": {5: math.nan}})
@hypothesis.example({"tokens": {"ids": [5]}}, {"temperature": math.nan})
@hypothesis.example({"tokens": {"ids": [5]}}, {"max_new_tokens": -1})
def test_any_message(served: Served, given: dict[str, Any], params: dict[str, Any]) -> None:
    base = {"max_new_tokens": 3, "method": pb.METHOD_AR}
    message = pb.GenerateRequest(input=pb.Input(**given), params=pb.SamplingParams(**base | params))
    refused(served, message)


@FUZZ
@hypothesis.given(st.binary(max_size=30), st.integers(0, 60))
@hypothesis.example(b"\xff\xfe", 6)
def test_any_bytes_as_a_message(served: Served, raw: bytes, at: int) -> None:
    params = pb.SamplingParams(max_new_tokens=2, method=pb.METHOD_AR, stop=["\u00e4"])
    whole = pb.GenerateRequest(input=pb.Input(text="Once upon a time"), params=params).SerializeToString()
    for message in (raw, whole[:at] + raw, whole[:at] + raw + whole[at + len(raw) :]):
        refused(served, message)


@FUZZ
@hypothesis.given(INPUT)
def test_any_text_to_tokenise(served: Served, given: dict[str, Any]) -> None:
    failed(lambda: served.stub.Tokenize(pb.TokenizeRequest(input=pb.Input(**given)), timeout=60))


# ---------------------------------------------------------------- what /openapi.json says


def test_the_document_tells_of_all_that_is_there(served: Served) -> None:
    found = served.http.get("/openapi.json").json()
    assert found == json.loads(json.dumps(document(served.model, ["auto", "ar"], guarded=False)))
    references = set(_references(found))
    assert {name.rpartition("/")[2] for name in references} <= set(found["components"]["schemas"])
    routes = {(method.lower(), route.path.replace("{wanted:path}", "{model}")) for method, route in _routes(served)}
    told = {(method, path) for path, methods in found["paths"].items() for method in methods}
    assert routes - {("get", "/openapi.json")} == told
    for method, path in told:
        body = {} if method == "post" else None
        answer = served.http.request(method, path.replace("{model}", served.model), json=body)
        assert str(answer.status_code) in found["paths"][path][method]["responses"], path
    Models.model_validate_json(served.http.get("/v1/models").content, strict=True)
    Model.model_validate_json(served.http.get(f"/v1/models/{served.model}").content, strict=True)
    bodies = found["components"]["schemas"]
    for asked in ASKED:
        assert set(bodies[asked.__name__]["properties"]) == set(asked.model_fields)
        assert bodies[asked.__name__]["additionalProperties"] is False
    assert "security" not in found and "401" not in str(found)
    guarded = document("m", ["ar"], guarded=True)
    assert guarded["security"] == [{"token": []}] and "401" in guarded["paths"]["/v1/models"]["get"]["responses"]


def test_limits_in_the_document_are_those_of_the_server(served: Served) -> None:
    """A value at a limit is served, one beyond it is not."""
    schemas = document(served.model, ["auto", "ar"], guarded=False)["components"]["schemas"]
    properties = schemas["CompletionAsked"]["properties"]
    tried = 0
    for name, field in properties.items():
        kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") in ("integer", "number")]
        limits = [(kind[key], up) for kind in kinds for key, up in (("minimum", -1), ("maximum", 1)) if key in kind]
        for limit, up in [] if name == "max_tokens" else limits:
            ask = GOOD | {"model": served.model, "temperature": 1.0}
            beyond = limit + up if isinstance(limit, int) else math.nextafter(limit, up * math.inf)
            assert served.post("/v1/completions", ask | {name: beyond}).status_code == 400, (name, beyond)
            assert served.post("/v1/completions", ask | {name: limit}).status_code == 200, (name, limit)
            tried += 1
    assert tried == 18


def _references(node: Any) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from [value] if key == "$ref" else _references(value)


def _routes(served: Served) -> list[tuple[str, Any]]:
    http = served.server.http
    assert http is not None
    app: Any = http._server.config.app
    return [(method, route) for route in app.routes for method in route.methods - {"HEAD"}]

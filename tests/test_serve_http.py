"""OpenAI's protocol on a small random pair, over a real socket: answers, streams, refusals, metrics, its end."""

import asyncio
import dataclasses
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

import dflash_jax
from dflash_jax import Completion, Engine, SamplingParams, UserError
from dflash_jax.scheduler import Scheduler
from serve.front import TooSlow
from serve.http import MAX_BODY_BYTES, _events
from serve.openai_messages import model_name
from serve.server import Server
from tests.models import save_random_pair

PARAMS = SamplingParams(max_new_tokens=16, method="dflash")
TURNS = [{"role": "user", "content": "Tell me about owls"}]
ASK: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "method": "dflash"}
LONG: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 1900, "temperature": 0, "method": "ar", "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    pair = save_random_pair(tmp_path_factory.mktemp("pair"))
    return dflash_jax.load(*pair, dtype="float32", max_slots=2, max_model_len=2048)


@pytest.fixture(scope="module")
def chat_text(engine: Engine) -> Completion:
    return engine.generate([engine.encode_chat(TURNS)], dataclasses.replace(PARAMS, logprobs=2))[0]


@pytest.fixture(scope="module")
def plain_text(engine: Engine) -> Completion:
    return engine.generate(["Once upon a time"], dataclasses.replace(PARAMS, logprobs=2))[0]


class Running:
    """A server in the loop of another thread."""

    def __init__(self, engine: Engine, **options: Any):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

        async def started() -> Server:
            server = Server(engine, "127.0.0.1", 0, max_queue=1, warm_up="none", http_port=0, **options)
            await server.start()
            return server

        self.server = self.run(started())
        assert self.server.http is not None
        self.url = f"http://127.0.0.1:{self.server.http.port}"
        self.model = model_name(engine)

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(300)

    def end(self) -> None:
        self.run(self.server.stop(10))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def at_rest(self) -> bool:
        stats = self.server._worker.stats
        return not self.server._worker._open and (stats.running, stats.waiting) == (0, 0)


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[Running]:
    one = Running(engine, **options)
    try:
        yield one
    finally:
        one.end()


@pytest.fixture(scope="module")
def running(engine: Engine, chat_text: Completion, plain_text: Completion) -> Iterator[Running]:
    """From now on the engine is its own."""
    with serving(engine) as one:
        yield one


@pytest.fixture
def http(running: Running) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=running.url, timeout=120) as client:
        yield client
    wait_for(running.at_rest)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def events(client: httpx2.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a stream, which must end as it should."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines.pop() == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines]


def test_a_text_is_what_the_engine_generates(http: httpx2.Client, running: Running, plain_text: Completion) -> None:
    body = ASK | {"model": running.model, "prompt": "Once upon a time", "logprobs": 2}
    answer = http.post("/v1/completions", json=body).json()
    choice, usage = answer["choices"][0], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == (plain_text.text, plain_text.finish_reason)
    assert (answer["object"], answer["model"]) == ("text_completion", running.model)
    assert usage["prompt_tokens"] == plain_text.prompt_tokens and usage["total_tokens"] == plain_text.prompt_tokens + 16
    assert (usage["rounds"], usage["mean_accepted_length"]) == (plain_text.rounds, plain_text.mean_accepted_length)
    logprobs = choice["logprobs"]
    assert plain_text.logprobs is not None
    assert logprobs["token_logprobs"] == pytest.approx([entry.logprob for entry in plain_text.logprobs], abs=1e-5)
    assert "".join(logprobs["tokens"]) == choice["text"] and len(logprobs["top_logprobs"][0]) == 2
    for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][at:].startswith(token)
    pieces = [piece["choices"][0] for piece in events(http, "/v1/completions", body)]
    assert "".join(piece["text"] for piece in pieces) == plain_text.text and len(pieces) > 2
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    offsets = [piece["logprobs"]["text_offset"] for piece in pieces if piece["logprobs"]]
    assert list(itertools.chain(*offsets)) == logprobs["text_offset"]
    # Token ids are read as they are.
    ids = running.server._front.engine.encode("Once upon a time")
    for prompt in (ids, [ids], ["Once upon a time"]):
        assert http.post("/v1/completions", json=body | {"prompt": prompt}).json()["choices"] == answer["choices"]


def test_a_conversation_is_answered(http: httpx2.Client, running: Running, chat_text: Completion) -> None:
    body = ASK | {"model": running.model, "messages": TURNS}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"] == chat_text.text and choice["message"]["role"] == "assistant"
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "about owls"}]
    told = body | {"messages": [{"role": "user", "content": parts}], "logprobs": True, "top_logprobs": 2}
    choice = http.post("/v1/chat/completions", json=told).json()["choices"][0]
    assert choice["message"]["content"] == chat_text.text
    assert chat_text.logprobs is not None
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(
        [entry.logprob for entry in chat_text.logprobs], abs=1e-5
    )
    raw = bytes(itertools.chain(*(entry["bytes"] for entry in choice["logprobs"]["content"])))
    assert raw.decode(errors="replace") == chat_text.text
    pieces = events(http, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(piece["usage"] is None for piece in pieces[:-1]) and pieces[-1]["choices"] == []
    assert pieces[-1]["usage"]["completion_tokens"] == 16
    assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces[:-1]) == chat_text.text
    assert pieces[-2]["choices"][0]["finish_reason"] == "length"
    stop = chat_text.text[len(chat_text.text) // 2 :][:3]
    cut = http.post("/v1/chat/completions", json=body | {"stop": stop}).json()["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == chat_text.text[: chat_text.text.index(stop)]


def test_sampling_has_openais_defaults(http: httpx2.Client, running: Running) -> None:
    body = {"model": running.model, "prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "method": "ar"}

    def ask(**more: Any) -> str:
        return http.post("/v1/completions", json=body | more).json()["choices"][0]["text"]

    assert ask(seed=3) == ask(seed=3, temperature=1.0) == ask(seed=3, top_p=1) != ask(seed=4)
    assert len({ask() for _ in range(3)}) == 3  # of another seed each
    assert ask(temperature=0, logit_bias={"9": 100}) == running.server._front.engine.tokenizer.decode([9] * 12)


def test_what_cannot_be_served_is_said(http: httpx2.Client, running: Running, plain_text: Completion) -> None:
    good = ASK | {"model": running.model, "prompt": "Once upon a time"}
    chat = ASK | {"model": running.model, "messages": TURNS}
    cases = [
        ("/v1/completions", good | {"temperature": -1}, 400, "temperature", "temperature must be 0"),
        ("/v1/completions", good | {"max_tokens": 0}, 400, "max_tokens", "max_tokens must be at least 1"),
        ("/v1/completions", good | {"top_p": "high"}, 400, "top_p", "top_p: Input should be a valid number"),
        ("/v1/completions", good | {"n": 2}, 400, "n", "n: Input should be 1"),
        ("/v1/completions", good | {"tools": []}, 400, "tools", "tools: Extra inputs are not permitted"),
        ("/v1/completions", good | {"prompt": ["a", "b"]}, 400, "prompt", "prompt is one a request, found 2"),
        ("/v1/completions", good | {"prompt": []}, 400, "prompt", "prompt is empty"),
        ("/v1/completions", good | {"prompt": [10**30]}, 400, "prompt", "outside the vocabulary"),
        ("/v1/completions", good | {"prompt": "word " * 2400}, 400, "prompt", "more than max_model_len 2048"),
        ("/v1/completions", good | {"logit_bias": {"x": 1}}, 400, "logit_bias", "'x', which is no token id"),
        ("/v1/completions", good | {"stop": ["x"] * 65}, 400, "stop", "at most 64 strings, found 65"),
        ("/v1/completions", good | {"seed": -1}, 400, "seed", "seed must be 0"),
        ("/v1/completions", good | {"method": "mtp"}, 400, "method", "method mtp needs"),
        ("/v1/completions", good | {"tree_budget": 6, "method": "ddtree"}, 400, "tree_budget", "is 1, 3, 7"),
        ("/v1/completions", good | {"model": "other"}, 404, "model", "this server has"),
        ("/v1/completions", {"model": running.model}, 400, "prompt", "prompt: Field required"),
        ("/v1/chat/completions", chat | {"messages": []}, 400, "messages", "messages: give at least one"),
        ("/v1/chat/completions", chat | {"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
        ("/v1/chat/completions", chat | {"messages": [{"role": "bird", "content": "x"}]}, 400, "messages", "role"),
        ("/v1/chat/completions", chat | {"chat_template_kwargs": {"enable_thinking": True}}, 400, None, "the chat"),
        ("/v1/nothing", good, 404, None, "Not Found"),
        ("/v1/models", good, 405, None, "Method Not Allowed"),
    ]
    for path, body, status, param, words in cases:
        answer = http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), answer.text
        assert error["type"] == "invalid_request_error"
        assert words in error["message"] and "\n" not in error["message"] and "--" not in error["message"]
        # No stream begins, either.
        if status == 400:
            assert http.post(path, json=body | {"stream": True}).status_code == 400
    bad = [b"", b"{", b"[1]", b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 10**5, b'{"model": "m", "prompt": "\xff"}']
    bad.append(json.dumps(good | {"temperature": float("nan")}).encode())
    for content in bad:
        answer = http.post("/v1/completions", content=content)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    answer = http.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert http.post("/v1/completions", json=good).json()["choices"][0]["text"] == plain_text.text


def test_a_full_line_is_429_and_who_leaves_makes_room(
    http: httpx2.Client, running: Running, plain_text: Completion, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, cancel = [], Scheduler.cancel

    def spy(self: Scheduler, request: Any) -> None:
        cut.append(len(request.checker.token_ids))
        cancel(self, request)
        self.check()

    monkeypatch.setattr(Scheduler, "cancel", spy)
    long, good = LONG | {"model": running.model}, ASK | {"model": running.model, "prompt": "Once upon a time"}
    with (
        http.stream("POST", "/v1/completions", json=long | {"stream": True}) as first,
        http.stream("POST", "/v1/completions", json=long | {"stream": True}) as second,
    ):
        lines = first.iter_lines(), second.iter_lines()  # to drop one is to leave
        assert all(next(one) for one in lines)

        def ask_in_vain() -> None:
            with pytest.raises(httpx2.ReadTimeout):
                httpx2.post(f"{running.url}/v1/completions", json=long, timeout=1)

        third = threading.Thread(target=ask_in_vain)
        third.start()
        wait_for(lambda: running.server._worker.stats.waiting == 1)
        start = time.monotonic()
        answer = http.post("/v1/completions", json=good)
        assert answer.status_code == 429 and time.monotonic() - start < 1
        assert answer.json()["error"]["code"] == "queue_full" and answer.headers["retry-after"] == "1"
        third.join()
    wait_for(running.at_rest)
    assert len(cut) == 3 and max(cut) < 1900
    assert http.post("/v1/completions", json=good).json()["choices"][0]["text"] == plain_text.text


def test_an_engine_that_fails_is_said(
    http: httpx2.Client, running: Running, plain_text: Completion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Scheduler) -> None:
        raise RuntimeError("device lost")

    body = ASK | {"model": running.model, "prompt": "Once upon a time"}
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_decode", broken)
        answer = http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            last = [line for line in stream.iter_lines() if line][-1]
        assert json.loads(last[6:])["error"]["message"] == "the engine failed while it served this request"
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == plain_text.text


def test_models_and_health(http: httpx2.Client, running: Running) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (running.model, 2048) and "/" not in running.model
    assert http.get(f"/v1/models/{running.model}").json() == model
    assert http.get("/v1/models/other").status_code == 404
    assert http.get("/health").status_code == 200
    running.server._serving = False
    assert http.get("/health").status_code == 503
    running.server._serving = True


def metric(text: str, name: str, **labels: str) -> float:
    found = [line for line in text.splitlines() if line.startswith(f"dflash:{name}{{")]
    found = [line for line in found if all(f'{key}="{value}"' in line for key, value in labels.items())]
    assert len(found) == 1, (name, labels, found)
    return float(found[0].split()[-1])


def test_metrics_count_what_was_done(engine: Engine, running: Running, plain_text: Completion) -> None:
    """A server of its own, whose counters begin at 0."""
    wait_for(running.at_rest)
    prompt = [(7 * i) % 250 for i in range(200)]
    with (
        serving(engine, prefix_bytes=2 * engine.prefix_state_bytes()) as one,
        httpx2.Client(base_url=one.url, timeout=120) as http,
    ):
        body = ASK | {"model": one.model, "prompt": "Once upon a time"}
        for _ in range(2):
            assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == plain_text.text
        http.post("/v1/completions", json=body | {"temperature": -1})
        for tail in (1, 2):
            done = http.post("/v1/completions", json=body | {"prompt": [*prompt, tail], "ignore_eos": True}).json()
        assert done["usage"]["prompt_tokens_details"] == {"cached_tokens": 192}
        with http.stream("POST", "/v1/completions", json=LONG | {"model": one.model, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            wait_for(lambda: one.server._worker.stats.running == 1)
            assert metric(http.get("/metrics").text, "num_requests_running") == 1
        wait_for(one.at_rest)
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.text
    assert metric(text, "request_success_total", finished_reason="length") == 4
    assert metric(text, "request_success_total", finished_reason="abort") == 1
    assert metric(text, "requests_rejected_total", reason="invalid") == 1
    assert metric(text, "prompt_tokens_total") == 2 * plain_text.prompt_tokens + 2 * 201 + 2
    assert metric(text, "prompt_tokens_cached_total") == 192
    assert metric(text, "generation_tokens_total") > 4 * 16
    rounds, drafted = metric(text, "spec_decode_num_drafts_total"), metric(text, "spec_decode_num_draft_tokens_total")
    assert rounds >= 2 * plain_text.rounds and drafted == 3 * rounds  # blocks of 4: three drafts a round
    accepted = metric(text, "spec_decode_num_accepted_tokens_total")
    once = sum((n - 1) * count for n, count in enumerate(plain_text.accepted_length_histogram) if n)
    assert 2 * once <= accepted <= 2 * once + 2 * 15
    assert metric(text, "time_to_first_token_seconds_count") == 5
    assert metric(text, "inter_token_latency_seconds_count") == metric(text, "generation_tokens_total") - 5
    assert metric(text, "request_mean_accepted_length_count") == 4
    assert metric(text, "e2e_request_latency_seconds_count") == 5
    hits, misses = metric(text, "prefix_cache_hits_total"), metric(text, "prefix_cache_misses_total")
    assert (hits, misses, metric(text, "prefixes"), metric(text, "num_preemptions_total")) == (1, 4, 1, 0)
    assert metric(text, "num_requests_running") == metric(text, "num_requests_waiting") == 0
    assert metric(text, "kv_cache_usage_perc") == pytest.approx(3 / 64)  # what the prefix holds


def test_no_token_no_answer(engine: Engine, running: Running) -> None:
    wait_for(running.at_rest)
    with serving(engine, tokens=["first", "second"]) as one, httpx2.Client(base_url=one.url) as http:
        asks = [("GET", "/v1/models"), ("GET", "/metrics"), ("GET", f"/v1/models/{one.model}")]
        for method, path in [*asks, ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")]:
            for given in (None, "first", "Bearer third", "Bearer", "Basic first"):
                headers = {} if given is None else {"authorization": given}
                answer = http.request(method, path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        twice = [("authorization", "Bearer third"), ("authorization", "Bearer first")]
        assert http.get("/v1/models", headers=twice).status_code == 401
        assert http.get("/v1/models", headers={"authorization": "Bearer second"}).status_code == 200
        assert http.get("/health").status_code == 200


def test_the_end_lets_a_stream_finish(engine: Engine, running: Running) -> None:
    wait_for(running.at_rest)
    one = Running(engine)
    body = LONG | {"model": one.model, "max_tokens": 200, "stream": True}
    with httpx2.stream("POST", f"{one.url}/v1/completions", json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        ending = threading.Thread(target=one.end)
        ending.start()
        rest = [line for line in lines if line]
    ending.join()
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{one.url}/health")


def test_openais_own_client(http: httpx2.Client, running: Running, chat_text: Completion) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id) == model
        asked = {"model": model.id, "temperature": 0, "max_tokens": 16, "extra_body": {"method": "dflash"}}
        answer = client.chat.completions.create(messages=TURNS, **asked, logprobs=True, top_logprobs=2)
        assert answer.choices[0].message.content == chat_text.text
        assert (answer.usage.completion_tokens, answer.usage.rounds) == (16, chat_text.rounds)
        assert len(answer.choices[0].logprobs.content) == 16 and answer.choices[0].finish_reason == "length"
        stop = chat_text.text[4:7]
        cut = client.chat.completions.create(messages=TURNS, **asked, stop=[stop]).choices[0]
        assert (cut.message.content, cut.finish_reason) == (chat_text.text[: chat_text.text.index(stop)], "stop")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        pieces = list(client.chat.completions.create(messages=TURNS, **asked, **options))
        assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == chat_text.text
        assert pieces[-1].usage.completion_tokens == 16
        prompt = running.server._front.engine.encode_chat(TURNS)
        assert client.completions.create(prompt=prompt, **asked).choices[0].text == chat_text.text
        texts = client.completions.create(prompt=prompt, **asked, stream=True)
        assert "".join(piece.choices[0].text for piece in texts) == chat_text.text
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=TURNS, **asked | {"temperature": -1})
        assert caught.value.param == "temperature" and "temperature must be 0" in caught.value.message
        with pytest.raises(openai.NotFoundError, match="this server has"):
            client.chat.completions.create(messages=TURNS, **asked | {"model": "other"})


def test_a_port_in_use_is_one_line(engine: Engine, running: Running) -> None:
    port = int(running.url.rsplit(":", 1)[1])

    async def second() -> None:
        Server(engine, "127.0.0.1", 0, max_queue=1, http_port=port)

    with pytest.raises(UserError, match=re.escape(f"--http-port {port} on --host 127.0.0.1 cannot be listened on")):
        asyncio.run(second())


def test_a_reader_that_is_too_slow_is_told_so() -> None:
    class Dropped:
        async def next(self) -> None:
            raise TooSlow("the text was not read")

    class Silent:
        def opening(self) -> list[dict[str, Any]]:
            return []

    async def events() -> list[bytes]:
        return [event async for event in _events(Dropped(), Silent())]  # type: ignore[arg-type]

    (event,) = asyncio.run(events())
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "too_slow"

"""Traces and the log: whose trace a request belongs to, the line and the span that it leaves."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

import dflash_jax
from dflash_jax import Engine, SamplingParams, UserError
from serve import request_log
from serve.proto import dflash_pb2 as pb
from serve.request_log import JsonLines, Report
from serve.tracing import Origin, Tracer, make_tracer
from tests.models import save_random_pair
from tests.test_serve_fuzz import GOOD, Served

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def test_a_trace_is_read_from_headers() -> None:
    origin = Origin.of("cmpl", [("accept", "x"), ("traceparent", f" {TRACEPARENT}"), ("tracestate", "a=b")])
    assert origin.trace_id == TRACE and origin.carrier["tracestate"] == "a=b" and origin.id.startswith("cmpl-")
    assert Origin.of("x", [("traceparent", f"01-{TRACE}-{PARENT}-00-more")]).trace_id == TRACE
    for bad in ("", TRACEPARENT[:-1], TRACEPARENT.upper(), f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01"):
        assert Origin.of("x", [("traceparent", bad)]).trace_id is None, bad
    assert Origin.of("x", [("traceparent", f"00-{TRACE}-{'0' * 16}-01")]).trace_id is None
    assert Origin.of("x", [("traceparent", TRACEPARENT)] * 2).trace_id is None
    assert Origin.of("x", [("traceparent", TRACEPARENT.encode())]).trace_id is None
    assert Origin.of("x", [("tracestate", "a=b")]).carrier == Origin.of("x", None).carrier == {}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    target, _ = save_random_pair(tmp_path_factory.mktemp("pair"))
    return dflash_jax.load(target, None, dtype="float32", max_slots=1, max_model_len=64)


@pytest.fixture
def served(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Served]:
    one = Served(engine, tracer=getattr(request, "param", None))
    yield one
    one.end()


def generate(served: Served, **options: Any) -> list[Any]:
    params = pb.SamplingParams(max_new_tokens=3, ignore_eos=True, method=pb.METHOD_AR)
    request = pb.GenerateRequest(input=pb.Input(text="Once"), params=params)
    return list(served.stub.Generate(request, timeout=60, **options))


def test_each_request_leaves_a_line(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serve.requests")
    caplog.clear()
    body = json.dumps(GOOD | {"model": served.model}).encode()
    usage = served.http.post("/v1/completions", content=body, headers={"traceparent": TRACEPARENT}).json()["usage"]
    parts = generate(served, metadata=(("traceparent", TRACEPARENT.replace("4bf", "abc")),))
    served.http.post("/v1/completions", json=GOOD | {"model": served.model, "temperature": -1})  # it never began
    call = served.stub.Generate(
        pb.GenerateRequest(input=pb.Input(text="Once"), params=pb.SamplingParams(max_new_tokens=50, ignore_eos=True))
    )
    next(call)
    call.cancel()
    until = time.monotonic() + 30

    def lines() -> list[dict[str, Any]]:
        """Of requests: others log too where a test before has asked for it."""
        return [record.fields for record in caplog.records if record.name == "serve.requests"]

    while len(lines()) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    first, second, third = lines()
    assert (first["trace_id"], second["trace_id"], third["trace_id"]) == (TRACE, TRACE.replace("4bf", "abc"), None)
    assert first["id"].startswith("cmpl-") and second["id"].startswith("gen-")
    for line in (first, second):
        assert (line["method"], line["finish_reason"], line["completion_tokens"]) == ("ar", "length", 3)
        assert 0 <= line["queue_seconds"] < line["ttft_seconds"] <= line["seconds"]
    assert first["prompt_tokens"] == usage["prompt_tokens"] == 3
    assert first["mean_accepted_length"] == usage["mean_accepted_length"]
    read = parts[-1].finished.usage.prefill_seconds
    assert second["ttft_seconds"] - second["queue_seconds"] == pytest.approx(read, abs=1e-5)
    assert second["rounds"] == parts[-1].finished.usage.rounds
    assert third["finish_reason"] == "abort" and third["completion_tokens"] >= 1 and third["method"] is None
    assert "Once" not in caplog.text and f"trace_id={TRACE}" in caplog.text


def report(**changes: Any) -> Report:
    values = {"origin": Origin("cmpl-1", {"traceparent": TRACEPARENT}), "model": "m", "finish_reason": "stop"}
    values |= {"params": SamplingParams(temperature=0.5), "prompt_tokens": 7, "completion_tokens": 5, "seconds": 2.0}
    values |= {"ended_at": 1e9, "ttft_seconds": 1.0, "queue_seconds": 0.25, "method": "ddtree", "rounds": 2}
    return Report(**values | {"mean_accepted_length": 2.5, "cached_tokens": 4} | changes)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Leaves the log as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_log_is_text_or_json(quiet: None, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {}
    for form in ("text", "json"):
        listener = request_log.set_up(form)
        request_log.write(report())
        logging.getLogger("other").warning("two\nlines of %s", "it")
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("other").exception("it failed")
        listener.stop()
        lines[form] = capsys.readouterr().err.splitlines()
    assert f" INFO serve.requests: request id=cmpl-1 trace_id={TRACE} model=m finish_reason=stop" in lines["text"][0]
    found = [json.loads(line) for line in lines["json"]]
    assert len(found) == 3 and found[0]["message"] == "request" and found[0]["logger"] == "serve.requests"
    wanted = {"id": "cmpl-1", "trace_id": TRACE, "method": "ddtree", "mean_accepted_length": 2.5, "seconds": 2.0}
    assert wanted.items() <= found[0].items() and found[0]["level"] == "INFO"
    assert (found[1]["message"], found[1]["level"]) == ("two\nlines of it", "WARNING")
    assert "ValueError: why" in found[2]["exception"]


def test_who_logs_waits_for_no_reader(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = threading.Event()

    class Slow:
        def write(self, text: str) -> None:
            reading.wait(30)

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Slow())
    listener = request_log.set_up("json")
    start = time.monotonic()
    for _ in range(100):
        request_log.write(report())
    assert time.monotonic() - start < 5
    reading.set()
    listener.stop()


def test_json_says_when(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("a", logging.INFO, "f", 1, "m", (), None)
    record.created, record.msecs = 1e9, 7.9
    assert json.loads(JsonLines().format(record))["time"] == "2001-09-09T01:46:40.007Z"


# ---------------------------------------------------------------- spans


def test_without_opentelemetry_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert make_tracer(None) is None and not caplog.records
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(UserError, match="--otlp-traces-endpoint: spans need opentelemetry-sdk"):
        make_tracer("http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert make_tracer(None) is None and "none are sent" in caplog.text


def test_a_tracer_that_fails_does_not_end_the_engine(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Tracer):
        def __init__(self) -> None: ...

        def record(self, report: Report) -> None:
            raise RuntimeError("no collector")

    one = Served(engine, tracer=Broken())
    assert generate(one)[-1].finished.usage.completion_tokens == 3 and one.good() == one.text
    one.end()
    assert "no span for request gen-" in caplog.text


@pytest.fixture
def collector() -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """What receives spans over OTLP, and those that it has received."""
    kind = "opentelemetry.proto.collector.trace.v1.trace_service"
    service = pytest.importorskip(f"{kind}_pb2", reason="opentelemetry-exporter-otlp-proto-grpc is not installed")
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    handlers, got = pytest.importorskip(f"{kind}_pb2_grpc"), []

    class Collector(handlers.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            got.extend(request.resource_spans)
            return service.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    handlers.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", lambda: [(spans, s) for spans in got for s in spans.scope_spans[0].spans]
    server.stop(0).wait()


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_each_request_is_a_span(
    engine: Engine, collector: tuple[str, Callable[[], list[Any]]], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, got = collector
    if by == "environment":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    tracer = make_tracer(endpoint if by == "flag" else None)
    assert tracer is not None
    one = Served(engine, tracer=tracer)
    generate(one, metadata=(("traceparent", TRACEPARENT),))
    one.end()
    tracer.record(report(finish_reason="error", origin=Origin("cmpl-2")))
    tracer.close()
    spans = [span for _, span in got()]
    (mine,) = [span for span in spans if span.trace_id.hex() == TRACE]
    assert (mine.name, mine.parent_span_id.hex()) == ("llm_request", PARENT)
    values = {item.key: item.value for item in mine.attributes}
    assert values["gen_ai.usage.completion_tokens"].int_value == 3
    assert values["dflash.mean_accepted_length"].double_value == 1.0
    assert values["gen_ai.request.id"].string_value.startswith("gen-")
    queue, ttft, whole = (
        values[f"gen_ai.latency.{name}"].double_value for name in ("time_in_queue", "time_to_first_token", "e2e")
    )
    assert 0 <= queue <= ttft <= whole
    assert (mine.end_time_unix_nano - mine.start_time_unix_nano) / 1e9 == pytest.approx(whole, abs=1e-5)
    (failed,) = [span for span in spans if span.status.code == 2]
    assert failed.parent_span_id == b"" and abs(failed.end_time_unix_nano - 10**18) < 1000
    assert {item.value.string_value for spans, _ in got() for item in spans.resource.attributes} >= {"dflash-jax"}


def test_flags(tmp_path: Path) -> None:
    from serve.__main__ import build_parser

    args = build_parser().parse_args(["--log-format", "json", "--otlp-traces-endpoint", "http://x"])
    assert (args.log_format, args.otlp_traces_endpoint) == ("json", "http://x")

"""Where a request comes from, and OpenTelemetry spans if they are wanted; without them nothing is imported."""

import dataclasses
import logging
import os
import re
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflash_jax.errors import UserError

if TYPE_CHECKING:
    from serve.request_log import Report

log = logging.getLogger(__name__)

# W3C Trace Context: version, trace, parent span, flags; a later version may have more.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a request comes from.

    Attributes:
      id: that the server gives it.
      carrier: `traceparent`, and `tracestate` with it, of the caller's trace; empty without one that can be read.
    """

    id: str
    carrier: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, kind: str, headers: Any) -> "Origin":
        """Of a call.

        Args:
          kind: what its id begins with.
          headers: pairs of lower-case name and value, or None. A trace that is named twice, or badly, is none.
        """
        values = [(k, v) for k, v in headers or () if k in ("traceparent", "tracestate") and isinstance(v, str)]
        carrier = dict(values)
        parents = [value for key, value in values if key == "traceparent"]
        good = len(parents) == 1 and _TRACEPARENT.fullmatch(parents[0].strip()) is not None
        return cls(f"{kind}-{uuid.uuid4().hex}", carrier if good else {})

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits, if the caller has a trace."""
        return self.carrier["traceparent"].strip()[3:35] if self.carrier else None


class Tracer:
    """Sends a span a request to a collector."""

    def __init__(self, provider: Any):
        """With a provider of the OpenTelemetry SDK, which sends what it is given on a thread of its own."""
        self._provider = provider
        self._tracer = provider.get_tracer("dflash_jax.serve")

    def record(self, report: "Report") -> None:
        """Sends a request that has ended, as a child of the caller's span; attributes are named as vLLM's."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(dict(report.origin.carrier))
        end = int(report.ended_at * 1e9)
        start = end - int(report.seconds * 1e9)
        span = self._tracer.start_span("llm_request", context=context, kind=SpanKind.SERVER, start_time=start)
        values = {
            "gen_ai.request.id": report.origin.id,
            "gen_ai.response.model": report.model,
            "gen_ai.request.max_tokens": report.params.max_new_tokens,
            "gen_ai.request.temperature": report.params.temperature,
            "gen_ai.request.top_p": report.params.top_p,
            "gen_ai.usage.prompt_tokens": report.prompt_tokens,
            "gen_ai.usage.completion_tokens": report.completion_tokens,
            "gen_ai.latency.e2e": report.seconds,
            "gen_ai.latency.time_in_queue": report.queue_seconds,
            "gen_ai.latency.time_to_first_token": report.ttft_seconds,
            "gen_ai.response.finish_reasons": [report.finish_reason],
            "dflash.method": report.method,
            "dflash.rounds": report.rounds,
            "dflash.mean_accepted_length": report.mean_accepted_length,
        }
        span.set_attributes({name: value for name, value in values.items() if value is not None})
        if report.finish_reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(end_time=end)

    def close(self) -> None:
        """Sends what has not been sent yet."""
        self._provider.shutdown()


def make_tracer(endpoint: str | None) -> Tracer | None:
    """What sends spans to an OTLP collector; None where none is named.

    The protocol is OTEL_EXPORTER_OTLP_TRACES_PROTOCOL's: grpc (the default) or http/protobuf.

    Args:
      endpoint: its address; None for that in OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, if any,
        which may be set for others, so that it is a warning and no error where OpenTelemetry is not installed.

    Raises:
      UserError: OpenTelemetry is not installed, or does not speak the protocol.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name))), "grpc")
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        elif protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        else:
            raise UserError(f"{_PROTOCOLS[0]} must be grpc or http/protobuf, found {protocol!r}")
    except ImportError as error:
        kind = protocol.partition("/")[0]
        words = f"spans need opentelemetry-sdk and opentelemetry-exporter-otlp-proto-{kind} ({error})"
        if endpoint is not None:
            raise UserError(f"--otlp-traces-endpoint: {words}") from None
        log.warning("an OTLP endpoint is set, but %s: none are sent", words)
        return None
    name = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "dflash-jax")}
    provider = TracerProvider(resource=Resource.create(name))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider)

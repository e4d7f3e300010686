"""Prometheus metrics of a server, with the names and meanings of vLLM's after the prefix `dflash:`."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_jax.flights import Request
from dflash_jax.request import Chunk, Completion
from serve.request_log import Report
from serve.tracing import Origin
from serve.worker import Worker

Refusal = Literal["invalid", "queue_full", "unavailable"]
Ending = Literal["stop", "length", "abort", "error"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 1.0, 2.5)
_E2E = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_LENGTHS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)


class _Held(Collector):
    """See `worker.Stats`; read when it is asked for."""

    def __init__(self, worker: Worker, model: str):
        self._worker, self._model = worker, model

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        now = self._worker.stats
        gauges = (
            ("num_requests_running", "Requests in slots.", now.running),
            ("num_requests_waiting", "Requests that have no slot yet.", now.waiting),
            ("kv_cache_usage_perc", "Part of the pages that is held; 1 is all.", 1 - now.pages_free / now.pages),
            ("prefixes", "Beginnings of prompts that are kept.", now.prefixes),
        )
        # From 0 again after a failure of the engine, which Prometheus takes for a restart.
        counters = (
            ("prefix_cache_hits", "Prompts whose beginning had been kept.", now.prefix_hits),
            ("prefix_cache_misses", "Prompts of which nothing had been kept.", now.prefix_misses),
            ("num_preemptions", "How often a request gave its pages back and began to read again.", now.preemptions),
        )
        for kind, entries in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, words, value in entries:
                family = kind(f"dflash:{name}", words, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family


class Metrics:
    """Counts what requests of all faces of a server do. Any thread may call it."""

    def __init__(self, worker: Worker):
        """Of a worker; each has a registry of its own, so that a process may have several."""
        self._registry = CollectorRegistry()
        self._model = worker.engine.names[0]
        self._registry.register(_Held(worker, self._model))
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts whose first token came.")
        self._cached = self._counter("prompt_tokens_cached", "Of these, tokens that had been kept (when a text ends).")
        self._generated = self._counter("generation_tokens", "Tokens emitted.")
        rounds = "Rounds that drafted, autoregressive ones included (when a text ends)."
        self._rounds = self._counter("spec_decode_num_drafts", rounds)
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Nodes drafted (when a text ends).")
        self._accepted = self._counter(
            "spec_decode_num_accepted_tokens", "Drafted tokens accepted: emitted less one a round (when a text ends)."
        )
        self._ended = self._counter("request_success", "Requests that have ended, by how.", "finished_reason")
        self._refused = self._counter("requests_rejected", "Requests that were not taken.", "reason")
        self._ttft = self._histogram("time_to_first_token_seconds", "From its arrival to the first token.", _TTFT)
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Time between two rounds, over the tokens of the later one.", _ITL
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From its arrival to its end.", _E2E)
        self._tau = self._histogram(
            "request_mean_accepted_length", "Tokens emitted a round: mean of a request.", _LENGTHS
        )

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        counter = Counter(f"dflash:{name}", words, ["model_name", *labels], registry=self._registry)
        return counter if labels else counter.labels(self._model)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        one = Histogram(f"dflash:{name}", words, ["model_name"], registry=self._registry, buckets=buckets)
        return one.labels(self._model)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them (`CONTENT_TYPE`)."""
        return generate_latest(self._registry)

    def refused(self, why: Refusal) -> None:
        """Counts a request that was not taken."""
        self._refused.labels(self._model, why).inc()

    def watch(self, request: Request, begun: float, origin: Origin, ended: Callable[[Report], None]) -> "Watch":
        """Counts one request that came at `begun` (`time.perf_counter`); `ended` is called once, on any thread."""
        return Watch(self, request, begun, origin, ended)


class Watch:
    """Follows one request: the engine's thread its chunks, any thread its end."""

    def __init__(
        self, metrics: Metrics, request: Request, begun: float, origin: Origin, ended: Callable[[Report], None]
    ):
        self._metrics, self._params, self._begun = metrics, request.params, begun
        self._prompt_tokens, self._tokens = len(request.prompt), 0
        self._origin, self._on_end = origin, ended
        self._lock, self._over = threading.Lock(), False
        # When its first and its last tokens came.
        self._first: float | None = None
        self._last: float | None = None

    def came(self, chunk: Chunk) -> None:
        """Takes the next chunk in, when it comes."""
        metrics, now, count = self._metrics, time.perf_counter(), len(chunk.token_ids)
        if count:
            metrics._generated.inc(count)
            self._tokens += count
            if self._last is None:
                self._first = now
                metrics._prompt.inc(self._prompt_tokens)
                metrics._ttft.observe(now - self._begun)
            else:
                for _ in range(count):
                    metrics._itl.observe((now - self._last) / count)
            self._last = now
        if chunk.completion is not None:
            self._finished(chunk.completion)

    def _finished(self, done: Completion) -> None:
        metrics, histogram = self._metrics, done.accepted_length_histogram
        metrics._cached.inc(done.cached_tokens)
        metrics._rounds.inc(done.rounds)
        metrics._drafted.inc(sum(nodes * rounds for nodes, rounds in done.tree_budgets.items()))
        metrics._accepted.inc(sum((emitted - 1) * rounds for emitted, rounds in enumerate(histogram) if emitted))
        if done.rounds:
            metrics._tau.observe(done.mean_accepted_length)
        self.ended(done.finish_reason, done)

    def ended(self, how: Ending, done: Completion | None = None) -> None:
        """Counts its end, the first time, and reports it."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self._metrics._ended.labels(self._metrics._model, how).inc()
        seconds = time.perf_counter() - self._begun
        self._metrics._e2e.observe(seconds)
        first = None if self._first is None else self._first - self._begun
        report = Report(
            self._origin, self._metrics._model, self._params, how, self._prompt_tokens, self._tokens, seconds,
            time.time(), first,
        )  # fmt: skip
        if done is not None:
            report = dataclasses.replace(
                report, method=done.method, rounds=done.rounds, mean_accepted_length=done.mean_accepted_length,
                cached_tokens=done.cached_tokens, completion_tokens=done.completion_tokens,
                queue_seconds=None if first is None else max(0.0, first - done.prefill_seconds),
            )  # fmt: skip
        self._on_end(report)

"""The engine's thread: many callers, a bounded line, cancelling, failures of the engine, and its end."""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dflash_jax import Chunk, Engine, SamplingParams, UserError
from dflash_jax.flights import Request
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.scheduler import Scheduler
from dflash_jax.tokenizer import Tokenizer
from serve.worker import MOST_FAILURES, Draining, Lost, QueueFull, Stats, Ticket, Worker
from tests.models import VOCAB, random_target

PARAMS = SamplingParams(max_new_tokens=12, method="ar", ignore_eos=True)
LONG = dataclasses.replace(PARAMS, max_new_tokens=400)


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = Tokenizer.from_folder(BUNDLED_TARGET)
    return Engine(random_target(3), None, tokenizer, max_slots=2, prefill_chunk=16, max_model_len=512)


@pytest.fixture
def worker(engine: Engine) -> Iterator[Worker]:
    one = Worker(engine, max_queue=3)
    yield one
    for request in list(one._open):
        one.cancel(one._open[request])
    assert one.stop(60)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCAB, length).tolist()


class Caller:
    """What a caller of the worker sees."""

    def __init__(self, worker: Worker, length: int, params: SamplingParams = PARAMS):
        self.items: queue.Queue[Chunk | Exception] = queue.Queue()
        self.ticket: Ticket = worker.submit(worker.engine.request(prompt(length), params), self.items.put)

    def next(self) -> Chunk | Exception:
        return self.items.get(timeout=120)

    def ids(self) -> list[int]:
        """All tokens, once it has ended."""
        found: list[int] = []
        while True:
            item = self.next()
            assert isinstance(item, Chunk), item
            found += item.token_ids
            if item.completion is not None:
                assert item.completion.token_ids == found
                return found


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def at_rest(worker: Worker) -> bool:
    stats = worker.stats
    return not worker._open and (stats.running, stats.waiting, stats.pages_free) == (0, 0, stats.pages)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> dict[int, list[int]]:
    return {n: engine.generate([prompt(n)], PARAMS)[0].token_ids for n in (3, 5, 20, 40)}


def test_callers_get_what_they_get_alone(worker: Worker, expected: dict[int, list[int]]) -> None:
    callers = {n: Caller(worker, n) for n in expected}
    assert {n: caller.ids() for n, caller in callers.items()} == expected
    wait_for(lambda: at_rest(worker))
    assert worker.stats == Stats(
        slots=2, running=0, waiting=0, pages=16, pages_free=16, page_size=64, preemptions=0,
        prefix_hits=0, prefix_misses=0, prefixes=0,
    )  # fmt: skip


def test_a_request_is_counted_from_its_taking_to_its_end(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the numbers to fall to 0 must not be early: a first step may compile for minutes."""
    stepping, go_on, step = threading.Event(), threading.Event(), Scheduler.step

    def slow(scheduler: Scheduler) -> list[tuple[Request, Chunk]]:
        stepping.set()
        assert go_on.wait(60)
        return step(scheduler)

    monkeypatch.setattr(Scheduler, "step", slow)
    still, cancel = [], Scheduler.cancel

    def note(scheduler: Scheduler, request: Request) -> None:
        still.append((worker.stats.running, worker.stats.waiting, len(worker._open)))
        cancel(scheduler, request)

    monkeypatch.setattr(Scheduler, "cancel", note)
    caller = Caller(worker, 3, LONG)
    assert stepping.wait(60) and (worker.stats.running, worker.stats.waiting) == (0, 1)
    worker.cancel(caller.ticket)
    assert worker.stats.waiting == 1
    go_on.set()
    wait_for(lambda: at_rest(worker))
    assert still == [(1, 0, 1)]


def test_a_full_line_is_said_at_once(worker: Worker, expected: dict[int, list[int]]) -> None:
    callers = [Caller(worker, 3, LONG) for _ in range(5)]
    start = time.monotonic()
    with pytest.raises(QueueFull, match="5 requests are being served or wait"):
        Caller(worker, 3)
    assert time.monotonic() - start < 1
    for caller in callers:
        worker.cancel(caller.ticket)
    wait_for(lambda: at_rest(worker))
    assert Caller(worker, 3).ids() == expected[3]


def test_cancel_makes_room_and_is_silent(worker: Worker, expected: dict[int, list[int]]) -> None:
    long = [Caller(worker, 3, LONG) for _ in range(2)]
    behind = Caller(worker, 5)
    assert isinstance(long[0].next(), Chunk)
    worker.cancel(long[0].ticket)
    assert behind.ids() == expected[5]  # long before the other one ends
    worker.cancel(long[0].ticket)
    wait_for(lambda: worker.stats.running == 1)
    count = long[0].items.qsize()
    long[1].next()
    wait_for(lambda: long[1].items.qsize() > 3)
    assert long[0].items.qsize() == count
    worker.cancel(long[1].ticket)
    wait_for(lambda: at_rest(worker))


def test_what_the_engine_refuses_reaches_its_caller_alone(worker: Worker, expected: dict[int, list[int]]) -> None:
    bad, good = Caller(worker, 3, dataclasses.replace(PARAMS, method="ddtree")), Caller(worker, 20)
    error = bad.next()
    assert isinstance(error, UserError) and "--draft-model" in str(error)
    assert good.ids() == expected[20]
    wait_for(lambda: at_rest(worker))


def test_a_failure_ends_its_requests_and_the_next_are_served(
    worker: Worker, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    callers = [Caller(worker, 3, LONG), Caller(worker, 20, LONG), Caller(worker, 5)]
    assert isinstance(callers[0].next(), Chunk)

    def broken(self: Scheduler) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(Scheduler, "_decode", broken)
    for caller in callers:
        while isinstance(item := caller.next(), Chunk):
            assert item.completion is None
        assert str(item) == "device lost"
    monkeypatch.undo()
    assert "the engine failed" in caplog.text
    assert Caller(worker, 40).ids() == expected[40]
    wait_for(lambda: at_rest(worker))


def test_stop_finishes_what_is_there_and_takes_no_more(engine: Engine, expected: dict[int, list[int]]) -> None:
    one = Worker(engine, max_queue=3)
    callers = {n: Caller(one, n) for n in expected}
    one.drain()
    with pytest.raises(Draining):
        Caller(one, 3)
    assert one.stop(60)
    assert {n: caller.ids() for n, caller in callers.items()} == expected


@pytest.mark.parametrize("what", ["no scheduler", "again and again"])
def test_an_engine_that_does_not_come_back_is_said_to_everyone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Nobody hangs: those that were there get the failure, and later ones are refused."""
    told: list[bool] = []
    one = Worker(engine, max_queue=3, on_lost=lambda: told.append(True))

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(Scheduler, "_decode", broken)
    if what == "no scheduler":
        monkeypatch.setattr(one, "_new_scheduler", broken)
        fatal = 1
    else:
        fatal = MOST_FAILURES
    for left in reversed(range(fatal)):
        caller = Caller(one, 3)
        while isinstance(item := caller.next(), Chunk):
            pass
        assert str(item) == "device lost"
        wait_for(lambda left=left: bool(told) == (left == 0))
    wait_for(lambda: not one._thread.is_alive())
    assert "the engine is lost" in caplog.text and told == [True]
    with pytest.raises(Lost, match="must be restarted"):
        Caller(one, 3)
    assert one.stop(1)


def test_a_failure_between_successes_is_not_the_end(
    worker: Worker, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Scheduler) -> None:
        raise RuntimeError("device lost")

    for _ in range(MOST_FAILURES + 1):
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "_decode", broken)
            failing = Caller(worker, 3)
            while isinstance(failing.next(), Chunk):
                pass
        assert Caller(worker, 5).ids() == expected[5]

"""The thread that owns the device. Everyone else hands it requests and is called back with their chunks."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from dflash_jax.engine import Engine
from dflash_jax.flights import Request
from dflash_jax.request import Chunk
from dflash_jax.scheduler import Scheduler

log = logging.getLogger(__name__)

# Failures of the engine with no request completed between them: after so many it is taken for lost.
MOST_FAILURES = 3


class QueueFull(Exception):
    """As many requests as the server takes are in line already."""


class Draining(Exception):
    """The server takes no more requests."""


class Lost(Exception):
    """The engine's thread has ended, because the engine could not be brought back."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """What the scheduler held after its last step, and who waits for a slot now."""

    slots: int
    running: int
    waiting: int
    pages: int
    pages_free: int
    page_size: int
    preemptions: int
    prefix_hits: int
    prefix_misses: int
    prefixes: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Stats":
        """Of a scheduler; on its own thread."""
        pool, kept = scheduler.pool, scheduler.prefixes
        return cls(
            scheduler.slots, scheduler.running, scheduler.waiting, pool.pages, pool.free, pool.page_size,
            scheduler.preemptions, *((0, 0, 0) if kept is None else (kept.hits, kept.misses, len(kept))),
        )  # fmt: skip


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request that a worker has taken.

    Attributes:
      request: see `Engine.request`.
      deliver: called on the worker's thread with each chunk, the last of which has a completion, or once with what
        ended the request instead (a `UserError`: its fault; else the engine's). It must not block.
    """

    request: Request
    deliver: Callable[[Chunk | Exception], None]


class Worker:
    """Runs a scheduler on a thread of its own. All methods may be called from any thread.

    After an exception of the engine its requests fail with it, and a new scheduler serves the next ones. If there can
    be none, or failures follow each other (`MOST_FAILURES`), the thread ends: never silently, see `on_lost`.

    Attributes:
      engine: whose models decode.
      stats: of the last step; requests that came since then wait.
    """

    def __init__(
        self,
        engine: Engine,
        max_queue: int,
        on_lost: Callable[[], None] = lambda: None,
        pages: int | None = None,
        prefix_bytes: int = 0,
        narrow: bool = False,
    ):
        """Starts the thread.

        Args:
          engine: used by this thread alone from now on (`Engine.request` aside, which only reads).
          max_queue: requests that may wait beside those in slots.
          pages, prefix_bytes, narrow: see `Engine.scheduler`.
          on_lost: called on the thread when it ends because the engine is lost; all requests have been told by then.

        Raises:
          UserError: the memory for prefixes does not hold the state of one.
        """
        self.engine, self._on_lost, self._pages, self._prefix_bytes = engine, on_lost, pages, prefix_bytes
        self._narrow = narrow
        self._scheduler = self._new_scheduler()
        self._stats = Stats.of(self._scheduler)
        self._limit = self._scheduler.slots + max_queue
        self._changed = threading.Condition()
        # Guarded by it: requests that have not ended, what the thread is to do with them, and whether more may come.
        self._open: dict[Request, Ticket] = {}
        self._inbox: list[tuple[Callable[[Ticket], None], Ticket]] = []
        self._draining = self._lost = False
        self._failures = 0
        self._begun = 0.0  # the step in hand; 0 between steps
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> Stats:
        """See `Stats`. A request is in here until its end has reached the scheduler."""
        with self._changed:
            stats, held = self._stats, len(self._open)
        return dataclasses.replace(stats, waiting=max(held - stats.running, 0))

    @property
    def step_seconds(self) -> float:
        """How long the engine has been at what it is doing: a round, a compilation; 0 while it has nothing to do."""
        begun = self._begun
        return time.monotonic() - begun if begun else 0.0

    def submit(self, request: Request, deliver: Callable[[Chunk | Exception], None]) -> Ticket:
        """Takes a request, or raises `QueueFull`, `Draining` or `Lost` at once."""
        ticket = Ticket(request, deliver)
        with self._changed:
            if self._lost:
                raise Lost("the engine has failed and cannot be brought back; the server must be restarted")
            if self._draining:
                raise Draining("the server is shutting down")
            if len(self._open) >= self._limit:
                raise QueueFull(f"{len(self._open)} requests are being served or wait; the server takes no more")
            self._open[request] = ticket
            self._inbox.append((self._submit, ticket))
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request before the next step, without another call back from then on; one that has ended is left."""
        with self._changed:
            if ticket.request in self._open:
                self._inbox.append((self._cancel, ticket))
                self._changed.notify()

    def drain(self) -> None:
        """Takes no more requests; those that are there go on."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def stop(self, timeout: float | None = None) -> bool:
        """Drains and waits until all requests have ended, at most `timeout` seconds; whether they have."""
        self.drain()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---------------------------------------------------------------- on the thread

    def _new_scheduler(self) -> Scheduler:
        engine = self.engine
        return engine.scheduler(
            engine.max_slots, engine.max_model_len, burst=1, interleave=True, few_programs=True, narrow=self._narrow,
            pages=self._pages, prefix_bytes=self._prefix_bytes,
        )  # fmt: skip

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            log.critical("the engine is lost; nothing is served any more", exc_info=True)
            with self._changed:
                self._lost = True
                lost, self._open, self._inbox = list(self._open.values()), {}, []
            for ticket in lost:
                ticket.deliver(error if isinstance(error, Exception) else Lost(str(error)))
            self._on_lost()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._inbox or self._scheduler.busy or self._draining):
                    self._changed.wait()
                inbox, self._inbox = self._inbox, []
                if not (inbox or self._scheduler.busy):
                    break
            self._begun = time.monotonic()
            try:
                for act, ticket in inbox:
                    act(ticket)
                for request, chunk in self._scheduler.step():
                    self._deliver(request, chunk, ended=chunk.completion is not None)
                    if chunk.completion is not None:
                        self._failures = 0
            except Exception as error:
                self._failures += 1
                if self._failures >= MOST_FAILURES:
                    raise
                log.exception("the engine failed; its requests end")
                self._fail(error)
            self._begun = 0.0
            self._stats = Stats.of(self._scheduler)
        self._scheduler.close()

    def _submit(self, ticket: Ticket) -> None:
        try:
            self._scheduler.submit(ticket.request)
        except Exception as error:
            self._deliver(ticket.request, error, ended=True)

    def _cancel(self, ticket: Ticket) -> None:
        try:
            self._scheduler.cancel(ticket.request)
        finally:
            with self._changed:
                self._open.pop(ticket.request, None)

    def _deliver(self, request: Request, item: Chunk | Exception, ended: bool) -> None:
        with self._changed:
            ticket = self._open.get(request)
            if ended:
                self._open.pop(request, None)
        if ticket is not None:
            ticket.deliver(item)

    def _fail(self, error: Exception) -> None:
        """Ends every request: the device's state is lost."""
        with self._changed:
            # What came in meanwhile has not been touched and waits for the new scheduler.
            fresh = {ticket.request for _, ticket in self._inbox if ticket.request in self._open}
            lost = [ticket for request, ticket in self._open.items() if request not in fresh]
            for ticket in lost:
                del self._open[ticket.request]
        for ticket in lost:
            ticket.deliver(error)
        self._scheduler = self._new_scheduler()

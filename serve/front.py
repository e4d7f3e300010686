"""What every face of the server does: makes a request off the event loop, hands it over, and follows its chunks."""

import asyncio
import collections
import logging
import time
from collections.abc import Callable

from dflash_jax.errors import UserError
from dflash_jax.flights import Request
from dflash_jax.request import Chunk
from serve import request_log
from serve.metrics import Metrics
from serve.request_log import Report
from serve.tracing import Origin, Tracer
from serve.worker import Draining, Lost, QueueFull, Worker

log = logging.getLogger(__name__)


class TooSlow(Exception):
    """Whoever asked for a text has not read it for too long."""


class Front:
    """A worker as seen from the event loop.

    Attributes:
      engine: whose models answer.
      worker: that owns it.
      max_lag_seconds: how long a chunk may wait for its reader; 0 for ever.
      metrics: of all requests that come this way.
    """

    def __init__(self, worker: Worker, max_lag_seconds: float = 0.0, tracer: Tracer | None = None):
        """Of a worker, for `max_lag_seconds` see `Transport`; `tracer`, if any, is told of every request that ends."""
        self.worker, self.engine = worker, worker.engine
        self.max_lag_seconds, self._tracer = max_lag_seconds, tracer
        self.metrics = Metrics(worker)

    def report(self, report: Report) -> None:
        """Writes that a request has ended."""
        request_log.write(report)
        if self._tracer is not None:
            try:
                self._tracer.record(report)
            except Exception:  # on the engine's thread: what watches it must not end it
                log.exception("no span for request %s", report.origin.id)

    async def open(self, make: Callable[[], Request], origin: Origin) -> "Stream":
        """Makes a request on a thread of the pool (texts are tokenised) and hands it over; close what it returns.

        Raises:
          UserError, QueueFull, Draining, Lost: it is not taken.
        """
        begun = time.perf_counter()
        try:
            return Stream(self, await asyncio.to_thread(make), begun, origin)
        except UserError:
            self.metrics.refused("invalid")
            raise
        except QueueFull:
            self.metrics.refused("queue_full")
            raise
        except (Draining, Lost):
            self.metrics.refused("unavailable")
            raise


class Stream:
    """The chunks of one request, as they come. Close it, however it ends: a request that goes on is cancelled.

    The engine does not wait for readers, so chunks pile up before a slow one. One that is too slow loses them: what all
    streams hold is never more than the engine has emitted in `Front.max_lag_seconds`.
    """

    def __init__(self, front: Front, request: Request, begun: float, origin: Origin):
        """See `Front.open`."""
        self._worker, self._watch = front.worker, front.metrics.watch(request, begun, origin, front.report)
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._times: collections.deque[float] = collections.deque()  # when they came
        self._most = front.max_lag_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        self._ticket = front.worker.submit(request, self._deliver)

    def _deliver(self, item: Chunk | Exception) -> None:
        """On the engine's thread."""
        if isinstance(item, Chunk):
            self._watch.came(item)
        else:
            self._watch.ended("error")
        self._loop.call_soon_threadsafe(self._put, item)

    def _put(self, item: Chunk | Exception) -> None:
        if self._over:
            return
        self._items.put_nowait(item)
        self._times.append(self._loop.time())
        if self._most and self._timer is None:
            self._timer = self._loop.call_later(self._most, self._look)

    def _look(self) -> None:
        """Ends it where a chunk has waited too long; else looks again when the oldest one will have."""
        self._timer = None
        if not self._times:
            return
        left = self._times[0] + self._most - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        self.close()
        while not self._items.empty():
            self._items.get_nowait()
        self._times.clear()
        self._items.put_nowait(TooSlow(f"the text was not read for {self._most:g} s and has been dropped"))
        self._times.append(0.0)

    async def next(self) -> Chunk:
        """Waits for the next chunk; after one with a completion there is none.

        Raises:
          Exception: what ended the request instead: a `UserError` (its fault), `TooSlow` (its reader's), else the
            engine's.
        """
        item = await self._items.get()
        self._times.popleft()
        if isinstance(item, Exception):
            self._over = True
            raise item
        self._over = item.completion is not None
        return item

    def close(self) -> None:
        """Ends it, if it has not ended: the caller has gone, or its deadline has passed."""
        if self._timer is not None:
            self._timer.cancel()  # it would keep the request in memory
            self._timer = None
        if not self._over:
            self._over = True
            self._watch.ended("abort")
            self._worker.cancel(self._ticket)

"""What every face of the server does: makes a request off the event loop, hands it over, and follows its chunks."""

import asyncio
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


class Front:
    """A worker as seen from the event loop.

    Attributes:
      engine: whose models answer.
      worker: that owns it.
      metrics: of all requests that come this way.
    """

    def __init__(self, worker: Worker, tracer: Tracer | None = None):
        """Of a worker; `tracer` is told of every request that ends, if there is one, and so is the log."""
        self.worker, self.engine, self._tracer = worker, worker.engine, tracer
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
    """The chunks of one request, as they come. Close it, however it ends: a request that goes on is cancelled."""

    def __init__(self, front: Front, request: Request, begun: float, origin: Origin):
        """See `Front.open`."""
        self._worker, self._watch = front.worker, front.metrics.watch(request, begun, origin, front.report)
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._over = False
        self._ticket = front.worker.submit(request, self._deliver)

    def _deliver(self, item: Chunk | Exception) -> None:
        """On the engine's thread."""
        if isinstance(item, Chunk):
            self._watch.came(item)
        else:
            self._watch.ended("error")
        self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def next(self) -> Chunk:
        """Waits for the next chunk; after one with a completion there is none.

        Raises:
          Exception: what ended the request instead: a `UserError` (its fault), else the engine's.
        """
        item = await self._items.get()
        if isinstance(item, Exception):
            self._over = True
            raise item
        self._over = item.completion is not None
        return item

    def close(self) -> None:
        """Ends it, if it has not ended: the caller has gone, or its deadline has passed."""
        if not self._over:
            self._over = True
            self._watch.ended("abort")
            self._worker.cancel(self._ticket)

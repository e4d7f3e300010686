"""What the server writes about itself: a line a finished request, as text or JSON, from a thread of its own."""

import dataclasses
import json
import logging
import logging.handlers
import queue
import time
from typing import Any

from dflash_jax.request import SamplingParams
from serve.tracing import Origin

log = logging.getLogger("serve.requests")

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclasses.dataclass(frozen=True)
class Report:
    """A request that has ended.

    Attributes:
      origin: where it came from.
      model: that answered.
      params: that it had.
      finish_reason: "stop", "length", "abort" (the caller left, or its deadline passed) or "error".
      prompt_tokens, completion_tokens: read and emitted; of one that was not finished, those of its rounds.
      seconds: from its arrival to its end, which was at `ended_at` (seconds since 1970).
      ttft_seconds: from its arrival to the first token; None if none came.
      queue_seconds: from its arrival to its admission; None, like what follows, unless it was finished.
      method: that decoded.
      rounds, mean_accepted_length, cached_tokens: as `Completion` has them.
    """

    origin: Origin
    model: str
    params: SamplingParams
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    ended_at: float
    ttft_seconds: float | None = None
    queue_seconds: float | None = None
    method: str | None = None
    rounds: int | None = None
    mean_accepted_length: float | None = None
    cached_tokens: int | None = None

    def fields(self) -> dict[str, Any]:
        """What the log says; no text of the request."""
        names = [field.name for field in dataclasses.fields(self)]
        values = {name: getattr(self, name) for name in names if name not in ("origin", "params", "ended_at")}
        found = {"id": self.origin.id, "trace_id": self.origin.trace_id} | values
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}


def write(report: Report) -> None:
    """Writes the line."""
    found = {name: value for name, value in report.fields().items() if value is not None}
    words = " ".join(f"{name}={value}" for name, value in found.items())
    log.info("request %s", words, extra={"fields": report.fields()})


class JsonLines(logging.Formatter):
    """One JSON object a line; what a request's record has beside its message is in it."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        found: dict[str, Any] = {"time": when, "level": record.levelname, "logger": record.name}
        fields = getattr(record, "fields", None)
        found |= {"message": "request"} | fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


class _Queue(logging.handlers.QueueHandler):
    """Hands records on as they are: the thread that formats them is of this process."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """See `logging.handlers.QueueHandler`."""
        return record


def set_up(form: str) -> logging.handlers.QueueListener:
    """Logs to stderr from a thread of its own: who logs waits for no one who reads. Stop what it returns at the end.

    Args:
      form: "text" or "json".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    listener = logging.handlers.QueueListener(records, handler)  # type: ignore[arg-type]
    logging.basicConfig(level=logging.INFO, handlers=[_Queue(records)], force=True)  # type: ignore[arg-type]
    listener.start()
    return listener

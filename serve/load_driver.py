"""One process of a load: clients that each have one request in flight, or requests that come at random times.

Request n of a point is the same whoever sends it and whatever the method: its prompt, its length, its seed and, in an
open loop, when it comes follow from n and the seed of the load. Processes share the clients, or the requests that come.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Literal

import grpc

from dflash_jax.request import SamplingParams
from serve import messages
from serve.async_client import AsyncClient
from serve.connection import Endpoint
from serve.proto import dflash_pb2 as pb

Outcome = Literal["finished", "failed", "rejected", "cut"]
WARM_UP_TOKENS = 16
_PAUSE = 0.1  # seconds until a client whose request was not served asks again


class WarmUpFailed(Exception):
    """A request of the warm-up was not served; the message is the status and its words."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked of a server, and how much of it at once.

    Attributes:
      prompts: serialised `Input` messages.
      params: of all requests, `max_new_tokens` and `seed` aside.
      lengths: `max_new_tokens`, of which each request gets one.
      seed: of everything that is drawn; request n samples with `seed` + n.
      concurrency: clients that each have one request in flight; None where requests come by themselves.
      rate: requests a second that come by themselves, with exponential times between them; None with clients.
      requests: that are sent at most; None for any number.
      seconds: after which what is in flight is cut off; None to wait for all.
    """

    prompts: tuple[bytes, ...]
    params: SamplingParams
    lengths: tuple[int, ...]
    seed: int
    concurrency: int | None
    rate: float | None
    requests: int | None
    seconds: float | None

    def request(self, number: int, most: int | None = None) -> pb.GenerateRequest:
        """Request `number`, with at most `most` tokens."""
        rng = random.Random(f"{self.seed}/{number // len(self.prompts)}")
        order = rng.sample(range(len(self.prompts)), len(self.prompts))  # all prompts, then all in another order
        length = random.Random(f"{self.seed}/{number}/length").choice(self.lengths)
        params = dataclasses.replace(
            self.params,
            max_new_tokens=length if most is None else min(most, length),
            seed=self.params.seed if self.params.temperature == 0 else (self.seed + number) % (1 << 64),
        )
        given = pb.Input.FromString(self.prompts[order[number % len(order)]])
        return pb.GenerateRequest(input=given, params=messages.sampling_message(params))

    def arrivals(self) -> Iterator[float]:
        """When requests 0, 1, … come, in seconds after the start (open loop)."""
        rng, when = random.Random(f"{self.seed}/arrivals"), 0.0
        assert self.rate is not None
        while True:
            when += rng.expovariate(self.rate)
            yield when


@dataclasses.dataclass
class Sample:
    """One request. Times are seconds of the machine's monotonic clock, which all processes share.

    Attributes:
      number: of the request.
      start: when it was sent.
      outcome: "cut" if the point was over before it was.
      error: status and words of one that failed or was rejected.
      times: when each chunk with tokens came.
      tokens: how many each had.
      end: when the stream ended.
      usage: serialised `Usage`, of one that finished.
    """

    number: int
    start: float
    outcome: Outcome = "cut"
    error: str = ""
    times: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    end: float = 0.0
    usage: bytes = b""


@dataclasses.dataclass
class Part:
    """What one process measured.

    Attributes:
      start, end: of it, on the clock of `Sample`.
      samples: of its requests.
      loop_seconds: processor time of the thread that all its chunks go through; what limits a client.
      cpu_seconds: processor time of all its threads.
    """

    start: float
    end: float
    samples: list[Sample]
    loop_seconds: float
    cpu_seconds: float


async def _send(client: AsyncClient, sample: Sample, request: pb.GenerateRequest) -> None:
    """Sends a request and writes down what comes."""
    call = client.stub.Generate(request, metadata=client.metadata)
    try:
        async for part in call:
            count = len(part.token_ids)
            if count:
                sample.times.append(time.perf_counter())
                sample.tokens.append(count)
            if part.HasField("finished"):
                sample.usage, sample.outcome = part.finished.usage.SerializeToString(), "finished"
    except grpc.aio.AioRpcError as error:
        full = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        sample.outcome, sample.error = "rejected" if full else "failed", f"{error.code().name}: {error.details()}"
    finally:
        sample.end = time.perf_counter()
        call.cancel()


class _Driver:
    """Sends this process's requests of one load."""

    def __init__(self, client: AsyncClient, load: Load, share: int, shares: int):
        self._client, self._load = client, load
        self._share, self._shares = share, shares
        # A process with twice the clients sends twice the requests; one that has none sends none.
        self._clients = range(share, load.concurrency or 4, shares)
        width = load.concurrency or shares
        numbers = itertools.count() if load.requests is None else range(load.requests)
        self._numbers = (number for number in numbers if number % width % shares == share)
        self.samples: list[Sample] = []

    async def warm_up(self) -> None:
        """One short request of each client, all at once; what fails is raised, but that the server's line is full."""
        samples = [Sample(number, 0.0) for number in self._clients]
        sending = [_send(self._client, s, self._load.request(s.number, WARM_UP_TOKENS)) for s in samples]
        await asyncio.gather(*sending)
        failed = [sample.error for sample in samples if sample.outcome == "failed"]
        if failed:
            raise WarmUpFailed(failed[0])

    async def _one(self, number: int, request: pb.GenerateRequest) -> Sample:
        sample = Sample(number, time.perf_counter())
        self.samples.append(sample)
        await _send(self._client, sample, request)
        return sample

    async def _client_loop(self) -> None:
        for number in self._numbers:
            sample = await self._one(number, self._load.request(number))
            if sample.outcome != "finished":
                await asyncio.sleep(_PAUSE)

    async def _closed(self) -> None:
        await asyncio.gather(*[self._client_loop() for _ in self._clients])

    async def _open(self) -> None:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            arrivals = itertools.islice(self._load.arrivals(), self._share, None, self._shares)
            for number, when in zip(self._numbers, arrivals, strict=False):
                request = self._load.request(number)
                await asyncio.sleep(start + when - time.perf_counter())
                group.create_task(self._one(number, request))

    async def run(self) -> None:
        """Until all requests have ended, or the time is over."""
        work = self._closed() if self._load.rate is None else self._open()
        with contextlib.suppress(TimeoutError):  # what is in flight is cut
            await asyncio.wait_for(work, self._load.seconds)


async def measure(
    endpoint: Endpoint, load: Load, share: int = 0, shares: int = 1, ready: Callable[[], object] = lambda: None
) -> Part:
    """Warms the server up and sends one process's share of a load.

    Args:
      endpoint: of the server.
      load: what is asked of it.
      share, shares: which process of how many this is.
      ready: called in between; may block until all processes are.

    Raises:
      WarmUpFailed: the server does not serve this.
      UserError: the files of `endpoint` do not do.
    """
    async with AsyncClient.to(endpoint) as client:
        driver = _Driver(client, load, share, shares)
        await driver.warm_up()
        ready()
        start, loop, cpu = time.perf_counter(), time.thread_time(), time.process_time()
        await driver.run()
        end = time.perf_counter()
        return Part(start, end, driver.samples, time.thread_time() - loop, time.process_time() - cpu)

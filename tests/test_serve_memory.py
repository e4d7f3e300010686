"""A server that has answered thousands of requests holds what it held after some hundred."""

import asyncio
import dataclasses
import functools
import gc
import logging
import os
import random
import time
from pathlib import Path

import grpc
import jax
import pytest

from dflash_jax import Engine, SamplingParams
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.tokenizer import Tokenizer
from serve import messages
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.server import Server
from tests.models import VOCAB, random_drafter, random_mtp, random_target

BASE = SamplingParams(max_new_tokens=8, method="ar", ignore_eos=True)
FEW = ({"method": "ar"}, {"method": "dflash"})
ALL = (*FEW, {"method": "ddtree", "tree_budget": 7}, {"method": "ddtree"}, {"method": "mtp"})
SAMPLED = ({}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 3})
AT_ONCE = 12
Code = grpc.StatusCode


@functools.cache
def engine() -> Engine:
    target = random_target(3)
    return Engine(
        target, random_drafter(target), Tokenizer.from_folder(BUNDLED_TARGET), max_slots=4, prefill_chunk=16,
        max_model_len=256, mtp=random_mtp(target),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def logs_that_pytest_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("serve.requests"), "propagate", False)


@dataclasses.dataclass(frozen=True)
class Census:
    """What this process holds.

    Attributes:
      resident: bytes of memory.
      arrays, array_bytes: of the device.
      objects: that Python's collector knows.
      files, threads: open and running ones.
    """

    resident: int
    arrays: int
    array_bytes: int
    objects: int
    files: int
    threads: int

    @classmethod
    async def now(cls) -> "Census":
        engine().programs._copied.cache_clear()  # of as many small arguments as it may hold
        for _ in range(3):
            gc.collect()
            await asyncio.sleep(0.3)  # what the loop has to end: generators of cancelled calls, closed connections
        own, arrays = Path("/proc/self"), jax.live_arrays()
        pages = int((own / "statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"), len(arrays), sum(x.nbytes for x in arrays), len(gc.get_objects()),
            len(list((own / "fd").iterdir())), len(list((own / "task").iterdir())),
        )  # fmt: skip


def make(rng: random.Random, ways: tuple, method: str | None = None) -> pb.GenerateRequest:
    """One like no other before it; some begin alike."""
    way = rng.choice(ways) if method is None else {"method": method}
    params = dataclasses.replace(BASE, **way, **rng.choice(SAMPLED), seed=rng.getrandbits(60))
    ids = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 17, 70)))]
    if rng.random() < 0.3:
        ids = [7] * 70 + ids
    return pb.GenerateRequest(
        input=pb.Input(tokens=pb.TokenIds(ids=ids)), params=messages.sampling_message(params)
    )


async def ask(stub: pb_grpc.DFlashStub, number: int, rng: random.Random, ways: tuple) -> str:
    """One in five is cancelled, one in ten too late, one in twenty refused, one in twenty a batch."""
    request = make(rng, ways)
    try:
        if number % 20 == 4:
            request.params.temperature = -1.0
        if number % 20 == 14:
            batch = pb.GenerateBatchRequest(requests=[make(rng, ways) for _ in range(3)])
            return str(sum([part.chunk.HasField("finished") async for part in stub.GenerateBatch(batch)]))
        if number % 20 == 16:
            await stub.Tokenize(pb.TokenizeRequest(input=pb.Input(text=str(rng.random()))))
        seconds = rng.uniform(0.001, 0.05) if number % 10 == 3 else None
        call = stub.Generate(request, timeout=seconds)
        async for part in call:
            if number % 5 == 1:
                call.cancel()
            if part.HasField("finished"):
                return "finished"
    except asyncio.CancelledError:
        return "cancelled"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "open"


async def flow(port: int, numbers: range, ways: tuple) -> list[str]:
    """So many requests, each connection for a hundred of them; ends with one of each state, alone."""
    ends: list[str] = []
    for begin in range(numbers.start, numbers.stop, 100):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub, lock = pb_grpc.DFlashStub(channel), asyncio.Semaphore(AT_ONCE)

            async def one(number: int, stub: pb_grpc.DFlashStub = stub, lock: asyncio.Semaphore = lock) -> str:
                async with lock:
                    return await ask(stub, number, random.Random(number), ways)

            ends += await asyncio.gather(*map(one, range(begin, min(begin + 100, numbers.stop))))
            until = time.monotonic() + 60
            while (now := await stub.GetServerInfo(pb.GetServerInfoRequest())).running or now.waiting:
                assert time.monotonic() < until
                await asyncio.sleep(0.02)
            for method in ("ar", "dflash"):
                async for _ in stub.Generate(make(random.Random(1), ways, method)):
                    pass
    return ends


def run(blocks: int, size: int, ways: tuple) -> list[tuple[Census, Census]]:
    """The census before and after each block of so many requests for which nothing had to be compiled.

    A program stays, and is megabytes.
    """

    async def whole() -> list[tuple[Census, Census]]:
        kept = 4 * engine().prefix_state_bytes()
        server = Server(engine(), "127.0.0.1", 0, max_queue=64, warm_up="none", prefix_bytes=kept)
        await server.start()
        scheduler = server._worker._scheduler
        ends: list[str] = []
        quiet = []
        for block in range(blocks):
            if block == 1:  # the first one is there to compile
                ends.clear()
            before, known = await Census.now(), len(engine().programs.compiled)
            ends += await flow(server.port, range(block * size, (block + 1) * size), ways)
            until = time.monotonic() + 60
            while scheduler.busy or server._worker._open:  # rounds that were handed out before a text ended
                assert time.monotonic() < until
                await asyncio.sleep(0.02)
            if block and len(engine().programs.compiled) == known:
                quiet.append((before, await Census.now()))
            assert scheduler.prefixes is not None
            scheduler.check()
            assert scheduler.pool.pages - scheduler.pool.free == len(set(scheduler.prefixes.held))
        assert server._worker._scheduler is scheduler  # the engine has not failed
        await server.stop(1)
        total, counted = len(ends), {end: ends.count(end) for end in dict.fromkeys(ends)}
        print(f"{counted}\n{quiet[0][0]}\n{quiet[-1][1]}\n{len(quiet)} blocks without compilation")
        assert counted["finished"] > total / 2 and counted["cancelled"] > total / 10
        assert counted[Code.INVALID_ARGUMENT.name] == total // 20 == counted["3"]
        assert counted[Code.DEADLINE_EXCEEDED.name] > 0 and set(counted) <= {
            "finished", "cancelled", "3", Code.INVALID_ARGUMENT.name, Code.DEADLINE_EXCEEDED.name,
        }  # fmt: skip
        return quiet

    return asyncio.run(asyncio.wait_for(whole(), 1500))


def growth(quiet: list[tuple[Census, Census]], what: str) -> int:
    return sum(getattr(after, what) - getattr(before, what) for before, after in quiet)


def assert_flat(quiet: list[tuple[Census, Census]], size: int) -> None:
    # What is kept of a request is dozens of objects, in every block; a process of many tests stirs in one or another.
    assert min(after.objects - before.objects for before, after in quiet) < 5 * size
    assert len({(census.arrays, census.array_bytes) for pair in quiet for census in pair}) == 1
    first, last = quiet[0][0], quiet[-1][1]
    assert last.files <= first.files + 4 and last.threads <= first.threads + 4


def test_nothing_is_kept_of_requests() -> None:
    quiet = run(4, 100, FEW)
    assert_flat(quiet, 100)


@pytest.mark.slow
def test_memory_is_flat_over_2000_requests() -> None:
    quiet = run(11, 200, ALL)
    assert len(quiet) >= 5
    assert_flat(quiet, 200)
    print(f"{growth(quiet, 'resident') / 2**20:.1f} MiB more")
    assert growth(quiet, "resident") < 32 << 20

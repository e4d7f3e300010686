"""Many requests of all kinds at once, some cancelled, some too late: each gets what it gets alone, nothing is left."""

import asyncio
import dataclasses
import functools
import gc
import random
import time

import grpc
import numpy as np
import pytest

from dflash_jax import Completion, Engine, SamplingParams
from dflash_jax.flights import Request
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.scheduler import Scheduler
from dflash_jax.tokenizer import Tokenizer
from serve import messages
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.server import Server
from tests.models import VOCAB, random_drafter, random_mtp, random_target

AR = SamplingParams(max_new_tokens=20, method="ar", ignore_eos=True)
# In fp32 all of them emit the tokens of AR.
FEW = ({"method": "ar"}, {"method": "dflash"}, {"method": "ddtree", "tree_budget": 7})
ALL = (*FEW, {"method": "ddtree"}, {"method": "ddtree", "tree_budget": 15}, {"method": "mtp"})
PENALISED = {"temperature": 1.2, "presence_penalty": 0.5, "logit_bias": ((3, 1.0),), "top_k": 30}
FEW_SAMPLED = ({}, PENALISED)
ALL_SAMPLED = (*FEW_SAMPLED, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.2})


@functools.cache
def engine(slots: int = 2) -> Engine:
    target = random_target(3)
    tokenizer = Tokenizer.from_folder(BUNDLED_TARGET)
    return Engine(
        target, random_drafter(target), tokenizer, max_slots=slots, prefill_chunk=16, max_model_len=512,
        mtp=random_mtp(target),
    )  # fmt: skip


@functools.cache
def prompt(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(0, VOCAB, length).tolist())


@functools.cache
def alone(length: int, params: SamplingParams) -> Completion:
    """What autoregressive decoding makes of it, with nothing beside it; of the server's programs, to compile less."""
    scheduler = engine().scheduler(2, 512, few_programs=True)
    params = dataclasses.replace(params, method="ar", tree_budget="auto")
    scheduler.submit(engine().request(prompt(length), params))
    chunks = [chunk for _ in iter(lambda: scheduler.busy, False) for _, chunk in scheduler.step()]
    scheduler.close()
    assert chunks[-1].completion is not None
    return chunks[-1].completion


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request: how long its prompt is, after how many chunks it is cancelled, how many seconds it has."""

    length: int
    params: SamplingParams
    cancel: int | None = None
    seconds: float | None = None


def make_asks(count: int, ways: tuple, sampled: tuple, rng: random.Random, long: bool) -> list[Ask]:
    """One in five is cancelled in the middle, one in ten has too little time; two in ten may be long,
    one after the other, so that they grow side by side.
    """
    asks = []
    for number in range(count):
        params = dataclasses.replace(AR, **rng.choice(ways), **rng.choice(sampled), seed=rng.choice((1, 2**64 - 1)))
        if params.temperature == 0:
            params = dataclasses.replace(params, seed=0)
        ask = Ask(rng.choice((1, 5, 16, 17, 60, 130)), params)
        if number % 5 == 1:
            ask = dataclasses.replace(ask, cancel=rng.randint(1, 3))
        elif number % 10 == 3:
            params = dataclasses.replace(params, max_new_tokens=350)
            ask = Ask(130, params, seconds=rng.uniform(0.02, 0.1))
        elif long and number % 10 in (7, 8):
            ask = Ask(130, dataclasses.replace(params, max_new_tokens=350))
        asks.append(ask)
    return asks


async def send(stub: pb_grpc.DFlashStub, ask: Ask) -> str:
    """Sends it, holds what comes against what it gets alone, and says how it ended."""
    given = pb.Input(tokens=pb.TokenIds(ids=prompt(ask.length)))
    request = pb.GenerateRequest(input=given, params=messages.sampling_message(ask.params))
    call = stub.Generate(request, timeout=ask.seconds)
    ids: list[int] = []
    text, end, chunks = "", "open", 0
    try:
        async for part in call:
            ids += part.token_ids
            text, chunks = text + part.text, chunks + 1
            if part.HasField("finished"):
                end = "finished"
                assert part.finished.usage.completion_tokens == len(ids)
            elif chunks == ask.cancel:
                call.cancel()
    except asyncio.CancelledError:
        end = "cancelled"
    except grpc.aio.AioRpcError as error:
        end = "late" if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and ask.seconds is not None else str(error)
    expected = await asyncio.to_thread(alone, ask.length, ask.params)
    assert ids == expected.token_ids[: len(ids)], ask
    assert end != "finished" or (len(ids), text) == (len(expected.token_ids), expected.text), ask
    return end


async def soak(asks: list[Ask], at_once: int, pages: int | None, slots: int) -> list[str]:
    """All of them, so many at a time; then everything must be as before."""
    server = Server(engine(slots), "127.0.0.1", 0, max_queue=len(asks), warm_up="none", pages=pages)
    await server.start()
    lock = asyncio.Semaphore(at_once)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.DFlashStub(channel)

        async def one(ask: Ask) -> str:
            async with lock:
                return await send(stub, ask)

        ends = await asyncio.gather(*map(one, asks))
        until = time.monotonic() + 60
        while True:
            info = await stub.GetServerInfo(pb.GetServerInfoRequest())
            busy = server._worker._scheduler.busy  # surplus rounds may still be on their way
            if (info.running, info.waiting, info.pages_free, busy) == (0, 0, info.pages, False):
                break
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
    scheduler = server._worker._scheduler
    assert not scheduler.busy and not server._worker._open
    scheduler.check()
    assert (scheduler.preemptions > 0) == (pages is not None)
    await server.stop(1)
    return ends


def run(
    count: int,
    at_once: int,
    ways: tuple,
    sampled: tuple,
    monkeypatch: pytest.MonkeyPatch,
    pages: int | None = None,
    slots: int = 2,
) -> None:
    step = Scheduler.step

    def checked(self: Scheduler) -> list:
        chunks = step(self)
        self.check()
        return chunks

    gc.collect()
    others = {id(thing) for thing in gc.get_objects() if isinstance(thing, Request)}  # of tests before this one
    asks = make_asks(count, ways, sampled, random.Random(at_once), pages is not None)
    for ask in asks:  # before the server has the engine for itself
        alone(ask.length, ask.params)
    monkeypatch.setattr(Scheduler, "step", checked)
    ends = asyncio.run(asyncio.wait_for(soak(asks, at_once, pages, slots), 1500))
    assert set(ends) == {"finished", "cancelled", "late"} and ends.count("finished") >= 0.6 * count
    assert ends.count("cancelled") >= 0.1 * count
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Request) and id(thing) not in others]


def test_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    run(40, 8, FEW, FEW_SAMPLED, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "pages"), [(1, None), (4, None), (16, None), (16, 8)])
def test_many(at_once: int, pages: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    run(200, at_once, ALL, ALL_SAMPLED, monkeypatch, pages)


@pytest.mark.slow
def test_all_at_once_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot for each of sixteen, so that all of them share their rounds."""
    run(200, 16, FEW, FEW_SAMPLED, monkeypatch, slots=16)

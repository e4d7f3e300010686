"""GenerateBatch: each request gets what it gets alone, and one that fails leaves the others be."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import grpc
import pytest

import dflash_jax
from dflash_jax import Completion, Engine, SamplingParams
from dflash_jax.scheduler import Scheduler
from serve import messages
from serve.async_client import AsyncClient
from serve.proto import dflash_pb2 as pb
from tests.models import save_random_pair
from tests.servers import serving

PARAMS = SamplingParams(max_new_tokens=12, method="dflash", ignore_eos=True)
LONG = dataclasses.replace(PARAMS, max_new_tokens=1900, method="ar")
TEXTS = ["Once upon a time", "The owl", "In a green house close to the sea"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    pair = save_random_pair(tmp_path_factory.mktemp("pair"))
    return dflash_jax.load(*pair, dtype="float32", max_slots=2, max_model_len=2048)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[Completion]:
    return [engine.generate([text], PARAMS)[0] for text in TEXTS]


@pytest.fixture(scope="module")
def port(engine: Engine, expected: list[Completion]) -> Iterator[int]:
    """With two slots and one place in line."""
    with serving(engine, max_queue=1) as one:
        yield one


def run(port: int, test: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncClient(f"127.0.0.1:{port}", timeout=60) as client:
            await test(client)
            until = time.monotonic() + 30
            while (now := (await client.info()).server).running or now.waiting or now.pages_free < now.pages:
                assert time.monotonic() < until
                await asyncio.sleep(0.02)

    asyncio.run(main())


async def sorted_out(
    parts: AsyncIterator[pb.GenerateBatchResponse],
) -> tuple[dict[int, list[pb.GenerateResponse]], dict[int, pb.Error]]:
    """Chunks and errors by request; nothing may follow what is a request's last message."""
    chunks: dict[int, list[pb.GenerateResponse]] = {}
    errors: dict[int, pb.Error] = {}
    async for part in parts:
        assert part.index not in errors
        assert not any(chunk.HasField("finished") for chunk in chunks.get(part.index, []))
        if part.HasField("error"):
            errors[part.index] = part.error
        else:
            chunks.setdefault(part.index, []).append(part.chunk)
    return chunks, errors


def is_whole(chunks: list[pb.GenerateResponse], expected: Completion) -> bool:
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [i for chunk in chunks for i in chunk.token_ids] == expected.token_ids
    return chunks[-1].finished.usage.rounds == expected.rounds


def test_each_gets_what_it_gets_alone(port: int, expected: list[Completion]) -> None:
    async def test(client: AsyncClient) -> None:
        chunks, errors = await sorted_out(client.generate_batch(TEXTS, PARAMS))
        assert not errors and sorted(chunks) == [0, 1, 2]
        assert all(is_whole(chunks[i], expected[i]) for i in range(3))
        order = [part.index async for part in client.generate_batch(TEXTS[:2], PARAMS)]
        assert order != sorted(order)  # they decode beside each other
        lengths = [dataclasses.replace(PARAMS, max_new_tokens=n) for n in (3, 5)]
        chunks, errors = await sorted_out(client.generate_batch(TEXTS[:2], lengths))
        assert [sum(len(c.token_ids) for c in chunks[i]) for i in range(2)] == [3, 5]
        with pytest.raises(ValueError, match="longer"):
            await anext(client.generate_batch(TEXTS[:1], lengths))

    run(port, test)


def test_one_that_fails_leaves_the_others_be(port: int, expected: list[Completion]) -> None:
    async def test(client: AsyncClient) -> None:
        asked = [pb.GenerateRequest(input=pb.Input(text=t), params=messages.sampling_message(PARAMS)) for t in TEXTS]
        asked[1].params.temperature = float("nan")
        call = client.stub.GenerateBatch(pb.GenerateBatchRequest(requests=asked), timeout=60)
        chunks, errors = await sorted_out(call)
        assert sorted(chunks) == [0, 2] and all(is_whole(chunks[i], expected[i]) for i in chunks)
        assert list(errors) == [1] and errors[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert errors[1].message.startswith("--temperature must be")
        # Two slots and a place in line: the rest is refused at once, while those decode.
        stream = client.generate_batch(["The owl"] * 5, [LONG] * 5)
        seen: dict[int, int] = {}
        async for part in stream:
            if part.HasField("error"):
                seen[part.index] = part.error.code
            if len(seen) == 2:
                break
        assert seen == dict.fromkeys((3, 4), grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        await stream.aclose()

    run(port, test)


def test_cancelling_and_deadlines_end_all_of_them(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, cancel = [], Scheduler.cancel
    monkeypatch.setattr(Scheduler, "cancel", lambda self, request: cut.append(request) or cancel(self, request))

    async def test(client: AsyncClient) -> None:
        stream = client.generate_batch(TEXTS, LONG)
        seen = set()
        while len(seen) < 2:
            seen.add((await anext(stream)).index)
        await stream.aclose()
        await until_cut(3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sorted_out(client.generate_batch(TEXTS, LONG, timeout=0.3))
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until_cut(6)  # on the engine's thread, which may come to it later than the caller to its error

    async def until_cut(count: int) -> None:
        until = time.monotonic() + 30
        while len(cut) < count:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)

    run(port, test)
    assert len(cut) == 6


def test_a_failure_of_the_engine_is_told_to_each(
    port: int, expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Scheduler) -> None:
        monkeypatch.undo()
        raise RuntimeError("device lost")

    async def test(client: AsyncClient) -> None:
        stream = client.generate_batch(TEXTS[:2], LONG)
        await anext(stream)
        await anext(stream)
        monkeypatch.setattr(Scheduler, "step", broken)
        _, errors = await sorted_out(stream)
        assert {error.code for error in errors.values()} == {grpc.StatusCode.INTERNAL.value[0]} and len(errors) == 2
        chunks, errors = await sorted_out(client.generate_batch(TEXTS, PARAMS))
        assert not errors and all(is_whole(chunks[i], expected[i]) for i in range(3))

    run(port, test)


def test_a_batch_has_requests_and_not_too_many(port: int) -> None:
    async def test(client: AsyncClient) -> None:
        for count in (0, 1025):
            asked = pb.GenerateBatchRequest(requests=[pb.GenerateRequest()] * count)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sorted_out(client.stub.GenerateBatch(asked))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == f"requests must be 1 to 1024, found {count}"
        _, errors = await sorted_out(client.generate_batch([""] * 1024))
        assert len(errors) == 1024

    run(port, test)

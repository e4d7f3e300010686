"""The asyncio client and the load generator: what a server's engine would give, and figures that add up."""

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

import dflash_jax
from dflash_jax import Engine, SamplingParams
from serve import load
from serve.async_client import AsyncClient, input_message
from serve.connection import Endpoint
from serve.load_driver import Load, Part, Sample, measure
from serve.load_figures import HEADER, cells, line, remarks, summarise
from serve.proto import dflash_pb2 as pb
from tests.models import save_random_pair
from tests.servers import serving

PARAMS = SamplingParams(max_new_tokens=12, method="dflash", ignore_eos=True)
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me about owls"}]
PROMPTS = tuple(input_message(f"Once upon {word}").SerializeToString() for word in ("a", "the", "one", "no", "this"))
LOAD = Load(PROMPTS, PARAMS, (4, 12), 7, concurrency=3, rate=None, requests=8, seconds=None)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    pair = save_random_pair(tmp_path_factory.mktemp("pair"))
    return dflash_jax.load(*pair, dtype="float32", max_slots=2, max_model_len=2048)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> dict[str, dflash_jax.Completion]:
    """Before the server has the engine for itself."""
    ids = {"text": engine.encode("Once upon a time"), "chat": engine.encode(engine.encode_chat(TURNS))}
    return {kind: engine.generate([prompt], PARAMS)[0] for kind, prompt in ids.items()}


@pytest.fixture(scope="module")
def port(engine: Engine, expected: dict[str, dflash_jax.Completion]) -> Iterator[int]:
    with serving(engine, max_queue=1, tokens=["secret"]) as one:
        yield one


@pytest.fixture(scope="module")
def endpoint(port: int, tmp_path_factory: pytest.TempPathFactory) -> Endpoint:
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text("secret\n")
    return Endpoint(f"127.0.0.1:{port}", token_file=file)


def flags(endpoint: Endpoint) -> list[str]:
    return ["--address", endpoint.address, "--token-file", str(endpoint.token_file)]


async def at_rest(client: AsyncClient) -> None:
    until = time.monotonic() + 30
    while (now := (await client.info()).server).running or now.waiting:
        assert time.monotonic() < until
        await asyncio.sleep(0.02)


def test_the_client_gives_what_the_engine_does(
    port: int, engine: Engine, expected: dict[str, dflash_jax.Completion]
) -> None:
    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{port}", token="secret") as client:
            ids = await client.tokenize(TURNS)
            assert ids == engine.encode_chat(TURNS)
            prompts = [("Once upon a time", "text"), (TURNS, "chat"), (ids, "chat"), (input_message(ids), "chat")]
            for prompt, kind in prompts:
                parts = [part async for part in client.generate(prompt, PARAMS)]
                assert [i for part in parts for i in part.token_ids] == expected[kind].token_ids
                assert parts[-1].finished.usage.rounds == expected[kind].rounds
            assert await client.generate_text("Once upon a time", PARAMS) == expected["text"].text
            info = await client.info()
            assert (info.model.max_model_len, info.server.slots) == (2048, 2) and info.server.jax_version

    asyncio.run(run())


def test_the_client_raises_and_lets_go(port: int) -> None:
    long = dataclasses.replace(PARAMS, max_new_tokens=1900, method="ar")

    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{port}", token="secret", timeout=30) as client:
            stream = client.generate("Once upon a time", long)
            await anext(stream)
            await stream.aclose()
            await at_rest(client)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.generate_text("Once upon a time", long, timeout=0.3)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.generate_text("")
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.info()
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(run())


def test_requests_follow_from_their_number() -> None:
    other = dataclasses.replace(LOAD, params=dataclasses.replace(PARAMS, method="ar"))
    for number in range(12):
        one, two = LOAD.request(number), other.request(number)
        assert one.params.method == pb.METHOD_DFLASH
        two.params.method = one.params.method
        assert one == two and one.params.max_new_tokens in (4, 12)
    assert LOAD.request(3, 2).params.max_new_tokens == 2
    texts = [LOAD.request(number).input.text for number in range(10)]
    assert sorted(texts[:5]) == sorted(texts[5:]) and len(set(texts)) == 5  # all, then all in another order
    assert texts[:5] != texts[5:]
    assert {LOAD.request(number).params.max_new_tokens for number in range(20)} == {4, 12}
    assert dataclasses.replace(LOAD, seed=8).request(0) != LOAD.request(0)
    warm = dataclasses.replace(LOAD, params=dataclasses.replace(PARAMS, temperature=1.0))
    assert [warm.request(number).params.seed for number in (0, 5)] == [7, 12]
    gaps = np.diff(list(itertools.islice(dataclasses.replace(LOAD, rate=4.0).arrivals(), 4000)))
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.1) and np.std(gaps) == pytest.approx(0.25, rel=0.1)


def usage(rounds: int, tau: float) -> bytes:
    return pb.Usage(rounds=rounds, mean_accepted_length=tau, prompt_tokens=9, cached_tokens=3).SerializeToString()


def test_figures_are_those_of_the_samples() -> None:
    samples = [
        Sample(2, 10.0, "finished", "", [10.1, 10.3, 10.7], [1, 4, 2], 10.8, usage(2, 3.0)),
        Sample(0, 10.0, "finished", "", [10.5], [1], 10.6, usage(1, 1.0)),
        Sample(1, 11.0, "cut", "", [11.2, 11.3], [1, 5], 12.0),
        Sample(3, 11.0, "rejected", "RESOURCE_EXHAUSTED: full", [], [], 11.1),
        Sample(4, 11.0, "failed", "INTERNAL: broken", [11.1, 11.9], [1, 1], 11.9),
    ]
    parts = [Part(10.0, 12.0, samples[:2], 0.5, 0.6), Part(10.0, 11.8, samples[2:], 1.62, 1.8)]
    row = summarise("dflash", LOAD, parts)
    assert [row[key] for key in ("finished", "failed", "rejected", "cut")] == [2, 1, 1, 1]
    assert (row["seconds"], row["output_tokens"]) == (2.0, 14)
    assert (row["tokens_per_second"], row["requests_per_second"]) == (7.0, 1.0)
    assert row["ttft_seconds"]["p50"] == pytest.approx(0.2) and row["ttft_seconds"]["max"] == pytest.approx(0.5)
    assert row["itl_seconds"]["p50"] == pytest.approx(0.2) and row["itl_seconds"]["mean"] == pytest.approx(0.7 / 3)
    # Every token counts: four of 0.05, two of 0.2, five of 0.02.
    assert row["token_seconds"]["p50"] == pytest.approx(0.05)
    assert row["token_seconds"]["mean"] == pytest.approx((4 * 0.05 + 2 * 0.2 + 5 * 0.02) / 11)
    assert row["latency_seconds"]["p50"] == pytest.approx(0.7)
    assert row["tau"] == pytest.approx(7 / 3) and (row["prompt_tokens"], row["cached_tokens"]) == (18, 6)
    assert row["client_loop_share"] == pytest.approx(0.81) and row["client_cpu"] == pytest.approx(1.2)
    assert row["requests"]["number"] == [0, 1, 2, 3, 4] and row["requests"]["chunks"] == [1, 2, 3, 0, 2]
    texts = dict(zip(HEADER, cells(row), strict=True))
    assert (texts["tokens/s"], texts["τ"], texts["client"]) == ("7.0", "2.33", "81%")
    assert len(line(HEADER)) == len(line(cells(row)))
    assert remarks([row]) == [
        "dflash at 3: INTERNAL: broken",
        "the client was busy more than 80% of the time (dflash at 3); use more --processes",
    ]
    empty = summarise("ar", LOAD, [Part(0.0, 1.0, [Sample(0, 0.0)], 0.0, 0.0)])
    assert empty["ttft_seconds"] is empty["tau"] is None and empty["cut"] == 1
    assert cells(empty)[7:12] == ["- / - / -", "- / -", "- / -", "-", "-"]


def test_a_load_is_sent_and_counted(endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("The owl\nA long way to the old castle\n")
    words = [*flags(endpoint), "--set", str(tmp_path / "prompts.txt"), "--methods", "ar,dflash", "--ignore-eos"]
    words += ["--concurrency", "1,3", "--requests", "6", "--seconds", "0", "--max-new-tokens", "4,12"]
    assert load.main([*words, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["jax"] in lines[0] and record["server"]["slots"] == 2 and "τ" in lines[1]
    rows = record["points"]
    assert [(row["method"], row["concurrency"]) for row in rows] == [("ar", 1), ("dflash", 1), ("ar", 3), ("dflash", 3)]
    assert [words.split()[:2] for words in lines[2:]] == [["ar", "1"], ["dflash", "1"], ["ar", "3"], ["dflash", "3"]]
    asked = [load.plan(load.build_parser().parse_args(words))[0][1].request(n).params.max_new_tokens for n in range(6)]
    for row in rows:
        assert (row["finished"], row["failed"], row["rejected"], row["cut"]) == (6, 0, 0, 0)
        assert row["requests"]["output_tokens"] == asked
        assert row["output_tokens"] == sum(asked) == pytest.approx(row["tokens_per_second"] * row["seconds"])
        assert 0 < row["ttft_seconds"]["p50"] < row["latency_seconds"]["max"] < row["seconds"]
        sent = np.asarray(row["requests"]["sent_seconds"])
        ended = sent + row["requests"]["latency_seconds"]
        flying = max(int(np.sum((sent <= t) & (t < ended))) for t in sent)
        assert flying == row["concurrency"]
    assert rows[0]["tau"] == 1.0 and rows[0]["itl_seconds"] == rows[0]["token_seconds"]
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_a_point_ends_in_time_and_leaves_nothing(endpoint: Endpoint) -> None:
    long = dataclasses.replace(LOAD, params=dataclasses.replace(PARAMS, method="ar"), lengths=(1900,), requests=None)

    async def run(some: Load) -> Part:
        part = await measure(endpoint, some)
        async with AsyncClient(endpoint.address, token="secret") as client:
            await at_rest(client)
        return part

    part = asyncio.run(run(dataclasses.replace(long, seconds=1.0)))
    assert 1.0 <= part.end - part.start < 3.0
    assert [sample.outcome for sample in part.samples] == ["cut"] * 3
    assert sum(sum(sample.tokens) for sample in part.samples) > 1
    # Two slots and one place in line: of five clients two are refused, wait, and ask again.
    part = asyncio.run(run(dataclasses.replace(long, concurrency=5, seconds=1.0)))
    outcomes = [sample.outcome for sample in part.samples]
    assert outcomes.count("cut") >= 3 and 4 <= outcomes.count("rejected") <= 20 and "failed" not in outcomes
    assert all(s.error.startswith("RESOURCE_EXHAUSTED") for s in part.samples if s.outcome == "rejected")


def test_requests_come_by_themselves(endpoint: Endpoint) -> None:
    some = dataclasses.replace(LOAD, concurrency=None, rate=20.0, lengths=(4,), requests=12)
    part = asyncio.run(measure(endpoint, some))
    due = list(itertools.islice(some.arrivals(), 12))
    sent = [sample.start - part.start for sample in part.samples]
    assert [sample.number for sample in part.samples] == list(range(12))
    assert all(0 <= late < 0.3 for late in np.subtract(sent, due))


def test_processes_share_a_load(endpoint: Endpoint) -> None:
    with load.measuring(endpoint, 2) as measuring:
        idle = summarise("dflash", LOAD, measuring(dataclasses.replace(LOAD, concurrency=1)))
        assert idle["finished"] == 8 and idle["client_loop_share"] < 0.8  # one of them has no client
        parts = measuring(LOAD)
        numbers = [[sample.number for sample in part.samples] for part in parts]
        assert [sorted(one) for one in numbers] == [[0, 2, 3, 5, 6], [1, 4, 7]]  # two clients, one client
        come = measuring(dataclasses.replace(LOAD, concurrency=None, rate=50.0))
        assert [[s.number for s in part.samples] for part in come] == [[0, 2, 4, 6], [1, 3, 5, 7]]
        assert all(sample.outcome == "finished" for part in parts for sample in part.samples)
        assert abs(parts[0].start - parts[1].start) < 0.5
        broken = dataclasses.replace(LOAD, params=dataclasses.replace(PARAMS, method="mtp"))
        with pytest.raises(load.WarmUpFailed, match="INVALID_ARGUMENT: --method mtp"):
            measuring(broken)


def test_wrong_use_is_one_line(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: str, status: int = 2, where: Endpoint = endpoint) -> str:
        assert load.main([*flags(where), *words]) == status
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1
        return err

    assert "--concurrency must be numbers above 0" in error("--concurrency", "1,0")
    assert "--rate must be numbers above 0" in error("--rate", "inf")
    assert "--max-new-tokens must be numbers" in error("--max-new-tokens", "4.5")
    assert "--requests must be at least 1" in error("--requests", "0")
    assert "--seconds must be above 0" in error("--seconds", "0")
    assert "--processes must be at least 1" in error("--processes", "0")
    assert "--set must be one of" in error("--set", "no-such")
    assert "INVALID_ARGUMENT: --method mtp needs" in error("--methods", "mtp", "--concurrency", "1")
    nowhere = dataclasses.replace(endpoint, address="127.0.0.1:1")
    assert "UNAVAILABLE from 127.0.0.1:1" in error(status=1, where=nowhere)

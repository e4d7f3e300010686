"""Connections: sizes, compression, pings and age, seen from outside through a relay that counts."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dflash_jax import Engine, UserError
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.tokenizer import Tokenizer
from serve.__main__ import build_parser, main
from serve.async_client import AsyncClient
from serve.proto import dflash_pb2 as pb
from serve.server import SERVICE, Server
from serve.transport import Transport, client_options, transport_of
from tests.models import random_target

PING_FRAME = 17  # bytes


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(random_target(), None, Tokenizer.from_folder(BUNDLED_TARGET), max_slots=1, max_model_len=64)


async def closed(*writers: asyncio.StreamWriter) -> None:
    """However their connections ended: what is left open is reported in whichever test the collector runs."""
    for writer in writers:
        writer.close()
    for writer in writers:
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@dataclasses.dataclass
class Relay:
    """Hands bytes on between clients and a server.

    Attributes:
      port: for clients.
      connections: made so far.
      sent, answered: bytes from and to clients.
    """

    port: int = 0
    connections: int = 0
    sent: int = 0
    answered: int = 0

    async def start(self, to: int) -> asyncio.Server:
        async def hand_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, what: str) -> None:
            while data := await source.read(1 << 16):
                setattr(self, what, getattr(self, what) + len(data))
                sink.write(data)
                await sink.drain()
            sink.close()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            back, forth = await asyncio.open_connection("127.0.0.1", to)
            both = (hand_on(reader, forth, "sent"), hand_on(back, writer, "answered"))
            try:
                await asyncio.gather(*both, return_exceptions=True)
            finally:
                await closed(forth, writer)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server


def run(engine: Engine, transport: Transport, test: Callable[[Relay], Awaitable[None]]) -> None:
    async def whole() -> None:
        server = Server(engine, "127.0.0.1", 0, max_queue=1, warm_up="none", transport=transport)
        await server.start()
        relay = Relay()
        listening = await relay.start(server.port)
        try:
            await test(relay)
        finally:
            listening.close()
            await server.stop(0)

    asyncio.run(asyncio.wait_for(whole(), 60))


async def describe(channel: grpc.aio.Channel) -> int:
    """Asks for something long that compresses well; its length."""
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
    return sum([answer.ByteSize() async for answer in call])


def test_messages_have_a_longest(engine: Engine) -> None:
    async def code(relay: Relay, mebibytes: float) -> grpc.StatusCode:
        text = "a" * int(mebibytes * 2**20)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}") as channel:
            call = channel.unary_unary(f"/{SERVICE}/Tokenize", request_serializer=bytes)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(pb.TokenizeRequest(input=pb.Input(text=text)).SerializeToString())
            return caught.value.code()

    async def test(relay: Relay) -> None:
        assert await code(relay, 0.9) == grpc.StatusCode.INVALID_ARGUMENT  # read, and too many tokens
        assert await code(relay, 1.1) == grpc.StatusCode.RESOURCE_EXHAUSTED

    run(engine, Transport(max_message_mib=1), test)


@pytest.mark.parametrize("compression", ["none", "gzip", "deflate"])
def test_answers_are_compressed(engine: Engine, compression: str) -> None:
    async def test(relay: Relay) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}") as channel:
            length = await describe(channel)
        assert length > 3000
        assert (relay.answered < 0.8 * length) == (compression != "none")

    run(engine, Transport(compression=compression), test)


def test_what_is_sent_may_be_compressed(engine: Engine) -> None:
    async def test(relay: Relay) -> None:
        sent = {}
        for compression in ("none", "gzip", "deflate"):
            before = relay.sent
            async with AsyncClient(f"127.0.0.1:{relay.port}", compression=compression) as client:
                assert await client.tokenize([5] * 60) == [5] * 60
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await client.tokenize([5] * 5000)
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            sent[compression] = relay.sent - before
        assert sent["none"] > 5000 > 3 * max(sent["gzip"], sent["deflate"])

    run(engine, Transport(), test)


@pytest.mark.parametrize("allowed", [True, False])
def test_clients_may_ping_so_often(engine: Engine, allowed: bool) -> None:
    """HTTP/2 by hand, without a call: gRPC's own clients do not ping more often than every 10 s."""
    settings, ping = b"\0\0\0\x04\0\0\0\0\0", b"\0\0\x08\x06\0\0\0\0\0" + b"\0" * 8
    answer = ping[:4] + b"\x01" + ping[5:]

    async def test(relay: Relay) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        got = bytearray()

        async def read() -> None:
            with contextlib.suppress(ConnectionError):  # who is let go may be so rudely
                while data := await reader.read(4096):
                    got.extend(data)

        reading = asyncio.create_task(read())
        for _ in range(10):
            await asyncio.sleep(0.1)
            writer.write(ping)
        await asyncio.wait([reading], timeout=0.5)
        reading.cancel()
        assert (b"too_many_pings" in got) == (not allowed)
        assert not allowed or got.count(answer) == 10
        await closed(writer)

    run(engine, Transport(min_ping_seconds=0.02 if allowed else 60), test)


@pytest.mark.parametrize("pings", [True, False])
def test_the_server_pings(engine: Engine, pings: bool) -> None:
    async def test(relay: Relay) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            await check(health_pb2.HealthCheckRequest())  # connected; from now on nothing is called
            await asyncio.sleep(0.3)
            before = relay.answered
            await asyncio.sleep(1.5)
            assert (relay.answered - before >= 5 * PING_FRAME) == pings

    run(engine, Transport(keepalive_seconds=0.1 if pings else 0), test)


@pytest.mark.parametrize("seconds", [0.4, 0])
def test_old_connections_are_given_up(engine: Engine, seconds: float) -> None:
    async def test(relay: Relay) -> None:
        async with AsyncClient(f"127.0.0.1:{relay.port}") as client:
            watch = health_pb2_grpc.HealthStub(client._channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            for _ in range(15):  # none of which fails
                assert await client.tokenize([5]) == [5]
                await asyncio.sleep(0.1)
            assert not watch.done()  # what has begun goes on
            assert (relay.connections > 1) == (seconds > 0)
            watch.cancel()

    run(engine, Transport(max_connection_age_seconds=seconds), test)


def test_a_client_keeps_to_what_a_server_allows() -> None:
    options = dict(client_options())
    assert options["grpc.keepalive_time_ms"] >= 2000 * Transport().min_ping_seconds
    assert options["grpc.max_receive_message_length"] == -1


def test_flags_are_those_of_the_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert transport_of(build_parser().parse_args([])) == Transport()
    words = ["--max-message-mib", "3", "--compression", "gzip", "--keepalive-seconds", "7", "--min-ping-seconds", "2"]
    words += ["--max-connection-age-seconds", "900", "--max-lag-seconds", "5"]
    assert transport_of(build_parser().parse_args(words)) == Transport(3, "gzip", 7.0, 2.0, 900.0, 5.0)
    bad = {"max_message_mib": 2048, "keepalive_seconds": -1, "min_ping_seconds": float("nan"), "compression": "lz4"}
    for name, value in bad.items():
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} must be"):
            Transport(**{name: value})
    assert main(["--max-connection-age-seconds", "-1"]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert err == ["error: --max-connection-age-seconds must be 0 to 10**6, found -1"]

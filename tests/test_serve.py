"""The gRPC service and its client on a small random pair: results, refusals, cancelling, a full line, its end."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import dflash_jax
from dflash_jax import Engine, SamplingParams, UserError
from dflash_jax.flights import Request
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.scheduler import Scheduler
from dflash_jax.tokenizer import Tokenizer
from serve import client, messages
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.server import SERVICE, Server
from tests.models import random_target, save_random_pair

ROOT = Path(__file__).parents[1]
PARAMS = SamplingParams(max_new_tokens=16, method="dflash")  # its rounds are the same every time
LONG = SamplingParams(max_new_tokens=1900, method="ar", ignore_eos=True)
TELL = pb.Input(chat=pb.Chat(messages=[pb.Message(role="user", content="Tell me about owls")]))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_random_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Path]) -> Engine:
    return dflash_jax.load(*pair, dtype="float32", max_slots=2, max_model_len=2048)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> dflash_jax.Completion:
    return engine.generate([messages.input_ids(engine, TELL)], PARAMS)[0]


@pytest.fixture(scope="module")
def port(engine: Engine, expected: dflash_jax.Completion) -> Iterator[int]:
    """A server in this process, in the loop of another thread; from now on the engine is its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def started() -> Server:
        server = Server(engine, "127.0.0.1", 0, max_queue=1, warm_up="none")
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(started(), loop).result(300)
    yield server.port
    asyncio.run_coroutine_threadsafe(server.stop(10), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def channel(port: int) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as one:
        yield one


@pytest.fixture
def stub(channel: grpc.Channel) -> Iterator[pb_grpc.DFlashStub]:
    one = pb_grpc.DFlashStub(channel)
    yield one
    wait_for(lambda: at_rest(one))


def at_rest(stub: pb_grpc.DFlashStub) -> bool:
    info = stub.GetServerInfo(pb.GetServerInfoRequest())
    return (info.running, info.waiting, info.pages_free) == (0, 0, info.pages)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def request(params: SamplingParams, given: pb.Input = TELL) -> pb.GenerateRequest:
    return pb.GenerateRequest(input=given, params=messages.sampling_message(params))


def test_a_stream_is_what_the_engine_generates(stub: pb_grpc.DFlashStub, expected: dflash_jax.Completion) -> None:
    parts = list(stub.Generate(request(PARAMS)))
    assert "".join(part.text for part in parts) == expected.text
    assert [i for part in parts for i in part.token_ids] == expected.token_ids
    assert len(parts) > 2 and all(not part.HasField("finished") for part in parts[:-1])
    usage = parts[-1].finished.usage
    assert (usage.rounds, usage.method) == (expected.rounds, expected.method)
    assert usage.mean_accepted_length == expected.mean_accepted_length
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)


def test_what_cannot_be_served_is_an_invalid_argument(stub: pb_grpc.DFlashStub) -> None:
    bad = [
        (pb.GenerateRequest(input=TELL, params=pb.SamplingParams(temperature=float("nan"))), "--temperature must be"),
        (pb.GenerateRequest(), "input must have text, chat or tokens"),
        (request(PARAMS, pb.Input(tokens=pb.TokenIds(ids=[10**6]))), "outside the vocabulary"),
        (request(SamplingParams(method="mtp")), "--method mtp needs"),
        (request(SamplingParams(block_size=2)), "--block-size of a server"),
        (request(SamplingParams(tree_budget=6)), "--tree-budget of a server is 1, 3, 7"),
    ]
    for message, words in bad:
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(message))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and words in caught.value.details()
    thinking = pb.Chat(messages=[pb.Message(role="user", content="Hello")], thinking=True)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request(PARAMS, pb.Input(chat=thinking))))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("the chat template refuses these messages: enable_thinking")
    with pytest.raises(grpc.RpcError) as caught:
        stub.Tokenize(pb.TokenizeRequest(input=pb.Input(chat=thinking)))
    assert "/" not in caught.value.details()  # no path of the server
    with pytest.raises(grpc.RpcError) as caught:
        stub.Tokenize(pb.TokenizeRequest())
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_bytes_that_are_no_message_are_an_invalid_argument(
    stub: pb_grpc.DFlashStub, channel: grpc.Channel, expected: dflash_jax.Completion
) -> None:
    not_utf8 = pb.GenerateRequest(input=pb.Input(text="QQQQ")).SerializeToString().replace(b"QQQQ", b"Q\xff\xfeQ")
    for raw in (b"\xff\xff\xff", not_utf8):
        for call in (
            channel.unary_stream(f"/{SERVICE}/Generate", request_serializer=bytes),
            channel.unary_stream(f"/{SERVICE}/GenerateBatch", request_serializer=bytes),
            channel.unary_unary(f"/{SERVICE}/Tokenize", request_serializer=bytes),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(raw))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "not a valid message" in caught.value.details()
    assert [i for part in stub.Generate(request(PARAMS)) for i in part.token_ids] == expected.token_ids


def test_cancelling_and_deadlines_free_the_slot(
    stub: pb_grpc.DFlashStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, cancel = [], Scheduler.cancel

    def spy(self: Scheduler, request: Request) -> None:
        assert request.slot is not None
        cut.append(len(request.checker.token_ids))
        cancel(self, request)
        self.check()

    monkeypatch.setattr(Scheduler, "cancel", spy)
    call = stub.Generate(request(LONG))
    next(call)
    call.cancel()
    wait_for(lambda: at_rest(stub))
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request(LONG), timeout=0.3))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: at_rest(stub))
    assert len(cut) == 2 and max(cut) < 1900  # neither went on to its end


def test_a_full_line_is_refused_at_once(stub: pb_grpc.DFlashStub, expected: dflash_jax.Completion) -> None:
    calls = [stub.Generate(request(LONG)) for _ in range(3)]
    wait_for(lambda: stub.GetServerInfo(pb.GetServerInfoRequest()).waiting == 1)
    start = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request(PARAMS)))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and time.monotonic() - start < 5
    for call in calls:
        call.cancel()
    wait_for(lambda: at_rest(stub))
    assert [i for part in stub.Generate(request(PARAMS)) for i in part.token_ids] == expected.token_ids


def test_what_is_there_can_be_asked_for(stub: pb_grpc.DFlashStub, channel: grpc.Channel, engine: Engine) -> None:
    ids = stub.Tokenize(pb.TokenizeRequest(input=TELL)).token_ids
    assert list(ids) == engine.encode_chat([{"role": "user", "content": "Tell me about owls"}])
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.max_model_len, info.dtype, info.vocab_size) == (2048, "float32", engine.target.config.vocab_size)
    assert {pb.METHOD_AR, pb.METHOD_DFLASH, pb.METHOD_DDTREE} <= set(info.methods) and info.block_size > 1
    server = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.version, server.slots, server.page_size) == (dflash_jax.__version__, 2, 64)
    check = health_pb2_grpc.HealthStub(channel).Check
    assert check(health_pb2.HealthCheckRequest(service=SERVICE)).status == health_pb2.HealthCheckResponse.SERVING
    seen = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE in seen.get_services()
    pool = descriptor_pool.DescriptorPool(seen)
    assert set(pool.FindServiceByName(SERVICE).methods_by_name) >= {"Generate", "Tokenize"}


def test_health_says_when_the_engine_is_lost(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of its own, whose engine fails at once and whose scheduler cannot be made again."""

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("device lost")

    async def run() -> None:
        server = Server(engine, "127.0.0.1", 0, max_queue=1, warm_up="none")
        await server.start()
        monkeypatch.setattr(server._worker, "_new_scheduler", broken)
        monkeypatch.setattr(server._worker._scheduler, "step", broken)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            one = pb_grpc.DFlashStub(channel)
            for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in one.Generate(request(PARAMS), timeout=30):
                        pass
                assert caught.value.code() == code
                if code == grpc.StatusCode.INTERNAL:
                    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        await server.stop(1)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("warm_up", ["default", pytest.param("all", marks=pytest.mark.slow)])
def test_nothing_is_compiled_after_the_warm_up(warm_up: str) -> None:
    """Whatever is asked of a model without a drafter: sampling in any combination, and with "all" the rest too."""
    tokenizer = Tokenizer.from_folder(BUNDLED_TARGET)
    engine = Engine(random_target(3), None, tokenizer, max_slots=2, prefill_chunk=16, max_model_len=512)
    sampled = [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.0, "min_p": 0.2}]
    rest = [{"repetition_penalty": 1.2}, {"logit_bias": ((3, 1.0),), "logprobs": 2}, {"logprobs": 20}]
    asked = sampled if warm_up == "default" else sampled + rest

    async def run() -> None:
        server = Server(engine, "127.0.0.1", 0, max_queue=20, warm_up=warm_up)
        await server.start()
        compiled = set(engine.programs.compiled)
        assert len(compiled) >= 8
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            one = pb_grpc.DFlashStub(channel)

            async def ask(changes: dict) -> None:
                params = SamplingParams(max_new_tokens=6, **changes)
                async for _ in one.Generate(request(params, pb.Input(tokens=pb.TokenIds(ids=range(20))))):
                    pass

            await asyncio.gather(*[ask(changes) for changes in asked])
            for changes in asked:
                await ask(changes)
        assert set(engine.programs.compiled) == compiled
        await server.stop(1)

    asyncio.run(asyncio.wait_for(run(), 300))


def test_a_port_in_use_is_one_line(engine: Engine, port: int) -> None:
    async def second() -> None:
        Server(engine, "127.0.0.1", port, max_queue=1)

    with pytest.raises(UserError, match=f"--port {port} on --host 127.0.0.1 cannot be listened on"):
        asyncio.run(second())


def test_sigterm_lets_a_stream_finish(pair: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "serve", "--port", "0", "--dtype", "float32", "--max-slots", "2"]
    command += ["--warm-up", "none", "--max-model-len", "2048", "--model", str(pair[0]), "--draft-model", str(pair[1])]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving ")
            with grpc.insecure_channel(line.split()[-1]) as channel:
                stub = pb_grpc.DFlashStub(channel)
                params = SamplingParams(max_new_tokens=200, method="dflash", ignore_eos=True)
                call = stub.Generate(request(params))
                parts = [next(call)]
                process.send_signal(signal.SIGTERM)
                parts += list(call)
            assert parts[-1].finished.usage.completion_tokens == 200 == sum(len(p.token_ids) for p in parts)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_the_client_prints_what_the_engine_generates(
    port: int, expected: dflash_jax.Completion, capsys: pytest.CaptureFixture[str]
) -> None:
    address = ["--address", f"127.0.0.1:{port}"]
    assert client.main([*address, "--method", "dflash", "--max-new-tokens", "16", "Tell me about owls"]) == 0
    out, err = capsys.readouterr()
    assert out == expected.text + "\n" and f"16 tokens in {expected.rounds} rounds" in err
    assert client.main([*address, "--temperature", "-1", "Hello"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith("error: --temperature must be 0")
    assert client.main([*address, "word " * 2400]) == 2  # only the server knows its --max-model-len
    err = capsys.readouterr().err
    assert err.startswith("error: --prompt has ") and err.endswith("--max-model-len 2048\n")
    assert client.main([*address, "--info"]) == 0
    assert "max_model_len: 2048" in capsys.readouterr().out


def test_the_examples_of_the_page_run(
    port: int, stub: pb_grpc.DFlashStub, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.findall(r"```py\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL)
    parts = stub.Generate(request(SamplingParams(max_new_tokens=40), pb.Input(text="Once upon a time")))
    once = "".join(part.text for part in parts)
    owls = "".join(part.text for part in stub.Generate(request(SamplingParams())))
    shown = []
    for example in code:
        assert "127.0.0.1:50051" in example
        exec(example.replace("50051", str(port)), {"__name__": "example"})
        shown.append(capsys.readouterr().out)
    ids = stub.Tokenize(pb.TokenizeRequest(input=pb.Input(text="Once upon a time"))).token_ids
    assert shown == [once, f"cpu {len(ids)} tokens\n{owls}\n{once}"] and once


def test_the_client_says_that_there_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main(["--address", "127.0.0.1:1", "Hello"]) == 1
    assert capsys.readouterr().err.startswith("error: UNAVAILABLE from 127.0.0.1:1: ")


def test_grpc_alone_needs_no_package_of_http() -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'starlette', 'uvicorn']))"
    code += "; import serve.server, serve.load"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    code = code.replace("fastapi", "prometheus_client")  # the trick does keep a package away
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 1


def test_flags_that_cannot_be_are_one_line(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve.__main__ import main

    words = ["--model", str(pair[0]), "--draft-model", str(pair[1]), "--max-model-len", "512", "--cache-tokens", "448"]
    assert main(words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith("error: --cache-tokens must be at least 512, the longest request")
    assert main(["--max-slots", "0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --max-slots must be at least 1") and err.count("\n") == 1
    assert main(["--prefix-cache-mib", "-1"]) == 2
    assert capsys.readouterr().err == "error: --prefix-cache-mib must be 0 (off) or more, found -1\n"
    monkeypatch.setattr(Engine, "prefix_state_bytes", lambda self: 5 << 20)
    assert main([*words[:-2], "--prefix-cache-mib", "4"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert lines == ["error: --prefix-cache-mib must hold a state of 5.0 MiB, found 4.0"]

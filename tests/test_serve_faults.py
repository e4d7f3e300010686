"""What goes wrong around a server: readers that do not read, and an end without notice."""

import contextlib
import dataclasses
import functools
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dflash_jax import Chunk, Engine, SamplingParams
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.scheduler import Scheduler
from dflash_jax.tokenizer import Tokenizer
from serve import messages
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.server import SERVICE
from serve.transport import Transport
from tests.models import random_target, save_random_pair
from tests.servers import serving

ROOT = Path(__file__).parents[1]
SHORT = SamplingParams(max_new_tokens=12, method="ar", ignore_eos=True)
# Some 300 bytes a token, so that a text does not fit into what gRPC holds by itself (64 KiB and the client's window).
LONG = dataclasses.replace(SHORT, max_new_tokens=600, logprobs=20)
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1 << 14), ("grpc.http2.bdp_probe", 0)]
LAG = 2.0


@functools.cache
def engine() -> Engine:
    tokenizer = Tokenizer.from_folder(BUNDLED_TARGET)
    return Engine(random_target(3), None, tokenizer, max_slots=2, prefill_chunk=16, max_model_len=1024)


@functools.cache
def alone(params: SamplingParams) -> list[int]:
    return engine().generate([[5, 6, 7]], params)[0].token_ids


def request(params: SamplingParams) -> pb.GenerateRequest:
    given = pb.Input(tokens=pb.TokenIds(ids=[5, 6, 7]))
    return pb.GenerateRequest(input=given, params=messages.sampling_message(params))


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def chunks() -> set[int]:
    """Those that are there."""
    return {id(thing) for thing in gc.get_objects() if isinstance(thing, Chunk)}


@pytest.fixture
def unread() -> Callable[[], int]:
    """Counts chunks of this test. The engine has the last one in its hands, and each call that waits one more."""
    gc.collect()
    others = chunks()
    return lambda: len(chunks() - others)


@contextlib.contextmanager
def impatient() -> Iterator[tuple[pb_grpc.DFlashStub, pb_grpc.DFlashStub]]:
    """A server whose readers must not be slow, seen from two connections."""
    for params in (SHORT, LONG):
        alone(params)  # before the server has the engine for itself
    with serving(engine(), max_queue=8, transport=Transport(max_lag_seconds=LAG)) as port:
        address = f"127.0.0.1:{port}"
        with (
            grpc.insecure_channel(address, SMALL_WINDOW) as lazy,
            grpc.insecure_channel(address) as attentive,
        ):
            yield pb_grpc.DFlashStub(lazy), pb_grpc.DFlashStub(attentive)


def ids_of(parts: Iterator[pb.GenerateResponse]) -> list[int]:
    return [i for part in parts for i in part.token_ids]


def test_who_does_not_read_stalls_nobody_and_loses_the_text(unread: Callable[[], int]) -> None:
    with impatient() as (lazy, attentive):
        slow = lazy.Generate(request(LONG))
        got = list(next(slow).token_ids)
        # Beside it and after it: others are served as ever, also those whose text takes longer than readers may.
        assert ids_of(attentive.Generate(request(LONG), timeout=60)) == alone(LONG)
        for _ in range(3):
            assert ids_of(attentive.Generate(request(SHORT), timeout=60)) == alone(SHORT)
        wait_for(lambda: not attentive.GetServerInfo(pb.GetServerInfoRequest()).running)
        wait_for(lambda: unread() < 10)

        def read_on() -> None:
            for part in slow:
                got.extend(part.token_ids)

        with pytest.raises(grpc.RpcError) as caught:
            read_on()
        assert caught.value.code() == grpc.StatusCode.ABORTED and "was not read for 2 s" in caught.value.details()
        assert 0 < len(got) < 600 and got == alone(LONG)[: len(got)]


def test_a_batch_that_is_not_read_loses_its_texts(unread: Callable[[], int]) -> None:
    with impatient() as (lazy, attentive):
        slow = lazy.GenerateBatch(pb.GenerateBatchRequest(requests=[request(LONG)] * 3))
        next(slow)
        assert ids_of(attentive.Generate(request(SHORT), timeout=60)) == alone(SHORT)
        wait_for(lambda: not attentive.GetServerInfo(pb.GetServerInfoRequest()).running)
        wait_for(lambda: unread() < 10)
        errors = {part.index: part.error.code for part in slow if part.HasField("error")}
        assert errors == dict.fromkeys(range(3), grpc.StatusCode.ABORTED.value[0])
        assert ids_of(attentive.Generate(request(SHORT), timeout=60)) == alone(SHORT)


@contextlib.contextmanager
def process(pair: tuple[Path, Path], port: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own; yields its port too."""
    command = [sys.executable, "-m", "serve", "--port", str(port), "--dtype", "float32", "--max-slots", "2"]
    command += ["--warm-up", "none", "--max-model-len", "2048", "--model", str(pair[0]), "--draft-model", str(pair[1])]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            line = one.stdout.readline()
            assert line.startswith("serving ")
            yield one, int(line.rsplit(":", 1)[1])
        finally:
            one.kill()


def test_health_says_that_the_engine_hangs_and_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, go_on, step = alone(SHORT), threading.Event(), Scheduler.step

    def hang(self: Scheduler) -> list:
        assert go_on.wait(60)
        return step(self)

    monkeypatch.setattr(Scheduler, "step", hang)
    with serving(engine(), stall_seconds=0.3) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check

        def serves() -> bool:
            answer = check(health_pb2.HealthCheckRequest(service=SERVICE))
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        wait_for(serves)
        time.sleep(1.5)  # longer than a step may take, with nothing to do
        assert serves()
        call = pb_grpc.DFlashStub(channel).Generate(request(SHORT), timeout=60)
        wait_for(lambda: not serves())
        go_on.set()
        assert ids_of(call) == expected
        wait_for(serves)


def test_after_a_kill_clients_know_and_the_next_server_serves(tmp_path: Path) -> None:
    pair = save_random_pair(tmp_path)
    short = dataclasses.replace(SHORT, method="dflash")
    with process(pair, 0) as (first, port), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.DFlashStub(channel)
        expected = ids_of(stub.Generate(request(short), timeout=120))
        assert len(expected) == 12
        running = [stub.Generate(request(dataclasses.replace(short, max_new_tokens=1900))) for _ in range(2)]
        for call in running:
            next(call)
        waiting = stub.Generate(request(short))
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        first.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for call in (*running, waiting, watch, stub.Generate(request(short))):
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - killed < 10
        assert first.wait(10) == -signal.SIGKILL
        # The same port and the same channel: nothing has to be made anew.
        with process(pair, port):
            assert ids_of(stub.Generate(request(short), timeout=120, wait_for_ready=True)) == expected

"""The gRPC service: what comes over the wire goes to the engine's thread, and its chunks go back.

Nothing here blocks: texts are tokenised on a thread of the pool, and the engine's thread calls back into the loop.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import jax
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import dflash_jax
from dflash_jax.engine import Engine
from dflash_jax.errors import UserError
from dflash_jax.flights import Request
from dflash_jax.request import Chunk
from serve import messages
from serve.auth import BearerToken
from serve.failures import Failure
from serve.front import Front, Stream
from serve.interceptors import Readable
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.tracing import Origin, Tracer
from serve.transport import COMPRESSIONS, Transport
from serve.worker import Worker

if TYPE_CHECKING:
    from serve.http import HttpServer

SERVICE = pb.DESCRIPTOR.services_by_name["DFlash"].full_name
MAX_BATCH = 1024  # requests of one call
# What is compiled before a server is healthy: nothing; what the default method needs; what all methods need.
WARM_UPS = ("none", "default", "all")
WATCH_SECONDS = 1.0  # between two looks at the engine

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext


class Service:
    """The methods of dflash.v1.DFlash.

    Not a subclass of the generated one, so that a method that is missing is an error when the server is made.
    """

    def __init__(self, front: Front):
        self._front, self._engine = front, front.engine
        self._started = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """See dflash.proto."""
        stream: Stream | None = None
        try:
            try:
                stream = await self._open(request, context)
                async for message in _responses(stream):
                    yield message
            except Exception as error:
                await Failure.of(error).abort(context)
        finally:  # the caller has gone, or its deadline has passed
            if stream is not None:
                stream.close()

    async def GenerateBatch(
        self, request: pb.GenerateBatchRequest, context: Context
    ) -> AsyncIterator[pb.GenerateBatchResponse]:
        """See dflash.proto."""
        left = len(request.requests)
        if not 1 <= left <= MAX_BATCH:
            error = messages.FieldError(f"requests must be 1 to {MAX_BATCH}, found {left}", "requests")
            await Failure.of(error).abort(context)
        # Chunks wait in their streams, which know how long.
        ready: asyncio.Queue[pb.GenerateBatchResponse] = asyncio.Queue(maxsize=1)
        streams: list[Stream] = []

        async def failed(index: int, error: Exception) -> None:
            failure = Failure.of(error, f"requests[{index}].")
            await ready.put(pb.GenerateBatchResponse(index=index, error=failure.message()))

        async def follow(index: int, stream: Stream) -> None:
            try:
                async for message in _responses(stream):
                    await ready.put(pb.GenerateBatchResponse(index=index, chunk=message))
            except Exception as error:
                await failed(index, error)

        async def feed() -> None:
            for index, one in enumerate(request.requests):
                try:
                    streams.append(await self._open(one, context))
                except Exception as error:
                    await failed(index, error)
                else:
                    tasks.append(asyncio.create_task(follow(index, streams[-1])))

        tasks = [asyncio.create_task(feed())]
        try:
            while left:
                message = await ready.get()
                yield message
                left -= message.HasField("error") or message.chunk.HasField("finished")
        finally:
            for task in tasks:
                task.cancel()
            for stream in streams:
                stream.close()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """See dflash.proto."""
        try:
            ids = await asyncio.to_thread(messages.input_ids, self._engine, request.input)
        except UserError as error:
            return await Failure.of(error).abort(context)
        return pb.TokenizeResponse(token_ids=ids)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """See dflash.proto."""
        engine = self._engine
        drafter = engine.drafter
        methods = [pb.METHOD_AR]
        methods += [pb.METHOD_MTP] if engine.mtp is not None else []
        methods += [pb.METHOD_DFLASH, pb.METHOD_DDTREE] if drafter is not None else []
        return pb.GetModelInfoResponse(
            model=engine.names[0],
            draft_model=engine.names[1] or "",
            dtype=str(engine.target.dtype),
            vocab_size=engine.target.config.vocab_size,
            max_model_len=engine.max_model_len,
            eos_token_ids=engine.target.config.eos_token_ids,
            methods=methods,
            block_size=0 if drafter is None else drafter.config.block_size,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """See dflash.proto."""
        return pb.GetServerInfoResponse(
            version=dflash_jax.__version__,
            jax_version=jax.__version__,
            device=self._engine.device.device_kind,
            uptime_seconds=time.monotonic() - self._started,
            **dataclasses.asdict(self._front.worker.stats),
        )

    async def _open(self, message: pb.GenerateRequest, context: Context) -> Stream:
        """See `Front.open`."""
        origin = Origin.of("gen", context.invocation_metadata())
        return await self._front.open(lambda: self._request(message), origin)

    def _request(self, message: pb.GenerateRequest) -> Request:
        params = messages.sampling_params(message.params)
        messages.check_served(self._engine, params)
        return self._engine.request(messages.input_ids(self._engine, message.input), params)


async def _responses(stream: Stream) -> AsyncIterator[pb.GenerateResponse]:
    """The messages of a stream, or what `Stream.next` raises."""
    done = False
    while not done:
        chunk = await stream.next()
        yield messages.response(chunk)
        done = chunk.completion is not None


class Server:
    """The service with health and reflection on one port, and OpenAI's protocol on another if that is wanted.

    Attributes:
      port: that it listens on.
      http: what answers on the other; None without.
    """

    def __init__(
        self,
        engine: Engine,
        host: str,
        port: int,
        max_queue: int,
        *,
        warm_up: str = "default",
        tokens: Sequence[str] = (),
        credentials: grpc.ServerCredentials | None = None,
        pages: int | None = None,
        prefix_bytes: int = 0,
        narrow: bool = False,
        stall_seconds: float = 600.0,
        http_port: int | None = None,
        http_tls: tuple[Path, Path, Path | None] | None = None,
        transport: Transport | None = None,
        tracer: Tracer | None = None,
    ):
        """Not listening yet; call it in a running event loop.

        Args:
          engine: whose models answer.
          host: address to listen on.
          port: 0 for any that is free.
          max_queue: requests that may wait beside those being decoded.
          warm_up: one of `WARM_UPS`: what is compiled before the server is healthy.
          tokens: one of which every call must bear, health checks aside; none if empty.
          credentials: for TLS; None for plain text.
          pages, prefix_bytes, narrow: see `Engine.scheduler`.
          stall_seconds: after so long in one step the engine is taken to hang; 0 for never.
          http_port: 0 for any that is free; None for no HTTP.
          http_tls: see `HttpServer`.
          transport: how connections over gRPC behave; None for the defaults.
          tracer: see `Front`.

        Raises:
          UserError: a port cannot be had, or the memory for prefixes holds none.
        """
        self._warm_up_for, self._stall_seconds = warm_up, stall_seconds
        transport = transport or Transport()
        # Else two servers would share a port, each with half of the calls.
        options = [("grpc.so_reuseport", 0), *transport.options()]
        interceptors: list[grpc.aio.ServerInterceptor] = [Readable(SERVICE)]
        if tokens:
            interceptors.insert(0, BearerToken(tokens, exempt=[health.SERVICE_NAME]))
        self._server = grpc.aio.server(
            interceptors=interceptors, options=options, compression=COMPRESSIONS[transport.compression]
        )
        address = f"{host}:{port}"
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            pair = "" if credentials is None else " Or are --tls-cert and --tls-key no pair?"
            raise UserError(f"--port {port} on --host {host} cannot be listened on; is it in use?{pair}") from None
        loop = asyncio.get_running_loop()
        self._lost = asyncio.Event()

        def lost() -> None:
            loop.call_soon_threadsafe(self._lost.set)

        self._worker = Worker(engine, max_queue, lost, pages, prefix_bytes, narrow)
        self._watch: asyncio.Task[None] | None = None
        self._health = health.aio.HealthServicer()
        self._front = Front(self._worker, transport.max_lag_seconds, tracer)
        pb_grpc.add_DFlashServicer_to_server(Service(self._front), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._serving = False
        self.http: HttpServer | None = None
        if http_port is not None:
            from serve import http  # its packages are many, and gRPC alone needs none of them

            app = http.make_app(self._front, tokens, lambda: self._serving)
            self.http = http.HttpServer(app, host, http_port, http_tls)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Listens, and is healthy once the programs of a usual request have been compiled."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        if self.http is not None:
            await self.http.start()
        await self._warm_up()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._watch = asyncio.create_task(self._watch_engine())

    async def stop(self, grace: float) -> None:
        """Takes no more calls, finishes those that are there within `grace` seconds, and ends the engine's thread."""
        if self._watch is not None:
            self._watch.cancel()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._worker.drain()
        # Both cancel, after that, what is still there.
        stopping = [self._server.stop(grace), *([self.http.stop(grace)] if self.http is not None else [])]
        await asyncio.gather(*stopping)
        await asyncio.to_thread(self._worker.stop)

    async def _watch_engine(self) -> None:
        """Health turns NOT_SERVING when the engine is lost, so that whoever runs the server can start it again.

        Also while one step of it does not end: a device that hangs raises nothing.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), WATCH_SECONDS)
                await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
                return
            stalled = 0 < self._stall_seconds < self._worker.step_seconds
            if stalled and self._serving:
                log.critical("the engine has been at one step for %.0f s", self._worker.step_seconds)
                await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            elif not stalled and not self._serving:
                log.warning("the engine goes on")
                await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def _set_health(self, status: int) -> None:
        self._serving = status == health_pb2.HealthCheckResponse.SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def _warm_up(self) -> None:
        """Decodes two tokens in each of the ways that requests are expected to ask for, one after the other."""
        if self._warm_up_for == "none":
            return
        loop, engine = asyncio.get_running_loop(), self._worker.engine
        # Longer than a page, so that a prefix is kept and found: those are programs too.
        prompt = [0] * max(1, min(engine.page_size + 1, engine.max_model_len - 2))
        for params in messages.warm_up_params(engine, everything=self._warm_up_for == "all"):
            done: asyncio.Future[None] = loop.create_future()

            def deliver(item: Chunk | Exception, done: asyncio.Future[None] = done) -> None:
                if isinstance(item, Exception):
                    loop.call_soon_threadsafe(done.set_exception, item)
                elif item.completion is not None:
                    loop.call_soon_threadsafe(done.set_result, None)

            self._worker.submit(engine.request(prompt, params), deliver)
            await done

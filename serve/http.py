"""OpenAI's HTTP protocol over the same worker, /health and /metrics. Nothing here blocks the event loop."""

import asyncio
import contextlib
import json
import math
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fastapi
import uvicorn
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from dflash_jax.errors import UserError
from dflash_jax.flights import Request
from dflash_jax.request import Completion
from serve import openapi
from serve.answer_parser import AnswerParser
from serve.auth import Tokens
from serve.front import Front, Stream, TooSlow
from serve.metrics import CONTENT_TYPE
from serve.openai_answers import Writer
from serve.openai_messages import ChatAsked, CompletionAsked, error_body, model_name, read
from serve.tracing import Origin
from serve.worker import Draining, Lost, QueueFull

MAX_BODY_BYTES = 16 << 20
_FAILED = "the engine failed while it served this request"


class _Refused(Exception):
    """Answered with a status, an error in OpenAI's shape and headers."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.body, self.headers = status, error_body(message, kind, code), headers


class _NoModel(UserError):
    """The request names another model."""


def _refusal(error: Exception) -> _Refused:
    """How an exception is answered; those that have no answer are the engine's."""
    if isinstance(error, _Refused):
        return error
    if isinstance(error, _NoModel):
        return _Refused(404, error.public, "invalid_request_error", "model_not_found")
    if isinstance(error, UserError):
        return _Refused(400, error.public, "invalid_request_error")
    if isinstance(error, QueueFull):
        return _Refused(429, str(error), "rate_limit_error", "queue_full", **{"retry-after": "1"})
    if isinstance(error, (Draining, Lost)):
        return _Refused(503, str(error), "service_unavailable")
    if isinstance(error, TooSlow):  # in an event: the status has been sent
        return _Refused(408, str(error), "invalid_request_error", "too_slow")
    if isinstance(error, HTTPException):
        return _Refused(error.status_code, error.detail, "invalid_request_error", **(error.headers or {}))
    return _Refused(500, _FAILED, "server_error")


async def _answer_error(request: fastapi.Request, error: Exception) -> Response:
    refused = _refusal(error)
    return JSONResponse(refused.body, refused.status, refused.headers)


async def _answer_nobody(request: fastapi.Request, error: Exception) -> Response:
    return Response(status_code=400)  # the caller has gone


class _Events(StreamingResponse):
    """Server-sent events about a request, which ends with them."""

    def __init__(self, stream: Stream, events: AsyncIterator[bytes]):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `StreamingResponse`; it returns when all has been sent, or nobody reads it any more."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


def _event(item: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(item).encode() + b"\n\n"


async def _events(stream: Stream, writer: Writer) -> AsyncIterator[bytes]:
    for piece in writer.opening():
        yield _event(piece)
    done = False
    while not done:
        try:
            chunk = await stream.next()
        except Exception as error:  # the status has been sent
            yield _event(_refusal(error).body)
            return
        for piece in writer.pieces(chunk):
            yield _event(piece)
        done = chunk.completion is not None
    yield b"data: [DONE]\n\n"


async def _last(stream: Stream) -> Completion:
    while True:
        done = (await stream.next()).completion
        if done is not None:
            return done


async def _gone(request: fastapi.Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _whole(request: fastapi.Request, stream: Stream) -> Completion:
    """Waits for a text as long as somebody waits for it."""
    last, gone = asyncio.create_task(_last(stream)), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((last, gone), return_when=asyncio.FIRST_COMPLETED)
        if not last.done():
            raise ClientDisconnect
        return last.result()
    except (UserError, ClientDisconnect):
        raise
    except Exception as error:
        raise _Refused(500, _FAILED, "server_error") from error
    finally:
        last.cancel()
        gone.cancel()
        stream.close()


async def _body(request: fastapi.Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            words = f"the body is longer than {MAX_BODY_BYTES} bytes"
            raise _Refused(413, words, "invalid_request_error", connection="close")
    return bytes(body)


def make_app(front: Front, tokens: Sequence[str], healthy: Callable[[], bool]) -> fastapi.FastAPI:
    """The application.

    Args:
      front: of the worker.
      tokens: one of which every call must bear, /health aside; none if empty.
      healthy: whether the server is.
    """
    engine, known, name = front.engine, Tokens(tokens), model_name(front.engine)
    started = int(time.time())

    async def authorise(request: fastapi.Request) -> None:
        given = request.headers.getlist("authorization")
        if tokens and not (len(given) == 1 and known.admit(given[0])):
            words = "a token that this server knows is needed: header 'Authorization: Bearer TOKEN'"
            headers = {"www-authenticate": "Bearer"}
            raise _Refused(401, words, "authentication_error", "invalid_api_key", **headers)

    app = fastapi.FastAPI(openapi_url=None)  # its own would know nothing of bodies that are read by hand
    methods = ["auto", "ar", *(["mtp"] if engine.mtp is not None else [])]
    methods += ["dflash", "ddtree"] if engine.drafter is not None else []
    about = openapi.document(name, methods, guarded=bool(tokens))
    guarded = [fastapi.Depends(authorise)]
    for kind in (_Refused, UserError, QueueFull, Draining, Lost, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)

    async def answer(request: fastapi.Request, kind: type[CompletionAsked] | type[ChatAsked]) -> Response:
        body = await _body(request)
        asked: CompletionAsked | ChatAsked | None = None
        parser: AnswerParser | None = None

        def make() -> Request:
            nonlocal asked, parser
            asked = read(kind, body)
            if asked.model != name:
                raise _NoModel(f"model: this server has {name!r} alone, found {asked.model[:200]!r}")
            request, parser = asked.request(engine)
            return request

        chat = kind is ChatAsked
        origin = Origin.of("chatcmpl" if chat else "cmpl", request.headers.items())
        stream = await front.open(make, origin)
        assert asked is not None
        options = asked.stream_options
        usages = options is not None and options.include_usage
        writer = Writer(engine, chat, origin.id, int(time.time()), parser, usages)
        if asked.stream:
            return _Events(stream, _events(stream, writer))
        return JSONResponse(writer.whole(await _whole(request, stream)))

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(request: fastapi.Request) -> Response:
        return await answer(request, CompletionAsked)

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat_completions(request: fastapi.Request) -> Response:
        return await answer(request, ChatAsked)

    model = {"id": name, "object": "model", "created": started, "owned_by": "dflash-jax"}
    model |= {"max_model_len": engine.max_model_len}

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{wanted:path}", dependencies=guarded)
    async def one_model(wanted: str) -> Response:
        if wanted != name:
            raise _NoModel(f"model: this server has {name!r} alone, found {wanted[:200]!r}")
        return JSONResponse(model)

    @app.get("/openapi.json", dependencies=guarded)
    async def schema() -> Response:
        return JSONResponse(about)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if healthy() else 503)

    @app.get("/metrics", dependencies=guarded)
    async def metrics() -> Response:
        return Response(front.metrics.text(), headers={"content-type": CONTENT_TYPE})

    return app


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`."""
        yield


class HttpServer:
    """The application on a port.

    Attributes:
      port: that it listens on.
    """

    def __init__(
        self, app: fastapi.FastAPI, host: str, port: int, tls: tuple[Path, Path, Path | None] | None = None
    ):
        """Takes the port, and answers once it has been started.

        Args:
          app: see `make_app`.
          host: address to listen on.
          port: 0 for any that is free.
          tls: PEM files: certificate, its key, and the authority of the clients or None; None for plain text.

        Raises:
          UserError: the port cannot be had, or the files are no pair.
        """
        cert, key, authority = (None, None, None) if tls is None else tls
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", http="h11", server_header=False,
            ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=None if authority is None else str(authority),
            ssl_cert_reqs=ssl.CERT_NONE if authority is None else ssl.CERT_REQUIRED,
        )  # fmt: skip
        try:
            config.load()
        except (ssl.SSLError, OSError) as error:
            raise UserError(f"--tls-cert, --tls-key or --tls-client-ca cannot be used: {error}") from None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            words = f"--http-port {port} on --host {host} cannot be listened on ({error.strerror}); is it in use?"
            raise UserError(words) from None
        self.port: int = self._socket.getsockname()[1]
        self._server = _Uvicorn(config)
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers from now on."""
        self._running = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            await asyncio.wait((self._running,), timeout=0.01)
            if self._running.done():
                self._running.result()
                raise RuntimeError("the HTTP server has ended before it began")

    async def stop(self, grace: float) -> None:
        """Takes no more connections, and finishes the answers that are under way within `grace` seconds."""
        if self._running is None:
            self._socket.close()
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace)
        self._server.should_exit = True
        await self._running

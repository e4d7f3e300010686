"""What happens to a call before the service sees it: messages that cannot be read."""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
Context = grpc.aio.ServicerContext


@dataclasses.dataclass(frozen=True)
class _Unreadable:
    """Stands for a request whose bytes are no message of its type."""


class Readable(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT where a service's request cannot be read: broken protobuf, text that is not UTF-8.

    By itself gRPC would call that an INTERNAL error of the server.
    """

    def __init__(self, service: str):
        """For the methods of one service, which take a single request each."""
        self._prefix = f"/{service}/"

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """See `grpc.aio.ServerInterceptor`."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        read = handler.request_deserializer
        words = "the request is not a valid message of its type: broken, or text that is not UTF-8"

        def tolerant(raw: bytes) -> Any:
            try:
                return read(raw)
            except DecodeError:
                return _Unreadable()

        async def unary(request: Any, context: Context) -> Any:
            if isinstance(request, _Unreadable):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, words)
            return await handler.unary_unary(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            if isinstance(request, _Unreadable):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, words)
            async for answer in handler.unary_stream(request, context):
                yield answer

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, tolerant, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(unary, tolerant, handler.response_serializer)

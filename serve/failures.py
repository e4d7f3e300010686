"""What a call ends with instead of an answer: a status of gRPC, with words."""

import dataclasses
import logging
from typing import NoReturn

import grpc

from dflash_jax.errors import UserError
from serve.proto import dflash_pb2 as pb
from serve.worker import Draining, Lost, QueueFull

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a request is not served.

    Attributes:
      code: status.
      words: one line for whoever asked.
    """

    code: grpc.StatusCode
    words: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """What an exception of `Front.open` or `Stream.next` means for the caller."""
        if isinstance(error, UserError):
            return cls(grpc.StatusCode.INVALID_ARGUMENT, error.public)
        if isinstance(error, QueueFull):
            return cls(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        if isinstance(error, Draining | Lost):
            return cls(grpc.StatusCode.UNAVAILABLE, str(error))
        log.error("a request failed", exc_info=error)
        return cls(grpc.StatusCode.INTERNAL, "the engine failed while it served this request")

    async def abort(self, context: grpc.aio.ServicerContext) -> NoReturn:
        """Ends a call with it: raises what gRPC takes for that."""
        await context.abort(self.code, self.words)
        raise AssertionError("abort raises")

    def message(self) -> pb.Error:
        """It as one message among others."""
        return pb.Error(code=self.code.value[0], message=self.words)

"""What a call ends with instead of an answer: a status of gRPC, words, and details of google.rpc.

The details are those of `google/rpc/error_details.proto`: BadRequest with the field at fault where an argument is
invalid, RetryInfo where the line is full.
"""

import dataclasses
import logging
import re
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from dflash_jax.errors import UserError
from serve.front import TooSlow
from serve.messages import FieldError
from serve.proto import dflash_pb2 as pb
from serve.worker import Draining, Lost, QueueFull

log = logging.getLogger(__name__)

RETRY_SECONDS = 1  # for a client whom a full line has refused
# Words and details travel as metadata, of which clients by default take 8 KiB.
_MOST_BYTES = 1000


def field_of(error: UserError) -> str | None:
    """Path of the field of a `GenerateRequest` that an error is about; None if it is about none.

    The library's messages begin with the flag at fault, and flags are named after the fields of `SamplingParams`.
    """
    if isinstance(error, FieldError):
        return error.field
    flag = re.match(r"--([a-z-]+)", error.public)
    name = None if flag is None else flag[1].replace("-", "_")
    return f"params.{name}" if name in pb.SamplingParams.DESCRIPTOR.fields_by_name else None


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a request is not served.

    Attributes:
      code: status.
      words: one line for whoever asked.
      details: messages of `google/rpc/error_details.proto`.
    """

    code: grpc.StatusCode
    words: str
    details: tuple[Message, ...] = ()

    @classmethod
    def of(cls, error: Exception, within: str = "") -> "Failure":
        """What an exception means for the caller.

        Args:
          error: of `Front.open`, `Stream.next` or what reads a request.
          within: what comes before the path of the field, where the request is a part of the call's message.
        """
        if isinstance(error, UserError):
            words = error.public.encode()[:_MOST_BYTES].decode(errors="ignore")
            field = field_of(error)
            if field is None:
                return cls(grpc.StatusCode.INVALID_ARGUMENT, words)
            wrong = error_details_pb2.BadRequest.FieldViolation(field=within + field, description=words)
            bad = error_details_pb2.BadRequest(field_violations=[wrong])
            return cls(grpc.StatusCode.INVALID_ARGUMENT, words, (bad,))
        if isinstance(error, QueueFull):
            retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=RETRY_SECONDS))
            return cls(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), (retry,))
        if isinstance(error, Draining | Lost):
            return cls(grpc.StatusCode.UNAVAILABLE, str(error))
        if isinstance(error, TooSlow):
            return cls(grpc.StatusCode.ABORTED, str(error))
        log.error("a request failed", exc_info=error)
        return cls(grpc.StatusCode.INTERNAL, "the engine failed while it served this request")

    def _packed(self) -> list[any_pb2.Any]:
        packed = [any_pb2.Any() for _ in self.details]
        for one, detail in zip(packed, self.details, strict=True):
            one.Pack(detail)
        return packed

    async def abort(self, context: grpc.aio.ServicerContext) -> NoReturn:
        """Ends a call with it: raises what gRPC takes for that."""
        full = status_pb2.Status(code=self.code.value[0], message=self.words, details=self._packed())
        metadata = rpc_status.to_status(full).trailing_metadata if self.details else ()
        await context.abort(self.code, self.words, metadata)
        raise AssertionError("abort raises")

    def message(self) -> pb.Error:
        """It as one message among others."""
        return pb.Error(code=self.code.value[0], message=self.words, details=self._packed())

"""A client for asyncio: `async with AsyncClient("127.0.0.1:50051") as client: …`."""

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from dflash_jax.request import SamplingParams
from serve import connection, messages
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.transport import COMPRESSIONS, client_options

# Text to continue as it is, the turns of a conversation (each with "role" and "content"), token ids, or the message.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int] | pb.Input


def input_message(prompt: Prompt) -> pb.Input:
    """The message of a prompt."""
    if isinstance(prompt, pb.Input):
        return prompt
    if isinstance(prompt, str):
        return pb.Input(text=prompt)
    items: Sequence[Any] = prompt
    if items and isinstance(items[0], Mapping):
        return pb.Input(chat=pb.Chat(messages=[pb.Message(role=x["role"], content=x["content"]) for x in items]))
    return pb.Input(tokens=pb.TokenIds(ids=items))


@dataclasses.dataclass(frozen=True)
class Info:
    """What a server has loaded, and how it is doing."""

    model: pb.GetModelInfoResponse
    server: pb.GetServerInfoResponse


class AsyncClient:
    """One connection, which any number of calls of one event loop share. What fails is a `grpc.aio.AioRpcError`.

    Attributes:
      stub: the generated one, for everything else; `metadata` must be given there.
      metadata: that shows the token.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        compression: str = "none",
        timeout: float | None = None,
    ):
        """Connects when the first call is made.

        Args:
          address: HOST:PORT.
          token: that the server wants to see, if any.
          credentials: for TLS, such as `grpc.ssl_channel_credentials()`; None for plain text.
          compression: of what is sent; one of `serve.transport.COMPRESSIONS`.
          timeout: seconds that a call may take, where it does not say; None for ever.
        """
        how: dict[str, Any] = {"options": client_options(), "compression": COMPRESSIONS[compression]}
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, **how)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, **how)
        self.stub = pb_grpc.DFlashStub(self._channel)
        self.metadata = connection.bearer(token)
        self._timeout = timeout

    @classmethod
    def to(cls, endpoint: connection.Endpoint, timeout: float | None = None) -> Self:
        """To the server that a command line names. `UserError` where its files do not do."""
        return cls(
            endpoint.address, token=endpoint.token(), credentials=endpoint.credentials(),
            compression=endpoint.compression, timeout=timeout,
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the calls that are open, and the connection."""
        await self._channel.close()

    def _how(self, timeout: float | None) -> dict[str, Any]:
        return {"timeout": self._timeout if timeout is None else timeout, "metadata": self.metadata}

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Messages as rounds finish, the last with `finished`. Leaving early ends the request; `aclose` at once.

        Args:
          prompt: see `Prompt`.
          params: how to decode; None for the defaults.
          timeout: seconds that it may take in all.
        """
        asked = pb.GenerateRequest(
            input=input_message(prompt), params=messages.sampling_message(params or SamplingParams())
        )
        call = self.stub.Generate(asked, **self._how(timeout))
        try:
            async for part in call:
                yield part
        finally:
            call.cancel()  # nothing, if it has ended

    async def generate_text(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> str:
        """The whole text; see `generate`."""
        return "".join([part.text async for part in self.generate(prompt, params, timeout=timeout)])

    async def generate_batch(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        timeout: float | None = None,
    ) -> AsyncIterator[pb.GenerateBatchResponse]:  # fmt: skip
        """Messages of many requests in one call, mixed; `index` says whose each is.

        A request that fails has an `error` for its last message, and the others go on.

        Args:
          prompts: see `Prompt`.
          params: of all, or of each.
          timeout: seconds that all of them may take together.
        """
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else params
        requests = [
            pb.GenerateRequest(input=input_message(prompt), params=messages.sampling_message(one))
            for prompt, one in zip(prompts, each, strict=True)
        ]
        call = self.stub.GenerateBatch(pb.GenerateBatchRequest(requests=requests), **self._how(timeout))
        try:
            async for part in call:
                yield part
        finally:
            call.cancel()  # nothing, if it has ended

    async def tokenize(self, prompt: Prompt, *, timeout: float | None = None) -> list[int]:
        """Token ids of a prompt, as `generate` would read it."""
        asked = pb.TokenizeRequest(input=input_message(prompt))
        return list((await self.stub.Tokenize(asked, **self._how(timeout))).token_ids)

    async def info(self, *, timeout: float | None = None) -> Info:
        """What the server has loaded, and how it is doing."""
        model = await self.stub.GetModelInfo(pb.GetModelInfoRequest(), **self._how(timeout))
        return Info(model, await self.stub.GetServerInfo(pb.GetServerInfoRequest(), **self._how(timeout)))

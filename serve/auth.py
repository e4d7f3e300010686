"""Who may ask, and over which connection: bearer tokens from a file, TLS and mutual TLS."""

import hashlib
import hmac
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from dflash_jax.errors import UserError
from serve.interceptors import Context, Continuation


def _refusing(handler: Any, code: grpc.StatusCode, words: str) -> grpc.RpcMethodHandler:
    """A handler of the same kind that refuses every call, whatever is in it."""

    async def unary(request: Any, context: Context) -> None:
        await context.abort(code, words)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        await context.abort(code, words)
        yield  # a generator, as a stream of answers must be

    if handler.request_streaming:
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.stream_unary_rpc_method_handler(unary)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(unary)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror})") from None


def server_credentials(cert: Path | None, key: Path | None, client_ca: Path | None) -> grpc.ServerCredentials | None:
    """What the server shows, and with `client_ca` what it wants to see; None without any.

    Args:
      cert, key: PEM files: the server's certificate, the chain to its authority after it, and its private key.
      client_ca: PEM file of the authorities one of which must have signed the client's certificate (mutual TLS).

    Raises:
      UserError: only some are given, or one cannot be read.
    """
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise UserError("--tls-cert and --tls-key go together, and --tls-client-ca needs both")
    pair = (_read("--tls-key", key), _read("--tls-cert", cert))
    roots = None if client_ca is None else _read("--tls-client-ca", client_ca)
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=client_ca is not None)


def channel_credentials(ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    """A client's side of it: whom it trusts, and what it shows where the server asks; None without any.

    Raises:
      UserError: a certificate without its key or the reverse, one without --tls-ca, or a file that cannot be read.
    """
    if ca is None and cert is None and key is None:
        return None
    if ca is None or (cert is None) != (key is None):
        raise UserError("--tls-cert and --tls-key go together, and need --tls-ca, the authority of the server")
    shown = None if cert is None or key is None else (_read("--tls-key", key), _read("--tls-cert", cert))
    return grpc.ssl_channel_credentials(_read("--tls-ca", ca), *(shown or (None, None)))


def read_tokens(path: Path) -> list[str]:
    """The bearer tokens in a file, one a line; empty lines and those that begin with # are left out.

    Raises:
      UserError: it cannot be read, holds none, or one that no header can carry.
    """
    lines = [line.strip() for line in _read("--token-file", path).decode("utf-8", errors="replace").splitlines()]
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise UserError(f"--token-file {path}: has no token; put one on each line")
    if any(not (token.isascii() and token.isprintable()) or " " in token for token in tokens):
        raise UserError(f"--token-file {path}: a token must be printable ASCII without spaces")
    return tokens


class Tokens:
    """The tokens, one of which admits."""

    def __init__(self, tokens: Sequence[str]):
        self._digests = [_digest(token) for token in tokens]

    def admit(self, header: str) -> bool:
        """Whether the value of an authorization header has one of them."""
        scheme, _, token = header.partition(" ")
        # All are compared, and digests of one length, so that the time tells nothing.
        found = [hmac.compare_digest(_digest(token.strip()), known) for known in self._digests]
        return scheme.lower() == "bearer" and any(found)


class BearerToken(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED unless a call carries `authorization: Bearer TOKEN` with one of the tokens.

    Health checks are exempt: what asks for them has no secrets, and they tell none.
    """

    def __init__(self, tokens: Sequence[str], exempt: Sequence[str]):
        """With the tokens, and the services that need none."""
        self._tokens = Tokens(tokens)
        self._exempt = tuple(f"/{service}/" for service in exempt)

    def _admits(self, details: grpc.HandlerCallDetails) -> bool:
        if details.method.startswith(self._exempt):
            return True
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        return len(given) == 1 and isinstance(given[0], str) and self._tokens.admit(given[0])

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """See `grpc.aio.ServerInterceptor`."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or self._admits(handler_call_details):
            return handler
        words = "a token that this server knows is needed: metadata 'authorization: Bearer TOKEN'"
        return _refusing(handler, grpc.StatusCode.UNAUTHENTICATED, words)

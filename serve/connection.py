"""How a client finds a server and what it shows to it: the flags of the programs that call one."""

import argparse
import dataclasses
import sys
from pathlib import Path

import grpc

from dflash_jax.errors import UserError
from serve.auth import channel_credentials, read_tokens
from serve.transport import COMPRESSIONS


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A server and the way to it. It can be pickled, unlike what gRPC makes of it.

    Attributes:
      address: HOST:PORT.
      token_file: whose first token is shown; None for none.
      tls_ca, tls_cert, tls_key: see `serve.auth.channel_credentials`.
      compression: of what is sent; one of `serve.transport.COMPRESSIONS`.
    """

    address: str
    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    compression: str = "none"

    def credentials(self) -> grpc.ChannelCredentials | None:
        """For TLS; None for plain text. `UserError` where the files do not do."""
        return channel_credentials(self.tls_ca, self.tls_cert, self.tls_key)

    def token(self) -> str | None:
        """What a call must bear, if anything. `UserError` where the file does not do."""
        return None if self.token_file is None else read_tokens(self.token_file)[0]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `endpoint_of` reads."""
    parser.add_argument("--address", default="127.0.0.1:50051", help="HOST:PORT of the server")
    parser.add_argument("--token-file", type=Path, help="file whose first line of a token is shown to the server")
    parser.add_argument("--tls-ca", type=Path, help="PEM file of the authority of the server; with it the call is TLS")
    parser.add_argument("--tls-cert", type=Path, help="PEM file of a certificate to show (mutual TLS)")
    parser.add_argument("--tls-key", type=Path, help="PEM file of its private key")
    parser.add_argument("--compression", default="none", choices=COMPRESSIONS, help="of what is sent")


def endpoint_of(args: argparse.Namespace) -> Endpoint:
    """The server that a command line names."""
    return Endpoint(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Endpoint)})


def bearer(token: str | None) -> list[tuple[str, str]]:
    """The metadata of a call."""
    return [] if token is None else [("authorization", f"Bearer {token}")]


def report(error: UserError | grpc.RpcError, address: str) -> int:
    """Says on stderr, in one line, what went wrong.

    Returns:
      Exit status: 2 where what the user gave is wrong, 1 where the server or the way to it is.
    """
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)
        return 2
    details = " ".join((error.details() or "").split())
    if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
        print(f"error: {details}", file=sys.stderr)
        return 2
    print(f"error: {error.code().name} from {address}: {details}", file=sys.stderr)
    return 1

"""How connections behave: sizes of messages, compression, keep-alive, age."""

import argparse
import dataclasses
import math
from typing import Any

import grpc

from dflash_jax.errors import UserError

COMPRESSIONS = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
# A client pings while it waits for an answer, so that neither side of a proxy or a NAT forgets the connection.
CLIENT_KEEPALIVE_SECONDS = 30
_ANSWER_SECONDS = 20  # for a ping, until the connection is taken for dead
_FOREVER = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Transport:
    """Of a server. What it is sent may be compressed, whatever it says here.

    Attributes:
      max_message_mib: longest message that is read.
      compression: of answers, for clients that can read it; one of `COMPRESSIONS`.
      keepalive_seconds: after so long without traffic a client is pinged, and let go if it is dead; 0 for never.
      min_ping_seconds: clients may ping so often, with or without a call; one that does so more often is let go.
      max_connection_age_seconds: then a client is asked to connect anew, which spreads clients over new replicas; calls
        finish on the old connection. 0 for never.
      max_lag_seconds: a text whose reader has left a chunk of it unread for so long is dropped, over HTTP too, for
        else the unread ones would fill the memory. 0 for never.
    """

    max_message_mib: int = 16
    compression: str = "none"
    keepalive_seconds: float = 60.0
    min_ping_seconds: float = 10.0
    max_connection_age_seconds: float = 0.0
    max_lag_seconds: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_message_mib < 2048:  # its bytes are an int32
            raise UserError(f"--max-message-mib must be 1 to 2047, found {self.max_message_mib}")
        if self.compression not in COMPRESSIONS:
            raise UserError(f"--compression must be one of {', '.join(COMPRESSIONS)}, found {self.compression!r}")
        for name in ("keepalive_seconds", "min_ping_seconds", "max_connection_age_seconds", "max_lag_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value < 10**6):
                raise UserError(f"--{name.replace('_', '-')} must be 0 to 10**6, found {value:g}")

    def options(self) -> list[tuple[str, Any]]:
        """They as channel arguments of gRPC."""
        return [
            ("grpc.max_receive_message_length", self.max_message_mib << 20),
            ("grpc.keepalive_time_ms", _milliseconds(self.keepalive_seconds)),
            ("grpc.keepalive_timeout_ms", 1000 * _ANSWER_SECONDS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * self.min_ping_seconds)),
            ("grpc.max_connection_age_ms", _milliseconds(self.max_connection_age_seconds)),
        ]


def _milliseconds(seconds: float) -> int:
    """Of a time after which something happens, 0 being never."""
    return max(1, round(1000 * seconds)) if seconds else _FOREVER


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each attribute of `Transport`."""
    own = Transport()
    parser.add_argument(
        "--max-message-mib", type=int, default=own.max_message_mib, metavar="N",
        help="longest message that is read (gRPC)",
    )  # fmt: skip
    parser.add_argument("--compression", default=own.compression, choices=COMPRESSIONS, help="of answers over gRPC")
    parser.add_argument(
        "--keepalive-seconds", type=float, default=own.keepalive_seconds, metavar="S",
        help="ping a client after so long without traffic (gRPC); 0 is never",
    )  # fmt: skip
    parser.add_argument(
        "--min-ping-seconds", type=float, default=own.min_ping_seconds, metavar="S",
        help="let a client go that pings more often than this (gRPC)",
    )  # fmt: skip
    parser.add_argument(
        "--max-connection-age-seconds", type=float, default=own.max_connection_age_seconds, metavar="S",
        help="have clients connect anew after so long (gRPC), calls in flight finished; 0 is never",
    )  # fmt: skip
    parser.add_argument(
        "--max-lag-seconds", type=float, default=own.max_lag_seconds, metavar="S",
        help="drop a text whose reader is so far behind; 0 is never",
    )  # fmt: skip


def transport_of(args: argparse.Namespace) -> Transport:
    """What a command line says. `UserError` where it makes no sense."""
    return Transport(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Transport)})


def client_options() -> list[tuple[str, Any]]:
    """Channel arguments of a client."""
    return [
        ("grpc.keepalive_time_ms", 1000 * CLIENT_KEEPALIVE_SECONDS),
        ("grpc.keepalive_timeout_ms", 1000 * _ANSWER_SECONDS),
        ("grpc.http2.max_pings_without_data", 0),  # any number
        ("grpc.max_receive_message_length", -1),  # a whole text with log-probabilities may be long
    ]

"""`python -m serve`: loads a model and serves it over gRPC, and HTTP if asked to, until SIGTERM or SIGINT."""

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.errors import UserError
from serve import config_file, request_log, transport


def build_parser() -> argparse.ArgumentParser:
    """The flags; those of a model are `dflash_jax.generate`'s."""
    parser = argparse.ArgumentParser(prog="python -m serve", description=__doc__)
    config_file.add_flag(parser)
    parser.add_argument("--model", help="as of dflash_jax.generate (default: the bundled pair)")
    parser.add_argument("--draft-model", help="the drafter")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--tp", type=int, default=1, help="devices that share the model")
    parser.add_argument("--kernels", default="auto", choices=("auto", "xla", "pallas"))
    parser.add_argument("--max-model-len", type=int, help="longest prompt + text, in tokens")
    parser.add_argument("--max-slots", type=int, default=8, help="requests decoded at once")
    parser.add_argument("--max-queue", type=int, default=64, help="requests that may wait beside those")
    parser.add_argument(
        "--cache-tokens", type=int, metavar="N",
        help="tokens of all requests together that the caches hold (default: --max-slots times --max-model-len)",
    )
    parser.add_argument(
        "--prefix-cache-mib", type=int, default=0, metavar="N",
        help="device memory for the states of prompts that later ones may begin with; 0 is no prefix cache",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=50051, help="0 takes one that is free")
    parser.add_argument(
        "--http-port", type=int, metavar="PORT", help="speak OpenAI's HTTP protocol there too; 0 takes one that is free"
    )
    transport.add_flags(parser)
    parser.add_argument("--token-file", type=Path, help="bearer tokens, one a line, one of which each call must have")
    parser.add_argument("--tls-cert", type=Path, help="PEM file of the server's certificate (and its chain)")
    parser.add_argument("--tls-key", type=Path, help="PEM file of its private key")
    parser.add_argument("--tls-client-ca", type=Path, help="PEM file: clients must show a certificate signed by it")
    parser.add_argument(
        "--warm-up", default="default", choices=("none", "default", "all"),
        help="what is compiled before the server is healthy: what requests of the default method need, or of all",
    )
    parser.add_argument(
        "--round-width", default="auto", choices=("auto", "full"),
        help="slots that a round holds: as few as its requests need, or always all, which is fewer programs to compile",
    )
    parser.add_argument("--compile-cache-dir", metavar="DIR", help="of compiled programs, as of dflash_jax.generate")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="for calls to finish after SIGTERM")
    parser.add_argument(
        "--stall-seconds", type=float, default=600.0, metavar="S",
        help="of one step of the engine, after which it is taken to hang and health says so; 0 is never",
    )
    parser.add_argument("--log-format", default="text", choices=("text", "json"), help="of what is written on stderr")
    parser.add_argument(
        "--otlp-traces-endpoint", metavar="URL",
        help="OpenTelemetry collector for a span a request (default: that of OTEL_EXPORTER_OTLP_ENDPOINT, if any)",
    )
    return parser


async def _serve(args: argparse.Namespace) -> None:
    from dflash_jax import loading
    from dflash_jax.generate import set_up_compile_cache
    from serve.auth import read_tokens, server_credentials
    from serve.server import Server
    from serve.tracing import make_tracer

    # What is wrong with these is said before a model is loaded.
    tokens = [] if args.token_file is None else read_tokens(args.token_file)
    connections = transport.transport_of(args)
    credentials = server_credentials(args.tls_cert, args.tls_key, args.tls_client_ca)
    if tokens and credentials is None and args.host not in ("127.0.0.1", "::1", "localhost"):
        logging.warning("tokens cross the network in plain text: give --tls-cert and --tls-key")
    tracer = make_tracer(args.otlp_traces_endpoint)
    set_up_compile_cache(args.compile_cache_dir)
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    engine = await asyncio.to_thread(
        loading.load,
        args.model,
        args.draft_model,
        tp=args.tp,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        kernels=args.kernels,
        max_slots=args.max_slots,
    )
    pages = None
    if args.cache_tokens is not None:
        pages = -(-args.cache_tokens // engine.page_size)
        if pages * engine.page_size < engine.max_model_len:
            raise UserError(
                f"--cache-tokens must be at least {engine.max_model_len}, the longest request (--max-model-len), "
                f"found {args.cache_tokens}"
            )
    server = Server(
        engine, args.host, args.port, args.max_queue,
        warm_up=args.warm_up, tokens=tokens, credentials=credentials, pages=pages,
        prefix_bytes=args.prefix_cache_mib << 20, narrow=args.round_width == "auto",
        stall_seconds=args.stall_seconds, http_port=args.http_port, transport=connections, tracer=tracer,
        http_tls=None if credentials is None else (args.tls_cert, args.tls_key, args.tls_client_ca),
    )  # fmt: skip
    starting = asyncio.create_task(server.start())
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()  # raises what went wrong
        # What is there now stays: a look of Python's garbage collector at all of it would hold every text up for as
        # long as a dozen rounds of a small model.
        gc.collect()
        gc.freeze()
        if server.http is not None:
            print(f"OpenAI's protocol on {args.host}:{server.http.port}", flush=True)
        print(f"serving {engine.names[0]} on {args.host}:{server.port}", flush=True)
    await waiting
    logging.info("shutting down: calls have %g s to finish", args.drain_seconds)
    await starting
    await server.stop(args.drain_seconds)
    if tracer is not None:
        await asyncio.to_thread(tracer.close)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server; returns its exit status, 2 where what the user gave is wrong."""
    listener = None
    try:
        args = config_file.parse(build_parser(), argv)
        listener = request_log.set_up(args.log_format)
        if args.max_slots < 1 or args.max_queue < 0 or not 0 <= args.port < 1 << 16:
            raise UserError("--max-slots must be at least 1, --max-queue at least 0, --port 0 to 65535")
        if not (args.drain_seconds >= 0 and args.stall_seconds >= 0):  # nor NaN
            raise UserError("--drain-seconds and --stall-seconds must be at least 0")
        if args.http_port is not None and not 0 <= args.http_port < 1 << 16:
            raise UserError(f"--http-port must be 0 to 65535, found {args.http_port}")
        if args.prefix_cache_mib < 0:
            raise UserError(f"--prefix-cache-mib must be 0 (off) or more, found {args.prefix_cache_mib}")
        asyncio.run(_serve(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if listener is not None:
            listener.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A load for a running server, and what came of it: `python -m serve.load`.

Clients that each have one request in flight (`--concurrency`), or requests that come at random times (`--rate`), once
for each method, after a warm-up that is not counted. Every method is asked the same requests.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import multiprocessing
import multiprocessing.synchronize
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc

from benchmarks.methods import parse_methods
from benchmarks.prompt_sets import SET_NAMES, prompt_set
from dflash_jax.errors import UserError
from dflash_jax.plots import check_matplotlib, serving_load
from dflash_jax.prompts import PromptText
from dflash_jax.request import SamplingParams
from serve import connection, load_driver
from serve.async_client import AsyncClient, Info, input_message
from serve.connection import Endpoint
from serve.load_driver import Load, Part, WarmUpFailed
from serve.load_figures import HEADER, cells, line, remarks, summarise


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m serve.load", description=__doc__.splitlines()[0])
    connection.add_flags(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency", default="1,4,16,64", metavar="N,…",
        help="clients that each have a request in flight (default: %(default)s)",
    )  # fmt: skip
    how.add_argument("--rate", metavar="R,…", help="requests a second that come by themselves (Poisson), instead")
    parser.add_argument("--methods", default="ar,dflash,ddtree", help="of ar, mtp[:STEPS], dflash, ddtree[:NODES]")
    parser.add_argument("--requests", type=int, metavar="N", help="end a point after so many")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="end a point after so long; 0 waits (default: %(default)g)"
    )
    parser.add_argument(
        "--set", nargs="+", default=["heldout"], metavar="SET",
        help=f"prompts: {', '.join(SET_NAMES)} or a prompt file (default: heldout)",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, help="only the first so many prompts of each set")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, default=True, help="template user texts")
    parser.add_argument(
        "--max-new-tokens", default="128", metavar="N,…", help="each request gets one of these (default: %(default)s)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="so that every text has that length")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn: order, lengths, arrivals, noise")
    parser.add_argument("--processes", type=int, default=1, help="that share the load, where one is too slow")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw them there (needs matplotlib)")
    return parser


def _numbers(flag: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    """`1,4,16` -> numbers above 0."""
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise UserError(f"{flag} must be numbers above 0 separated by commas, found {text!r}")
    return values


def _given(prompt: PromptText, chat: bool) -> bytes:
    """A prompt as the server reads it, serialised."""
    if prompt.kind == "messages":
        return input_message(prompt.content).SerializeToString()
    templated = prompt.kind == "prompt" and chat
    turns = [{"role": "user", "content": prompt.content}] if templated else prompt.content
    return input_message(turns).SerializeToString()


def plan(args: argparse.Namespace) -> list[tuple[str, Load]]:
    """The points in the order in which they are measured: all methods at one load, then at the next.

    Raises:
      UserError: a flag that makes no sense.
    """
    rates = None if args.rate is None else _numbers("--rate", args.rate, float)
    clients = _numbers("--concurrency", args.concurrency, int)
    if args.requests is not None and args.requests < 1:
        raise UserError(f"--requests must be at least 1, found {args.requests}")
    if not 0 <= args.seconds < float("inf") or (args.requests is None and args.seconds == 0):
        raise UserError("--seconds must be above 0, or 0 with --requests, which then ends a point")
    if args.processes < 1:
        raise UserError(f"--processes must be at least 1, found {args.processes}")
    base = SamplingParams(temperature=args.temperature, ignore_eos=args.ignore_eos)
    lengths = tuple(_numbers("--max-new-tokens", args.max_new_tokens, int))
    prompts = tuple(_given(prompt, args.chat) for name in args.set for prompt in prompt_set(name, args.limit))
    methods = parse_methods(args.methods, base)
    ends = {"requests": args.requests, "seconds": args.seconds or None}
    points: list[tuple[int | None, float | None]]
    points = [(n, None) for n in clients] if rates is None else [(None, rate) for rate in rates]
    return [
        (name, Load(prompts, params, lengths, args.seed, concurrency, rate, **ends))
        for concurrency, rate in points
        for name, params in methods.items()
    ]


# ---------------------------------------------------------------- processes

_barrier: multiprocessing.synchronize.Barrier | None = None  # of a process of the pool


def _join(barrier: multiprocessing.synchronize.Barrier) -> None:
    global _barrier
    _barrier = barrier


def _share(endpoint: Endpoint, load: Load, share: int, shares: int) -> Part:
    """One process's share of a point; the processes begin together."""
    assert _barrier is not None
    try:
        return asyncio.run(load_driver.measure(endpoint, load, share, shares, _barrier.wait))
    except BaseException:
        _barrier.abort()  # else the others would wait for this one
        raise


class Measure(Protocol):
    """Measures one point."""

    def __call__(self, load: Load) -> list[Part]:
        """What each process measured."""
        ...


@contextlib.contextmanager
def measuring(endpoint: Endpoint, processes: int) -> Iterator[Measure]:
    """What measures points with so many processes, which live as long as the context."""
    if processes == 1:
        yield lambda load: [asyncio.run(load_driver.measure(endpoint, load))]
        return
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    with concurrent.futures.ProcessPoolExecutor(processes, context, _join, (barrier,)) as pool:

        def measure(load: Load) -> list[Part]:
            running = [pool.submit(_share, endpoint, load, share, processes) for share in range(processes)]
            errors = [error for future in running if (error := future.exception()) is not None]
            for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
                raise error  # the one that broke it
            return [future.result() for future in running]

        yield measure


# ---------------------------------------------------------------- the program


async def ask(endpoint: Endpoint) -> Info:
    """What the server has loaded."""
    async with AsyncClient.to(endpoint, timeout=60) as client:
        return await client.info()


def record_of(args: argparse.Namespace, info: Info) -> dict[str, Any]:
    """What `--json` writes beside the points."""
    server = info.server
    return {
        "settings": {key: str(value) for key, value in vars(args).items()},
        "device": server.device,
        "jax": server.jax_version,
        "version": server.version,
        "dtype": info.model.dtype,
        "model": info.model.model,
        "draft_model": info.model.draft_model,
        "server": {"slots": server.slots, "pages": server.pages, "max_model_len": info.model.max_model_len},
        "points": [],
    }


def caption(record: dict[str, Any]) -> str:
    """What the figures are of, in one line."""
    drafter = record["draft_model"]
    model = record["model"] + (f" + {drafter}" if drafter not in ("", record["model"]) else "")
    return f"{model}, {record['dtype']}, {record['device']}, jax {record['jax']}, {record['server']['slots']} slots"


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints and writes `--json` point by point, so that a run cut short leaves what it has; returns that."""
    points, endpoint = plan(args), connection.endpoint_of(args)
    record = record_of(args, asyncio.run(ask(endpoint)))
    print(caption(record))
    print(line(HEADER), flush=True)
    rows: list[dict[str, Any]] = record["points"]
    with measuring(endpoint, args.processes) as measure:
        for name, load in points:
            rows.append(summarise(name, load, measure(load)))
            print(line(cells(rows[-1])), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(record) + "\n", encoding="utf-8")
    for remark in remarks(rows):
        print(remark)
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the load; returns the exit status, as `serve.client`'s."""
    args = build_parser().parse_args(argv)
    try:
        if args.plot is not None:
            check_matplotlib("--plot")
        record = run(args)
        if args.plot is not None:
            figure = serving_load(record["points"], title=f"A server under load: {caption(record)}")
            figure.savefig(args.plot, metadata={"Date": None})
    except (UserError, grpc.RpcError) as error:
        return connection.report(error, args.address)
    except WarmUpFailed as error:
        print(f"error: the warm-up failed with {error}", file=sys.stderr)
        return 2 if str(error).startswith("INVALID_ARGUMENT") else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

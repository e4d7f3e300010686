"""`python -m serve.client PROMPT`: asks a server and prints the text as it comes; the figures follow on stderr."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import grpc

from dflash_jax.errors import UserError
from dflash_jax.request import METHODS, SamplingParams
from serve import connection, messages
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.transport import COMPRESSIONS, client_options


def build_parser() -> argparse.ArgumentParser:
    """The flags; those of sampling are `dflash_jax.generate`'s."""
    parser = argparse.ArgumentParser(prog="python -m serve.client", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="text, as the user's turn of a conversation")
    connection.add_flags(parser)
    parser.add_argument("--timeout", type=float, help="seconds until the call is given up (default: never)")
    parser.add_argument("--info", action="store_true", help="say what the server has loaded and how it is doing")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, default=True, help="use the chat template")
    parser.add_argument("--system", help="text of the system turn")
    parser.add_argument("--method", default="auto", choices=METHODS)
    parser.add_argument("--max-new-tokens", type=int, default=SamplingParams().max_new_tokens)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="ends the text; repeatable")
    return parser


def _input(args: argparse.Namespace) -> pb.Input:
    if not args.chat:
        if args.system is not None:
            raise UserError("--system needs --chat")
        return pb.Input(text=args.prompt)
    turns = [("system", args.system)] if args.system is not None else []
    turns += [("user", args.prompt)]
    return pb.Input(chat=pb.Chat(messages=[pb.Message(role=role, content=text) for role, text in turns]))


def _channel(to: connection.Endpoint) -> grpc.Channel:
    credentials = to.credentials()
    how: dict[str, Any] = {"options": client_options(), "compression": COMPRESSIONS[to.compression]}
    if credentials is None:
        return grpc.insecure_channel(to.address, **how)
    return grpc.secure_channel(to.address, credentials, **how)


def _ask(stub: pb_grpc.DFlashStub, args: argparse.Namespace, how: dict[str, Any]) -> None:
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=tuple(args.stop),
        method=args.method,
    )
    request = pb.GenerateRequest(input=_input(args), params=messages.sampling_message(params))
    usage = pb.Usage()
    for part in stub.Generate(request, **how):
        print(part.text, end="", flush=True)
        usage = part.finished.usage
    print(flush=True)
    figures = f"{usage.completion_tokens} tokens in {usage.rounds} rounds | τ {usage.mean_accepted_length:.2f}"
    seconds = f"prefill {usage.prefill_seconds:.2f} s, decode {usage.decode_seconds:.2f} s"
    print(f"{figures} | {usage.method} | {seconds}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the client.

    Returns:
      Exit status: 2 where what the user gave is wrong, 1 where the server or the way to it is.
    """
    args = build_parser().parse_args(argv)
    try:
        if not args.info and args.prompt is None:
            raise UserError("give a prompt, or --info")
        to = connection.endpoint_of(args)
        how = {"timeout": args.timeout, "metadata": connection.bearer(to.token())}
        with _channel(to) as channel:
            stub = pb_grpc.DFlashStub(channel)
            if args.info:
                print(stub.GetModelInfo(pb.GetModelInfoRequest(), **how), end="")
                print(stub.GetServerInfo(pb.GetServerInfoRequest(), **how), end="")
            else:
                _ask(stub, args, how)
    except (UserError, grpc.RpcError) as error:
        return connection.report(error, args.address)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

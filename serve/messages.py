"""Between the protocol's messages and the library's types. What the library refuses is a `UserError` here too."""

import dataclasses
from typing import Any

from dflash_jax.engine import Engine
from dflash_jax.errors import UserError
from dflash_jax.request import METHODS, Chunk, Completion, SamplingParams, TokenLogprob
from serve.proto import dflash_pb2 as pb

# Host work a token grows with these.
MAX_STOPS = 64
MAX_LOGIT_BIASES = 1024

_METHODS = {pb.METHOD_UNSPECIFIED: "auto"} | {pb.Method.Value(f"METHOD_{name.upper()}"): name for name in METHODS}
_DRAFT_SAMPLING = {
    pb.DRAFT_SAMPLING_UNSPECIFIED: "greedy",
    pb.DRAFT_SAMPLING_GREEDY: "greedy",
    pb.DRAFT_SAMPLING_PROBABILISTIC: "probabilistic",
}
_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class FieldError(UserError):
    """A field of a message that cannot be served.

    Attributes:
      field: its path in a request, such as "input.text".
    """

    def __init__(self, message: str, field: str):
        """See `UserError`."""
        super().__init__(message)
        self.field = field


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """The parameters of a request; a field that is not set has the library's default.

    Raises:
      UserError: a value that no request can have.
    """
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    check_host_work(len(message.stop), len(message.logit_bias))
    # An enum of proto3 admits numbers that have no name.
    for name, known in (("method", _METHODS), ("draft_sampling", _DRAFT_SAMPLING)):
        number = getattr(message, name)
        if number not in known:
            raise UserError(f"--{name.replace('_', '-')} has no value number {number}")
        values[name] = known[number]
    values["stop"] = tuple(message.stop)
    values["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    return SamplingParams(**values)


def check_host_work(stops: int, biases: int) -> None:
    """Refuses more stop strings or logit biases than a server looks at for each token.

    Raises:
      UserError: too many.
    """
    if stops > MAX_STOPS:
        raise UserError(f"--stop takes at most {MAX_STOPS} strings, found {stops}")
    if biases > MAX_LOGIT_BIASES:
        raise UserError(f"--logit-bias takes at most {MAX_LOGIT_BIASES} tokens, found {biases}")


def check_served(engine: Engine, params: SamplingParams) -> None:
    """Refuses what a server takes no part in: each size is a program of its own, and all wait while it is compiled.

    Raises:
      UserError: a block that is not the drafter's own, a tree or chain that is not of 2^k - 1 nodes, or a method that
        the engine cannot serve.
    """
    method = engine.method_of(params)
    for of, name, number in (("ddtree", "--tree-budget", params.tree_budget), ("mtp", "--mtp-steps", params.mtp_steps)):
        if method == of and number != "auto" and number & (number + 1):
            raise UserError(f"{name} of a server is 1, 3, 7, 15 and so on (2^k - 1), found {number}")
    own = None if engine.drafter is None else engine.drafter.config.block_size
    if params.block_size not in (None, own):
        raise UserError(f"--block-size of a server is the drafter's own; leave it out, found {params.block_size}")


def warm_up_params(engine: Engine, *, everything: bool) -> list[SamplingParams]:
    """Requests that make a server compile what later ones need.

    Args:
      engine: to be served.
      everything: all methods, ways to sample and log-probabilities, fixed tree budgets aside; else the default method,
        greedy and sampled, without penalties and log-probabilities.
    """
    base = SamplingParams(max_new_tokens=2, ignore_eos=True)
    levels = [base, dataclasses.replace(base, temperature=1.0), dataclasses.replace(base, temperature=1.0, top_p=0.9)]
    if not everything:
        return levels
    levels.append(dataclasses.replace(levels[-1], presence_penalty=0.5))
    levels += [dataclasses.replace(level, logprobs=0) for level in levels]
    ways: list[dict[str, Any]] = [{"method": "ar"}]
    if engine.drafter is not None:
        probabilistic = {"method": "dflash", "draft_sampling": "probabilistic"}
        ways += [{"method": "ddtree"}, {"method": "dflash"}, probabilistic]
    if engine.mtp is not None:  # a state of its own
        ways.append({"method": "mtp"})
    return [dataclasses.replace(level, **way) for way in ways for level in levels]


def sampling_message(params: SamplingParams) -> pb.SamplingParams:
    """The message that `sampling_params` reads as `params`."""
    values: dict[str, Any] = dict(dataclasses.asdict(params))
    values["method"] = pb.Method.Value(f"METHOD_{params.method.upper()}")
    values["draft_sampling"] = pb.DraftSampling.Value(f"DRAFT_SAMPLING_{params.draft_sampling.upper()}")
    if params.tree_budget == "auto":
        del values["tree_budget"]
    bias: dict[int, float] = {}
    for token, value in params.logit_bias:  # one named twice counts twice
        bias[token] = bias.get(token, 0.0) + value
    values["logit_bias"] = bias
    return pb.SamplingParams(**values)


def input_ids(engine: Engine, message: pb.Input) -> list[int]:
    """Token ids of an input.

    Raises:
      FieldError: nothing in it, a conversation that the chat template refuses, or ids that the model does not have.
    """
    kind = message.WhichOneof("kind")
    if kind is None:
        raise FieldError("input must have text, chat or tokens; found none of them", "input")
    if kind == "chat" and not message.chat.messages:
        raise FieldError("input.chat has no messages; give at least one", "input.chat.messages")
    try:
        if kind == "chat":
            thinking = message.chat.thinking if message.chat.HasField("thinking") else None
            turns = [{"role": turn.role, "content": turn.content} for turn in message.chat.messages]
            return engine.encode(engine.encode_chat(turns, enable_thinking=thinking))
        return engine.encode(message.text if kind == "text" else list(message.tokens.ids))
    except UserError as error:
        where = {"chat": "input.chat", "text": "input.text", "tokens": "input.tokens.ids"}
        raise FieldError(error.public, where[kind]) from error


def response(chunk: Chunk) -> pb.GenerateResponse:
    """One message of a stream."""
    message = pb.GenerateResponse(
        text=chunk.text, token_ids=chunk.token_ids, logprobs=[_logprob(entry) for entry in chunk.logprobs]
    )
    if chunk.completion is not None:
        message.finished.CopyFrom(_finished(chunk.completion))
    return message


def _logprob(entry: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TokenLogprob.Alternative(token_id=token, logprob=value) for token, value in entry.top]
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)


def _finished(done: Completion) -> pb.Finished:
    usage = pb.Usage(**{field.name: getattr(done, field.name) for field in pb.Usage.DESCRIPTOR.fields})
    message = pb.Finished(reason=_REASONS[done.finish_reason], usage=usage)
    if isinstance(done.stop, str):
        message.stop_string = done.stop
    elif done.stop is not None:
        message.stop_token_id = done.stop
    return message

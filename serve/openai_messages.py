"""From OpenAI's JSON to the library's types. What is not served is an error, not left out in silence."""

import json
import re
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from dflash_jax.engine import Engine
from dflash_jax.errors import UserError
from dflash_jax.flights import Request
from dflash_jax.request import DraftSampling, Method, SamplingParams
from serve import messages
from serve.answer_parser import AnswerParser
from serve.chat import open_chat

# Where a parameter has another name here than a flag of the command line has.
_FIELDS = {"max_new_tokens": "max_tokens"}


class _Strict(pydantic.BaseModel):
    """JSON of exactly these fields and types."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


def _is(kind: type) -> pydantic.BeforeValidator:
    """For a Literal of a kind, which would take 0 for false and true for 1."""

    def check(value: Any) -> Any:
        if value is not None and type(value) is not kind:
            raise ValueError(f"Input should be of type {kind.__name__}")
        return value

    return pydantic.BeforeValidator(check)


class StreamOptions(_Strict):
    """Of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding of the chunks: there is none


class _Asked(_Strict):
    """What both kinds of requests have. None is as if left out; `user` to `prompt_cache_key` change nothing."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Annotated[Literal[1] | None, _is(int)] = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Beyond OpenAI's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    method: Method | None = None
    tree_budget: int | Literal["auto"] | None = None
    draft_sampling: DraftSampling | None = None
    mtp_steps: int | None = None

    def _params(self, max_new_tokens: int, logprobs: int | None) -> SamplingParams:
        """OpenAI's defaults where they are not the library's: temperature 1, another seed each time."""
        bias = self.logit_bias or {}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        messages.check_host_work(len(stops), len(bias))
        if wrong := [token for token in bias if not re.fullmatch("[0-9]{1,10}", token)]:
            raise UserError(f"--logit-bias names token {wrong[0][:20]!r}, which is no token id")
        same = (
            "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty", "ignore_eos",
            "method", "tree_budget", "draft_sampling", "mtp_steps",
        )  # fmt: skip
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=secrets.randbits(64) if self.seed is None else self.seed,
            logit_bias=tuple(sorted((int(token), value) for token, value in bias.items())),
            stop=tuple(stops),
            logprobs=logprobs,
            **{name: value for name in same if (value := getattr(self, name)) is not None},
        )


class CompletionAsked(_Asked):
    """Body of POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: Annotated[Literal[False] | None, _is(bool)] = None
    best_of: Annotated[Literal[1] | None, _is(int)] = None
    suffix: Literal[""] | None = None

    def request(self, engine: Engine) -> tuple[Request, AnswerParser | None]:
        """Checked and tokenised, and what reads the answer; None where it is text without parts.

        Raises:
          UserError: what cannot be served.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise UserError(f"--prompt is one a request, found {len(prompt)}")
            prompt = prompt[0]
        params = self._params(16 if self.max_tokens is None else self.max_tokens, self.logprobs)
        messages.check_served(engine, params)
        return engine.request(prompt, params), None


class TextPart(_Strict):
    """A part of a turn."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class _Turn(_Strict):
    """What all turns have."""

    name: str | None = None  # no template has a place for it


class SystemTurn(_Turn):
    """What the model is to keep to."""

    role: Literal["system", "developer"]
    content: Content


class UserTurn(_Turn):
    """A question."""

    role: Literal["user"]
    content: Content


class CalledFunction(_Strict):
    """A function and what it was called with, a JSON object as text."""

    name: str
    arguments: str


class ToolCall(_Strict):
    """A call in a turn of the assistant."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantTurn(_Turn):
    """An answer."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ToolTurn(_Turn):
    """What came of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


Turn = Annotated[SystemTurn | UserTurn | AssistantTurn | ToolTurn, pydantic.Field(discriminator="role")]


def _as_template_has_it(turn: SystemTurn | UserTurn | AssistantTurn | ToolTurn) -> dict[str, Any]:
    """Of one of the four roles that templates know, with its text, and what was thought and called."""
    role = "system" if turn.role == "developer" else turn.role
    text = "".join(part.text for part in turn.content) if isinstance(turn.content, list) else turn.content or ""
    values: dict[str, Any] = {"role": role, "content": text}
    if isinstance(turn, ToolTurn):
        values["tool_call_id"] = turn.tool_call_id
    if isinstance(turn, AssistantTurn):
        if turn.content is None and turn.reasoning_content is None and not turn.tool_calls:
            raise UserError("messages: a turn of the assistant has neither content nor tool_calls")
        if turn.reasoning_content is not None:
            values["reasoning_content"] = turn.reasoning_content
        if turn.tool_calls:
            values["tool_calls"] = [
                {"id": call.id, "type": "function", "function": _called(call.function)} for call in turn.tool_calls
            ]
    return values


def _called(function: CalledFunction) -> dict[str, Any]:
    """With its arguments as an object: some templates print nothing for text."""
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError(f"messages: arguments of a call must be a JSON object, found {function.arguments[:50]!r}")
    return {"name": function.name, "arguments": arguments}


class Function(_Strict):
    """A function that may be called; parameters is the JSON schema of its arguments."""

    name: Annotated[str, pydantic.StringConstraints(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[Literal[False] | None, _is(bool)] = None  # arguments are not forced into the schema


class Tool(_Strict):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Strict):
    """By its name."""

    name: str


class NamedTool(_Strict):
    """A tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class TemplateArguments(_Strict):
    """Of the chat template."""

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None


class ResponseFormat(_Strict):
    """Only text."""

    type: Literal["text"]


class ChatAsked(_Asked):
    """Body of POST /v1/chat/completions."""

    messages: list[Turn]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Annotated[Literal[True] | None, _is(bool)] = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateArguments | None = None

    def _tools(self) -> list[dict[str, Any]]:
        """That may be called, as they were given."""
        if self.tool_choice not in (None, "none", "auto"):
            named = self.tool_choice if isinstance(self.tool_choice, str) else "a function by name"
            words = "calls cannot be forced here, use 'auto' or 'none'"
            raise UserError(f"tool_choice: {words}, found {named}")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise UserError("tools: two have the same name")
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) for tool in tools]

    def request(self, engine: Engine) -> tuple[Request, AnswerParser | None]:
        """See `CompletionAsked.request`."""
        if not self.messages:
            raise UserError("messages: give at least one")
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("top_logprobs needs logprobs: true")
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        params = self._params(
            min(limits, default=engine.max_model_len), (self.top_logprobs or 0) if self.logprobs else None
        )
        messages.check_served(engine, params)
        arguments = {} if self.chat_template_kwargs is None else self.chat_template_kwargs.model_dump(exclude_none=True)
        thinking = arguments.pop("enable_thinking", None)
        turns, tools = [_as_template_has_it(turn) for turn in self.messages], self._tools()
        prompt, parser = open_chat(
            engine.tokenizer, turns, tools=tools, enable_thinking=thinking, template_arguments=arguments
        )
        return engine.request(prompt, params), parser


def read[Asked: _Asked](kind: type[Asked], body: bytes) -> Asked:
    """A request's body.

    Raises:
      UserError: it is not what the kind has; the message begins with the field.
    """
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])[:100]
        raise UserError(f"{field or 'body'}: {first['msg']}") from None


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape. A message of the library that names a flag names the field of that name."""

    def field(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        return _FIELDS.get(name, name)

    message = re.sub(r"(?<![\w-])--([a-z][a-z-]*)", field, message)
    named = re.match(r"(\w+)(?: |:|\.)", message) if kind == "invalid_request_error" else None
    known = {*CompletionAsked.model_fields, *ChatAsked.model_fields}
    param = named[1] if named is not None and named[1] in known else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_name(engine: Engine) -> str:
    """What a request calls the model: its name, or its folder's."""
    name = engine.names[0]
    return Path(name).resolve().name if Path(name).is_dir() else name

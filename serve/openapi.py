"""The HTTP protocol as an OpenAPI document: what is asked, what is answered, and every status."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic.json_schema import models_json_schema

import dflash_jax
from dflash_jax.request import LARGEST, MAX_LOGPROBS, MAX_MTP_STEPS, MAX_TREE_BUDGET, MIN_TEMPERATURE
from serve.messages import MAX_LOGIT_BIASES, MAX_STOPS
from serve.openai_messages import ChatAsked, CompletionAsked, ToolCall


class _Answer(pydantic.BaseModel):
    """JSON of exactly these fields."""

    model_config = pydantic.ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    """What is wrong, on one line, and the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Answer):
    """Any answer whose status is 400 or more."""

    error: ErrorDetail


class CachedTokens(_Answer):
    """Beginning of the prompt that had been kept."""

    cached_tokens: int


class Usage(_Answer):
    """Counts, and what decoding came to."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    method: str
    rounds: int
    mean_accepted_length: float


class CompletionLogprobs(_Answer):
    """One entry a token each."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TokenEntry(_Answer):
    """A token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenEntry):
    """With the likeliest ones in its place."""

    top_logprobs: list[TokenEntry]


class ChatLogprobs(_Answer):
    """One entry a token."""

    content: list[ChosenToken]
    refusal: None


class CompletionChoice(_Answer):
    """The text, or what a chunk adds to it."""

    index: Literal[0]
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Message(_Answer):
    """The assistant's turn; content is null where there are only calls or thoughts."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ToolCallDelta(ToolCall):
    """A call, whole."""

    index: int


class Delta(_Answer):
    """What a chunk adds to the turn."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChoice(_Answer):
    """The turn."""

    index: Literal[0]
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatDelta(_Answer):
    """A piece of the turn."""

    index: Literal[0]
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class _Envelope(_Answer):
    id: str
    created: int
    model: str


class Completion(_Envelope):
    """A text."""

    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChoice], pydantic.Field(min_length=1, max_length=1)]
    usage: Usage


class CompletionChunk(_Envelope):
    """An event of a streamed text; the last, if usage was asked for, has no choice."""

    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChoice], pydantic.Field(max_length=1)]
    usage: Usage | None = None


class ChatCompletion(_Envelope):
    """An answer in a conversation."""

    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], pydantic.Field(min_length=1, max_length=1)]
    usage: Usage


class ChatChunk(_Envelope):
    """An event of a streamed answer; the last, if usage was asked for, has no choice."""

    object: Literal["chat.completion.chunk"]
    choices: Annotated[list[ChatDelta], pydantic.Field(max_length=1)]
    usage: Usage | None = None


class Model(_Answer):
    """The model; its longest prompt and text, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(_Answer):
    """All of them: one."""

    object: Literal["list"]
    data: list[Model]


ASKED = (CompletionAsked, ChatAsked)
ANSWERED = (Error, Completion, CompletionChunk, ChatCompletion, ChatChunk, Model, Models)
_STATUSES = {
    "400": "It cannot be served, or is no JSON of this kind; `param` names the field.",
    "401": "No token that the server knows.",
    "404": "Another model.",
    "413": "The body is longer than the server reads.",
    "429": "The line is full; `Retry-After` says when to try again.",
    "500": "The engine failed.",
    "503": "The server is shutting down, or its engine is lost.",
}


# What `SamplingParams` and the server refuse, as far as it is about one field.
_SAMPLED = {"type": "number", "minimum": MIN_TEMPERATURE, "maximum": LARGEST}
_TEMPERATURE = {"anyOf": [{"const": 0}, _SAMPLED, {"type": "null"}]}
_BIAS = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
_BIASED = {"propertyNames": {"pattern": "^[0-9]{1,10}$"}, "additionalProperties": _BIAS}
_LIMITS: dict[str, dict[str, Any]] = {
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "top_k": {"minimum": 0, "maximum": (1 << 31) - 1},
    "top_p": {"minimum": 1 / LARGEST, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -LARGEST, "maximum": LARGEST},
    "frequency_penalty": {"minimum": -LARGEST, "maximum": LARGEST},
    "repetition_penalty": {"minimum": 1 / LARGEST, "maximum": LARGEST},
    "seed": {"minimum": 0, "maximum": (1 << 64) - 1},
    "tree_budget": {"enum": [(1 << k) - 1 for k in range(1, MAX_TREE_BUDGET.bit_length() + 1)]},
    "mtp_steps": {"enum": [(1 << k) - 1 for k in range(1, MAX_MTP_STEPS.bit_length() + 1)]},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "logit_bias": {"maxProperties": MAX_LOGIT_BIASES} | _BIASED,
    "messages": {"minItems": 1},
}
_LEAST: dict[str, dict[str, Any]] = {
    "stop": {"string": {"minLength": 1}, "array": {"maxItems": MAX_STOPS, "items": {"type": "string", "minLength": 1}}},
    "prompt": {"string": {"minLength": 1}, "array": {"minItems": 1}},
}


def _limit(schemas: dict[str, Any], asked: str) -> None:
    """Writes them into the schema of a body."""
    for name, field in schemas[asked]["properties"].items():
        for kind in field.get("anyOf", [field]):
            if kind.get("type") in ("integer", "number", "object", "array"):
                kind |= _LIMITS.get(name, {})
            kind |= _LEAST.get(name, {}).get(kind.get("type"), {})
            if name == "prompt" and kind.get("items", {}).get("type") in ("string", "array"):
                kind["maxItems"] = 1  # one a request
    schemas[asked]["properties"]["temperature"] = _TEMPERATURE


def _of(model: type[pydantic.BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _content(words: str, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": words, "content": {kind: {"schema": schema}}}


def document(model: str, methods: Sequence[str], guarded: bool) -> dict[str, Any]:
    """The document of a server.

    Args:
      model: that requests name.
      methods: to decode, that requests may ask for.
      guarded: whether calls need a token, /health aside.
    """

    def errors(*statuses: str) -> dict[str, Any]:
        kept = [status for status in statuses if guarded or status != "401"]
        answers = {status: _content(_STATUSES[status], "application/json", _of(Error)) for status in kept}
        if "401" in answers:
            answers["401"]["headers"] = {"WWW-Authenticate": {"schema": {"const": "Bearer"}}}
        if "429" in answers:
            answers["429"]["headers"] = {"Retry-After": {"schema": {"type": "string"}}}
        return answers

    def post(name: str, asked: Any, whole: Any, chunk: Any) -> dict[str, Any]:
        ok = _content("The whole text, or with `stream` its pieces as they come.", "application/json", _of(whole))
        words = "JSON of a chunk, or of an error that ends the stream; at last [DONE]."
        kinds = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [_of(chunk), _of(Error)]}}
        data = {"type": "string", "description": words} | kinds
        event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        ok["content"]["text/event-stream"] = {"schema": event}
        body = {"required": True, "content": {"application/json": {"schema": _of(asked)}}}
        answers = {"200": ok} | errors("400", "401", "404", "413", "429", "500", "503")
        return {"post": {"operationId": name, "requestBody": body, "responses": answers}}

    def get(name: str, ok: dict[str, Any], *statuses: str, **more: Any) -> dict[str, Any]:
        return {"get": {"operationId": name, "responses": {"200": ok} | errors("401", *statuses)} | more}

    path = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
    health: dict[str, Any] = {"200": {"description": "Ready."}, "503": {"description": "Not ready, or not any more."}}
    text = {"type": "string"}
    _, definitions = models_json_schema(
        [*((one, "validation") for one in ASKED), *((one, "serialization") for one in ANSWERED)],
        ref_template="#/components/schemas/{model}",
    )
    schemas = definitions["$defs"]
    for one in ASKED:
        _limit(schemas, one.__name__)
        schemas[one.__name__]["properties"]["model"] = {"const": model}
        schemas[one.__name__]["properties"]["method"] = {"enum": [*methods, None]}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "DFlash-JAX", "version": dflash_jax.__version__, "description": "OpenAI's protocol."},
        "paths": {
            "/v1/completions": post("completions", CompletionAsked, Completion, CompletionChunk),
            "/v1/chat/completions": post("chat_completions", ChatAsked, ChatCompletion, ChatChunk),
            "/v1/models": get("models", _content("The one model.", "application/json", _of(Models))),
            "/v1/models/{model}": get(
                "model", _content("The model.", "application/json", _of(Model)), "404", parameters=[path]
            ),
            "/health": {"get": {"operationId": "health", "responses": health, "security": []}},
            "/metrics": get("metrics", _content("For Prometheus.", "text/plain", text)),
        },
        "components": {"schemas": schemas},
    }
    if guarded:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found

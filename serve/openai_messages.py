"""Between OpenAI's JSON and the library's types. What is not served is an error, not left out in silence."""

import dataclasses
import re
import secrets
from pathlib import Path
from typing import Any, Literal

import pydantic

from dflash_jax.engine import Engine
from dflash_jax.errors import UserError
from dflash_jax.flights import Request
from dflash_jax.request import (
    Chunk,
    Completion,
    DraftSampling,
    Method,
    SamplingParams,
    TokenLogprob,
)
from serve import messages

# Where a parameter has another name here than a flag of the command line has.
_FIELDS = {"max_new_tokens": "max_tokens"}


class _Strict(pydantic.BaseModel):
    """JSON of exactly these fields and types."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


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
    n: Literal[1] | None = None
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
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    def request(self, engine: Engine) -> Request:
        """Checked and tokenised.

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
        return engine.request(prompt, params)


class TextPart(_Strict):
    """A part of a turn."""

    type: Literal["text"]
    text: str


class Turn(_Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None  # no template has a place for it

    def as_template_has_it(self) -> dict[str, str]:
        """Its text, of one of the three roles that templates know."""
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": parts}


class TemplateArguments(_Strict):
    """Of the chat template."""

    enable_thinking: bool | None = None


class ResponseFormat(_Strict):
    """Only text."""

    type: Literal["text"]


class ChatAsked(_Asked):
    """Body of POST /v1/chat/completions."""

    messages: list[Turn]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateArguments | None = None

    def request(self, engine: Engine) -> Request:
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
        thinking = None if self.chat_template_kwargs is None else self.chat_template_kwargs.enable_thinking
        turns = [turn.as_template_has_it() for turn in self.messages]
        return engine.request(engine.encode_chat(turns, enable_thinking=thinking), params)


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


def usage(done: Completion) -> dict[str, Any]:
    """OpenAI's counts, and what decoding came to."""
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        "method": done.method,
        "rounds": done.rounds,
        "mean_accepted_length": done.mean_accepted_length,
    }


@dataclasses.dataclass
class Writer:
    """Writes the answer to one request, whole or in chunks.

    Attributes:
      engine: that answers.
      chat: the kind of request.
      id, created: of the answer; created in seconds since 1970.
      usages: whether a stream's chunks have a usage, null but in one of its own at the end.
      offset: characters of the text before the next token, as far as log-probabilities tell them.
    """

    engine: Engine
    chat: bool
    id: str
    created: int
    usages: bool = False
    offset: int = 0

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = model_name(self.engine)
        return {"id": self.id, "object": kind, "created": self.created, "model": model, "choices": choices}

    def whole(self, done: Completion) -> dict[str, Any]:
        """The answer in one."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": done.finish_reason}
        choice["logprobs"] = None if done.logprobs is None else self._logprobs(done.logprobs)
        if self.chat:
            choice["message"] = {"role": "assistant", "content": done.text, "refusal": None}
        else:
            choice["text"] = done.text
        kind = "chat.completion" if self.chat else "text_completion"
        return self._envelope(kind, [choice]) | {"usage": usage(done)}

    def _piece(self, choices: list[dict[str, Any]], of: Completion | None = None) -> dict[str, Any]:
        piece = self._envelope("chat.completion.chunk" if self.chat else "text_completion", choices)
        return piece | ({"usage": None if of is None else usage(of)} if self.usages else {})

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with: of a chat, whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return [self._piece([choice])] if self.chat else []

    def pieces(self, chunk: Chunk) -> list[dict[str, Any]]:
        """What a chunk adds to a stream; nothing while its text is held back."""
        done = chunk.completion
        if not (chunk.text or chunk.logprobs or done):
            return []
        choice: dict[str, Any] = {"index": 0, "finish_reason": None if done is None else done.finish_reason}
        choice["logprobs"] = self._logprobs(chunk.logprobs) if chunk.logprobs else None
        if self.chat:
            choice["delta"] = {"content": chunk.text} if chunk.text else {}
        else:
            choice["text"] = chunk.text
        return [self._piece([choice]), *([self._piece([], done)] if self.usages and done is not None else [])]

    def _token(self, token: int) -> tuple[str, list[int]]:
        raw = self.engine.tokenizer.token_bytes(token)
        return raw.decode("utf-8", errors="replace"), list(raw)

    def _logprobs(self, entries: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any]:
        if self.chat:
            content = []
            for entry in entries:
                top = [self._entry(token, value) for token, value in entry.top]
                content.append(self._entry(entry.token_id, entry.logprob) | {"top_logprobs": top})
            return {"content": content, "refusal": None}
        tokens = [self._token(entry.token_id)[0] for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._token(token)[0]: value for token, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._token(token)
        return {"token": text, "logprob": logprob, "bytes": raw}

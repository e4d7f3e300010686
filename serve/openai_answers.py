"""From the library's results to OpenAI's JSON."""

import dataclasses
import uuid
from typing import Any

from dflash_jax.engine import Engine
from dflash_jax.request import Chunk, Completion, TokenLogprob
from serve.answer_parser import AnswerParser, Call
from serve.openai_messages import model_name


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
      parser: of the answer, if it has parts; no character has been given to it.
      usages: whether a stream's chunks have a usage, null but in one of its own at the end.
      offset: characters of the text before the next token, as far as log-probabilities tell them.
      calls: tools called so far.
    """

    engine: Engine
    chat: bool
    id: str
    created: int
    parser: AnswerParser | None = None
    usages: bool = False
    offset: int = 0
    calls: int = 0

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = model_name(self.engine)
        return {"id": self.id, "object": kind, "created": self.created, "model": model, "choices": choices}

    def whole(self, done: Completion) -> dict[str, Any]:
        """The answer in one."""
        choice: dict[str, Any] = {"index": 0}
        choice["logprobs"] = None if done.logprobs is None else self._logprobs(done.logprobs)
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
            for part in self._deltas(done.text, last=True):
                for key, value in part.items():
                    if isinstance(value, list):
                        message.setdefault(key, []).extend(value)
                    else:
                        message[key] = message.get(key, "") + value
            for number, call in enumerate(message.get("tool_calls", [])):
                assert call.pop("index") == number  # of a delta only
            if "tool_calls" in message or "reasoning_content" in message:
                message["content"] = message["content"] or None
            choice["message"] = message
        else:
            choice["text"] = done.text
        choice["finish_reason"] = self._reason(done)
        kind = "chat.completion" if self.chat else "text_completion"
        return self._envelope(kind, [choice]) | {"usage": usage(done)}

    def _reason(self, done: Completion) -> str:
        """Why it ended. A text that was cut off has not been ended by its calls."""
        return "tool_calls" if self.calls and done.finish_reason == "stop" else done.finish_reason

    def _deltas(self, text: str, last: bool) -> list[dict[str, Any]]:
        """What a text adds to a chat's message, in order."""
        if self.parser is None:
            return [{"content": text}] if text else []
        deltas: list[dict[str, Any]] = []
        for part in [*self.parser.feed(text), *(self.parser.end() if last else [])]:
            if isinstance(part, Call):
                function = {"name": part.name, "arguments": part.arguments}
                call = {"index": self.calls, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
                deltas.append({"tool_calls": [call]})
                self.calls += 1
            else:
                deltas.append({"reasoning_content" if part.thought else "content": part.text})
        return deltas

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
        if self.chat:
            contents: list[dict[str, Any]] = [{"delta": d} for d in self._deltas(chunk.text, last=done is not None)]
        else:
            contents = [{"text": chunk.text}]
        if not contents and (chunk.logprobs or done):
            contents = [{"delta": {}}]
        empty: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
        choices = [empty | content for content in contents]
        if chunk.logprobs:
            choices[0]["logprobs"] = self._logprobs(chunk.logprobs)
        if done is not None:
            choices[-1]["finish_reason"] = self._reason(done)
        usages = [self._piece([], done)] if self.usages and done is not None else []
        return [self._piece([choice]) for choice in choices] + usages

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

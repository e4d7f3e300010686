"""Where the command line's prompts come from, and how they become token ids.

A prompt file is one of three, told apart by its name:

- any text file: one prompt a line, empty lines skipped;
- `.jsonl`: one object a line;
- `.json`: an array of such objects.

An object has exactly one of `prompt` (user text: the chat template applies as for --prompt), `text` (plain text to
continue, never templated) and `messages` (a conversation, always templated); other keys are left alone.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dflash_jax.errors import UserError

if TYPE_CHECKING:
    from dflash_jax.engine import Engine

STDIN = "-"
Kind = Literal["prompt", "text", "messages"]
_KINDS: tuple[Kind, ...] = ("prompt", "text", "messages")


@dataclasses.dataclass(frozen=True)
class PromptText:
    """A prompt as the user gave it.

    Attributes:
      kind: "prompt" (user text), "text" (plain text to continue) or "messages" (a conversation).
      content: the text, or the list of messages.
      source: what to name in an error: a flag, or a file and line.
    """

    kind: Kind
    content: Any
    source: str

    @property
    def title(self) -> str:
        """One line of text that tells this prompt from others."""
        if self.kind == "messages":
            texts = [m.get("content") for m in self.content if m.get("role") == "user"]
            return " ".join(str(texts[-1] if texts else self.content[-1].get("content")).split())
        return " ".join(self.content.split())


def _prompt(kind: Kind, content: Any, source: str) -> PromptText:
    """Checks one prompt; `UserError` names its source."""
    if kind == "messages":
        if not isinstance(content, list) or not content:
            raise UserError(f"{source}: 'messages' must be a list with at least one message")
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in content):
            raise UserError(f"{source}: every entry of 'messages' must be an object with 'role' and 'content'")
    elif not isinstance(content, str):
        raise UserError(f"{source}: {kind!r} must be a string, found {type(content).__name__}")
    elif not content.strip():
        raise UserError(f"{source} is empty; give some text")
    return PromptText(kind, content, source)


def _from_object(value: Any, source: str) -> PromptText:
    kinds = [kind for kind in _KINDS if isinstance(value, dict) and kind in value]
    if len(kinds) != 1:
        raise UserError(f"{source}: expected an object with one of 'prompt', 'text' and 'messages'")
    return _prompt(kinds[0], value[kinds[0]], source)


def _stdin(flag: str) -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise UserError(f"{flag} -: standard input is not UTF-8 text") from None


def _parse(line: str, source: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{source}: not valid JSON ({error})") from None


def read_prompt_file(name: str) -> list[PromptText]:
    """The prompts of a file, or of standard input (one a line) for "-".

    Raises:
      UserError: one line that names the file and, where there is one, the line.
    """
    if name == STDIN:
        text = _stdin("--prompt-file")
    else:
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise UserError(f"--prompt-file {name}: not UTF-8 text") from None
        except OSError as error:
            raise UserError(f"--prompt-file {name}: cannot be read ({error.strerror})") from None
    suffix = Path(name).suffix.lower()
    lines = [(f"{name}:{i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if suffix == ".json":
        values = _parse(text, name)
        if not isinstance(values, list):
            raise UserError(f"{name}: expected an array of prompts, found {type(values).__name__}")
        prompts = [_from_object(value, f"{name}[{i}]") for i, value in enumerate(values)]
    elif suffix == ".jsonl":
        prompts = [_from_object(_parse(line, source), source) for source, line in lines]
    else:
        prompts = [_prompt("prompt", line.rstrip("\r"), source) for source, line in lines]
    if not prompts:
        raise UserError(f"--prompt-file {name}: no prompts in it")
    return prompts


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> list[PromptText]:
    """All prompts of a command line: those of --prompt ("-" is the whole of standard input), then those of files.

    Raises:
      UserError: there is none, or one is empty or unreadable.
    """
    prompts = []
    for text in texts:
        if text == STDIN:
            # The line end that `echo` adds is not part of the prompt.
            prompts.append(_prompt("prompt", _stdin("--prompt").removesuffix("\n"), "--prompt -"))
        else:
            prompts.append(_prompt("prompt", text, "--prompt"))
    for name in files:
        prompts += read_prompt_file(name)
    if not prompts:
        raise UserError("no prompt; give --prompt TEXT, --prompt-file FILE, or - for standard input")
    return prompts


def encode_prompt(
    engine: "Engine", prompt: PromptText, *, chat: bool | None, system: str | None, thinking: bool | None
) -> list[int]:
    """Token ids of a prompt, through the model's chat template where that applies.

    Args:
      engine: the model that reads it.
      prompt: what to encode.
      chat: template user text or not; None does so where the model has a chat template.
      system: a system message for the conversation.
      thinking: passed to the template; None leaves its own default.

    Raises:
      UserError: the prompt does not fit the model, or --system or --thinking have no conversation to apply to.
    """
    if prompt.kind == "messages":
        templated = True
    elif prompt.kind == "text":
        templated = False
    else:
        templated = engine.tokenizer.has_chat_template if chat is None else chat
    if not templated:
        for flag, given in (("--system", system is not None), ("--thinking/--no-thinking", thinking is not None)):
            if given:
                raise UserError(f"{flag} needs a conversation, but {prompt.source} is read as plain text; use --chat")
        return engine.encode(prompt.content)
    messages = prompt.content if prompt.kind == "messages" else [{"role": "user", "content": prompt.content}]
    if system is not None:
        if messages[0]["role"] == "system":
            raise UserError(f"--system: {prompt.source} has a system message already; leave one of them out")
        messages = [{"role": "system", "content": system}, *messages]
    return engine.encode(engine.encode_chat(messages, enable_thinking=thinking))

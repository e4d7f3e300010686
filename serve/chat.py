"""A conversation as the model's chat template has it, and how to read the answer: the template's text says both."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.tokenizer import Tokenizer, template_variables
from serve.answer_parser import CALL, THINK, THOUGHT, AnswerParser


@functools.lru_cache(maxsize=8)
def _takes_tools(source: str) -> bool:
    return "tools" in template_variables(source)


def open_chat(
    tokenizer: Tokenizer,
    turns: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    enable_thinking: bool | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> tuple[list[int], AnswerParser | None]:
    """Renders a conversation up to the assistant's turn.

    Args:
      tokenizer: of the model.
      turns: as `Tokenizer.apply_chat_template` takes them; arguments of tool calls are objects.
      tools: in OpenAI's form, each {"type": "function", "function": {"name": …, "parameters": …}}.
      enable_thinking, template_arguments: see `Tokenizer.apply_chat_template`.

    Returns:
      The prompt's token ids, and what reads the answer; None where it is text without parts.

    Raises:
      UserError: the template refuses the conversation, or has no place for tools or what came of them.
    """
    source = tokenizer.chat_template_source(tools=bool(tools))
    called = any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)
    for given, field in ((bool(tools), "tools"), (called, "messages")):
        if given and not _takes_tools(source):
            raise UserError(f"{field}: the model's chat template has no place for tools and their calls")
    text = tokenizer.apply_chat_template(
        turns, enable_thinking=enable_thinking, tools=tools or None, template_arguments=template_arguments
    )
    if tools and CALL not in source:
        raise UserError(f"tools: the model's chat template has no {CALL}, the one form of calls that is read here")
    ids = tokenizer.encode(text, add_special_tokens=False)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    thoughts = THINK in source and THOUGHT in source
    if not (thoughts or tools):
        return ids, None
    thinking = thoughts and text.rstrip().endswith(THINK)
    return ids, AnswerParser(thoughts=thoughts, thinking=thinking, tools=schemas if tools else None)

"""What a chat model's answer is made of: thoughts, text and tool calls, found while it streams.

A thought is what stands between <think> and </think>, the first of which may be in the prompt already. A tool call is
<tool_call>…</tool_call> around one of two forms, told apart by how they begin: {"name": …, "arguments": {…}}, which
Qwen3 writes, or <function=NAME><parameter=NAME>text</parameter>…</function>, which Qwen3.5 and 3.6 write. What looks
like a call and is none (no such tool, broken JSON, a tag that is missing, one of the two <tool_call> tags inside an
argument) stays text as it is: nothing that a model wrote is lost. A call inside a thought counts, since models that
have not closed their thought before a call are common; the thought goes on after it.

A character is searched for tags a few times at most, whatever the tags around it are.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_FUNCTION_END = re.compile(r"</function>\s*")
_TAG = re.compile(f"{CALL}|{CALLED}")
_PIECE = 4096  # characters taken at once: behind each tag what is left of them is copied


@dataclasses.dataclass(frozen=True)
class Words:
    """Text of the answer, or of the thought before it."""

    text: str
    thought: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool to be called; its arguments are a JSON object."""

    name: str
    arguments: str


class AnswerParser:
    """Reads one answer. What `feed` and at last `end` return is the same for every way to cut the text into pieces."""

    def __init__(self, *, thoughts: bool, thinking: bool, tools: Mapping[str, Mapping[str, Any]] | None):
        """Before the first character.

        Args:
          thoughts: whether <think> and </think> are tags; else they are text.
          thinking: whether the prompt has opened a thought.
          tools: name -> JSON schema of the arguments, of the tools that may be called; None for no calls at all.
        """
        self._thoughts, self._thinking, self._tools = thoughts, thinking, tools
        self._held = ""  # not understood yet
        self._in_call = False  # it stands after a CALL
        self._searched = 0  # characters of it, in a call, in which no tag begins
        self._fresh = True  # only white space so far, so that a thought may begin
        # White space is held back, to be left out beside a tag: before the last tag, and after it.
        self._before, self._space, self._tagged = "", "", thinking
        self._said = False  # something, since the thought or the text began

    def feed(self, text: str) -> list[Words | Call]:
        """Takes the next characters; returns what is certain."""
        pieces: list[Words | Call] = []
        for begin in range(0, len(text), _PIECE):
            self._held += text[begin : begin + _PIECE]
            while self._step(pieces):
                pass
        return pieces

    def end(self) -> list[Words | Call]:
        """Returns what has been held back."""
        pieces: list[Words | Call] = []
        if self._in_call:  # it was cut off
            self._no_call(pieces)
            while self._step(pieces):
                pass
        self._words(self._held, pieces)
        self._held = ""
        if self._space and not self._tagged:
            pieces.append(Words(self._space, self._thinking))
            self._space = ""
        return pieces

    def _step(self, pieces: list[Words | Call]) -> bool:
        """Takes what is held up to the end of a tag; False if no tag ends in it."""
        if self._in_call:
            return self._step_in_call(pieces)
        tags = [CALL] if self._tools is not None else []
        if self._thoughts:
            tags += [THOUGHT] if self._thinking else []
            tags += [THINK] if self._fresh else []
        found = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
        if not found:
            sure = len(self._held) - _beginning(self._held, tags)
            self._words(self._held[:sure], pieces)
            self._held = self._held[sure:]
            return False
        at, tag = min(found)
        self._words(self._held[:at], pieces)
        self._held = self._held[at + len(tag) :]
        if tag == THINK and not self._fresh:  # text came before it
            self._words(tag, pieces)
            return True
        self._fresh = False
        if tag == CALL:
            self._in_call, self._searched = True, 0
        else:
            self._thinking = tag == THINK
            self._before, self._space, self._tagged, self._said = "", "", True, False
        return True

    def _step_in_call(self, pieces: list[Words | Call]) -> bool:
        head = self._held[:64].lstrip()
        if not (head.startswith(("{", "<function=")) or "<function=".startswith(head)):
            return self._no_call(pieces)
        found = _TAG.search(self._held, self._searched)
        if found is None:
            self._searched = max(0, len(self._held) - len(CALLED))
            return False
        call = self._call(self._held[: found.start()]) if found[0] == CALLED else None
        if call is None:
            return self._no_call(pieces)
        pieces.append(call)
        self._held, self._in_call = self._held[found.end() :], False
        if not self._tagged and self._said:
            self._before = self._space
        self._space, self._tagged = "", True
        return True

    def _no_call(self, pieces: list[Words | Call]) -> bool:
        """The tag was text, and so is what follows it, up to a tag."""
        self._in_call = False
        self._words(CALL, pieces)
        return True

    def _words(self, text: str, pieces: list[Words | Call]) -> None:
        """Says text, without the white space at its end."""
        said = text.rstrip()
        if not said:
            self._space += text
            return
        begin = len(said) - len(said.lstrip())
        space = self._space + said[:begin]
        if self._tagged:  # of the white space after a tag only the indentation of the line is left
            space = self._before + space[space.rfind("\n") + 1 :]
        pieces.append(Words(space + said[begin:], self._thinking))
        self._before, self._space, self._tagged = "", text[len(said) :], False
        self._fresh, self._said = False, True

    def _call(self, body: str) -> Call | None:
        assert self._tools is not None
        return _from_json(body, self._tools) if body.lstrip().startswith("{") else _from_tags(body, self._tools)


def _beginning(text: str, tags: list[str]) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    longest = min(len(text), max(map(len, tags), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)


def _dump(arguments: Mapping[str, Any]) -> str:
    """Raises ValueError for what JSON does not have."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can escape
        return json.dumps(arguments)
    return text


def _from_json(body: str, tools: Mapping[str, Mapping[str, Any]]) -> Call | None:
    try:
        value = json.loads(body)
        name, arguments = value["name"], value.get("arguments", {})
        if isinstance(name, str) and name in tools and isinstance(arguments, dict):
            return Call(name, _dump(arguments))
    except (ValueError, KeyError, RecursionError):
        pass
    return None


def _from_tags(body: str, tools: Mapping[str, Mapping[str, Any]]) -> Call | None:
    head = _FUNCTION.match(body)
    if head is None or head[1] not in tools:
        return None
    schema = tools[head[1]]
    properties = schema.get("properties")
    arguments: dict[str, Any] = {}
    at = head.end()
    while (parameter := _PARAMETER.match(body, at)) is not None:
        end = _PARAMETER_END.search(body, parameter.end())
        if end is None:
            return None
        # The template puts each value on lines of its own.
        text = body[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
        own = properties.get(parameter[1]) if isinstance(properties, dict) else None
        arguments[parameter[1]] = typed(text, own, schema)
        at = end.end()
    return Call(head[1], _dump(arguments)) if _FUNCTION_END.fullmatch(body, at) else None


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that a text stands for, by the JSON schema of an argument.

    The narrowest type that the schema admits and the text can be read as: null, boolean, integer, number, object or
    array (as JSON, or as templates print Python's values), else the text itself, also where the schema admits no
    strings: it is for the tool to refuse.

    Args:
      text: what the model wrote.
      schema: of the argument; anything that says no type is a string.
      root: the schema that `$ref`s point into.
    """
    types, word = _types(schema, root), text.strip()
    if "null" in types and word in ("null", "None"):
        return None
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if types & {"integer", "number", "object", "array"} and word[:1] in {*"-0123456789{["}:
        try:
            value = json.loads(word)
            _dump({"": value})  # it can be said again: no infinity
        except (ValueError, RecursionError):
            return text
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if "integer" in types and whole:
            return int(value)
        if "number" in types and isinstance(value, (int, float)):
            return value
        if ("object" in types and isinstance(value, dict)) or ("array" in types and isinstance(value, list)):
            return value
    return text


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Names of the JSON types that a schema admits, as far as it says so; references may go in circles."""
    types: set[str] = set()
    seen: set[int] = set()
    left = [schema]
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        given, values = one.get("type"), one.get("enum")
        types |= {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
        values = [*(values if isinstance(values, list) else []), *([one["const"]] if "const" in one else [])]
        types |= {_TYPE_OF[type(value)] for value in values} if given is None else set()
        types |= {name for name, key in (("object", "properties"), ("array", "items")) if key in one}
        for key in ("anyOf", "oneOf", "allOf"):
            left += options if isinstance(options := one.get(key), list) else []
        reference = one.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            target: Any = root
            for step in reference.split("/")[1:]:
                target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
            left.append(target)
    return types


_TYPE_OF = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip

"""A small text grammar: templates with choices, word lists and context slots.

Template language, chosen so that a sentence reads almost as plain English in the source:

    [name]      the string stored under "name" in the document's context (entities that must stay the same)
    <adverb>    a fresh draw from a word list (details that may vary freely)
    {a|b|c}     one of the alternatives, each again a template; {|x} makes x optional
    @           the indefinite article of the following word, resolved to "a" or "an" after expansion

A template is parsed once; expanding it costs a few hundred nanoseconds per choice, which keeps the generator
far above the speed of the tokenizer behind it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from dflash_jax.train.corpus import words

_LITERAL, _SLOT, _LIST, _CHOICE = range(4)
_TOKEN = re.compile(r"\[(\w+)\]|<(\w+)>|([{|}])")
# Words whose first letter misleads about their first sound.
_ARTICLE = re.compile(r"@ (\"?)(\w+)")
_CONSONANT_SOUND = re.compile(r"(?i)(uni|use|usu|uku|eu|one\b|once\b|ewe)")
_VOWEL_SOUND = re.compile(r"(?i)(hour|honest|heir)|8|11\b|18\b")
_SENTENCE_START = re.compile(r"((?:^|[.!?] |\n|: \"|, \")\"?)([a-z])")

HELDOUT_MODULUS = 16
"""One of so many content pairs is kept out of training."""


class Template:
    """One parsed template. ``expand`` may be called any number of times."""

    __slots__ = ("_parts", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self._parts, end = _parse(source, 0, top=True)
        if end != len(source):
            raise ValueError(f"unbalanced braces in template {source!r}")

    def expand(self, context: Mapping[str, str], rng: Random) -> str:
        """The template's text with slots from ``context`` and choices from ``rng``; articles stay unresolved."""
        out: list[str] = []
        _expand(self._parts, context, rng.random, out)
        return "".join(out)


def _parse(source: str, start: int, top: bool) -> tuple[list[tuple[int, Any]], int]:
    """Parse up to the '|' or '}' that ends this alternative (or the end of the text when ``top``)."""
    parts: list[tuple[int, Any]] = []
    at = start
    while at < len(source):
        match = _TOKEN.search(source, at)
        if match is None:
            parts.append((_LITERAL, source[at:]))
            return parts, len(source)
        if match.start() > at:
            parts.append((_LITERAL, source[at : match.start()]))
        slot, word_list, brace = match.groups()
        at = match.end()
        if slot:
            parts.append((_SLOT, slot))
        elif word_list:
            parts.append((_LIST, words.LISTS[word_list]))
        elif brace == "{":
            alternatives = []
            while True:
                alternative, at = _parse(source, at, top=False)
                alternatives.append(alternative)
                if at >= len(source):
                    raise ValueError(f"unclosed brace in template {source!r}")
                at += 1
                if source[at - 1] == "}":
                    break
            parts.append((_CHOICE, alternatives))
        elif top:
            raise ValueError(f"stray {brace!r} in template {source!r}")
        else:
            return parts, match.start()
    return parts, at


def _expand(parts: Sequence[tuple[int, Any]], context: Mapping[str, str], draw: Any, out: list[str]) -> None:
    for op, value in parts:
        if op == _LITERAL:
            out.append(value)
        elif op == _SLOT:
            out.append(context[value])
        elif op == _LIST:
            out.append(value[int(draw() * len(value))])
        else:
            _expand(value[int(draw() * len(value))], context, draw, out)


def compile_all(sources: Sequence[str]) -> list[Template]:
    """Parse a list of alternative templates."""
    return [Template(source) for source in sources]


def block(text: str) -> list[Template]:
    """Parse one template per non-empty line of ``text``; a line that starts with four spaces continues its
    predecessor.
    """
    lines: list[str] = []
    for line in text.strip("\n").split("\n"):
        if line.startswith("    ") and lines:
            lines[-1] += " " + line.strip()
        elif line.strip():
            lines.append(line.strip())
    return compile_all(lines)


def say(choices: Sequence[Template], context: Mapping[str, str], rng: Random) -> str:
    """Expand one of ``choices``."""
    return choices[int(rng.random() * len(choices))].expand(context, rng)


def pick(rng: Random, items: Sequence[Any]) -> Any:
    """A uniform choice; several times faster than ``rng.choice``."""
    return items[int(rng.random() * len(items))]


def finish(text: str) -> str:
    """Resolve articles and capitalise the first letter of every sentence of prose."""
    if "@" in text:
        text = _ARTICLE.sub(_article, text)
    return _SENTENCE_START.sub(lambda m: m.group(1) + m.group(2).upper(), text)


def article(word: str) -> str:
    """``word`` with its indefinite article in front."""
    return _ARTICLE.sub(_article, "@ " + word)


def _article(match: re.Match[str]) -> str:
    quote, word = match.groups()
    vowel = word[0] in "aeiouAEIOU"
    if (vowel and _CONSONANT_SOUND.match(word)) or (not vowel and not _VOWEL_SOUND.match(word)):
        return f"a {quote}{word}"
    return f"an {quote}{word}"


def is_heldout(first: str, second: str) -> bool:
    """Whether the content pair belongs to the held-out split: a fixed hash, the same on every machine and for both orders."""
    if first > second:
        first, second = second, first
    return zlib.crc32(f"{first}|{second}".encode()) % HELDOUT_MODULUS == 7


def draw_pair(rng: Random, split: str, first: Any, second: Any) -> tuple[Any, Any]:
    """Draw (a, b) with ``first(rng)`` and ``second(rng)`` until the pair lies in ``split``.

    Both draws return something whose ``str`` (or first tuple field) identifies the content.
    """
    wanted = split == "heldout"
    while True:
        a, b = first(rng), second(rng)
        if is_heldout(key(a), key(b)) == wanted:
            return a, b


def key(value: Any) -> str:
    """The identity of a table row or a word in the split rule."""
    if isinstance(value, str):
        return value
    return key(value[0])


def join_and(items: Sequence[str]) -> str:
    """The items in one phrase, as in: a, b and c."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]

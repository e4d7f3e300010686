"""Prompts for a target that was trained elsewhere: code, word problems, questions, and what it asks itself.

Code comes from the Python standard library of the running interpreter: heads of documented functions, to be continued
as they are (the form of HumanEval, none of whose problems is in it), and tasks made of their docstrings. Word problems
and questions are put together from parts. `own_prompts` is Magpie (arXiv 2406.08464): a chat model continues an empty
user's turn with a prompt of its own. Every prompt belongs to one split, which follows from its text.
"""

import ast
import functools
import itertools
import sysconfig
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.tokenizer import Tokenizer

# One prompt in so many is held out.
_HELDOUT = 16
_MARK = "\N{WHITE SQUARE}"
Entry = dict[str, Any]

_NAMES = (
    "Ada", "Ben", "Chloe", "Dan", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jack", "Kim", "Leo", "Maria", "Nora",
    "Omar", "Priya", "Quinn", "Rosa", "Sam", "Tara",
)  # fmt: skip
_THINGS = (
    "apples", "books", "marbles", "stickers", "pencils", "cookies", "shells", "cards", "balloons", "eggs", "stamps",
    "coins", "bricks", "tickets",
)  # fmt: skip
_TOPICS = (
    "the water cycle", "photosynthesis", "gravity", "the French Revolution", "recursion", "hash tables", "vaccines",
    "supply and demand", "the moon's phases", "democracy", "black holes", "the Roman Empire", "machine learning",
    "plate tectonics", "sleep", "exercise", "the internet", "bees", "climate change", "jazz", "chess", "volcanoes",
    "whales", "probability", "electric cars", "coffee", "bread baking", "time zones", "the human heart", "poetry",
    "budgeting", "job interviews", "gardening", "dinosaurs", "the Great Wall of China", "solar panels", "friendship",
    "sorting algorithms", "version control", "the scientific method", "cats", "the stock market", "rainbows", "tea",
)  # fmt: skip
_QUESTIONS = (
    "Explain {} in simple terms.", "What is {}?", "Why does {} matter?", "Write a short paragraph about {}.",
    "List five facts about {}.", "Write a short story about {}.", "Give me three tips about {}.",
    "Write a poem about {}.", "What are common misconceptions about {}?", "Summarise the history of {}.",
    "How would you teach {} to a child?",
    "Write an email to a colleague about {}.", "Compare {} and {}.", "Write a dialogue between two people about {}.",
    "What are the advantages and disadvantages of {}?", "Ask me four quiz questions about {} and give the answers.",
)  # fmt: skip


def _bought(rng: np.random.Generator) -> str:
    a, b = rng.choice(_NAMES, 2, replace=False)
    n, price, paid = rng.integers(2, 30), rng.integers(2, 15), rng.integers(1, 9)
    thing = rng.choice(_THINGS)
    return (
        f"{a} buys {n} {thing} for ${price} each and gives {b} {paid} of them. How much did {a} spend, and how many "
        f"{thing} does {a} have left?"
    )


def _shared(rng: np.random.Generator) -> str:
    a, b = rng.choice(_NAMES, 2, replace=False)
    first, times, lost = rng.integers(3, 40), rng.integers(2, 6), rng.integers(1, 10)
    thing = rng.choice(_THINGS)
    return (
        f"{a} has {first} {thing}. {b} has {times} times as many, but loses {lost}. How many {thing} do they have "
        "together?"
    )


def _worked(rng: np.random.Generator) -> str:
    a = rng.choice(_NAMES)
    rate, hours, days = rng.integers(9, 40), rng.integers(2, 9), rng.integers(2, 7)
    rent = rng.integers(20, 120)
    return (
        f"{a} earns ${rate} an hour and works {hours} hours a day for {days} days. After paying ${rent} for rent, how "
        "much money is left?"
    )


def _travelled(rng: np.random.Generator) -> str:
    speed, hours, stop = rng.integers(30, 90), rng.integers(2, 9), rng.integers(10, 60)
    return (
        f"A bus drives at {speed} km per hour for {hours} hours, stops for {stop} minutes and then drives half as far "
        "again. How far does it drive in total?"
    )


_PROBLEMS: tuple[Callable[[np.random.Generator], str], ...] = (_bought, _shared, _worked, _travelled)


def _asked(text: str) -> Entry:
    return {"messages": [{"role": "user", "content": text}]}


def word_problems(rng: np.random.Generator) -> Iterator[Entry]:
    """Endless arithmetic in words, half of them with a request for steps."""
    while True:
        text = _PROBLEMS[rng.integers(len(_PROBLEMS))](rng)
        yield _asked(text + (" Think step by step." if rng.integers(2) else ""))


def questions(rng: np.random.Generator) -> Iterator[Entry]:
    """Questions and writing tasks on one topic or two, each once."""
    texts = [
        form.format(*topics)
        for form in _QUESTIONS
        for topics in itertools.permutations(_TOPICS, form.count("{}"))
    ]
    for index in rng.permutation(len(texts)):
        yield _asked(texts[index])


@functools.cache
def functions() -> tuple[tuple[str, str], ...]:
    """Documented functions of the standard library: source to the docstring's end, and the docstring's first line."""
    found: dict[str, str] = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if isinstance(node, ast.FunctionDef) and text and 20 < len(text) < 1200:
                head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
                found.setdefault(head + "\n", text.splitlines()[0].strip())
    return tuple(found.items())


def code(rng: np.random.Generator) -> Iterator[Entry]:
    """Heads of functions to be continued and, one time in three, the same as a task; each once."""
    known = functions()
    for index in rng.permutation(len(known)):
        head, summary = known[index]
        if rng.integers(3):
            yield {"text": head}
        else:
            yield _asked(f"Write a Python function for this: {summary}")


def in_split(entry: Entry, split: str) -> bool:
    """Whether a prompt belongs to a split."""
    text = entry.get("text") or entry["messages"][-1]["content"]
    return (zlib.crc32(text.encode()) % _HELDOUT == 0) == (split == "heldout")


def made_prompts(split: str, count: int, seed: int) -> list[Entry]:
    """Up to `count` distinct prompts of the three kinds, in turn; a fifth of them at most are word problems."""
    rng = np.random.default_rng([seed, zlib.crc32(split.encode())])
    problems = itertools.islice((e for e in word_problems(rng) if in_split(e, split)), count // 5)
    kinds: list[Iterator[Entry]] = [code(rng), problems, questions(rng)]
    found: dict[str, Entry] = {}
    while len(found) < count and kinds:
        kind = kinds.pop(0)
        entry = next(kind, None)
        if entry is None:
            continue
        kinds.append(kind)
        if in_split(entry, split):
            found.setdefault(str(entry), entry)
    return list(found.values())


def empty_turn(tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation up to where the user's first words come."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    return tokenizer.encode(text[: text.index(_MARK)], add_special_tokens=False)


def own_prompts(tokenizer: Tokenizer, written: Sequence[Sequence[int]], stop_ids: Sequence[int]) -> list[Entry]:
    """What a target wrote into empty turns, as prompts: the finished ones, each once."""
    found: dict[str, Entry] = {}
    for ids in written:
        text = tokenizer.decode(ids).strip()
        if len(ids) and ids[-1] in stop_ids and len(text) >= 8:
            found.setdefault(text, _asked(text))
    return list(found.values())


def encode(tokenizer: Tokenizer, entries: Sequence[Entry], limit: int) -> list[list[int]]:
    """Token ids of those prompts that are at most `limit` long; chats through the model's own template."""
    encoded = []
    for entry in entries:
        if "messages" in entry:
            ids = tokenizer.encode(tokenizer.apply_chat_template(entry["messages"]), add_special_tokens=False)
        else:
            ids = tokenizer.encode(entry["text"])
        if 0 < len(ids) <= limit:
            encoded.append(ids)
    return encoded

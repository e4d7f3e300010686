"""Prompt files for benchmarks, and measures of the text that comes out."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dflash_jax import Engine, UserError
from dflash_jax.loading import ASSETS

BUNDLED_PROMPTS = ASSETS / "prompts.json"


def read_prompts(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Entries with `messages` or `text` (and perhaps `kind`), from a JSON list."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--prompts {path}: no such file") from None
    except ValueError as error:
        raise UserError(f"--prompts {path}: not valid JSON ({error})") from None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and ("text" in entry or "messages" in entry) for entry in entries
    ):
        raise UserError(f"--prompts {path}: expected a list of objects with 'text' or 'messages'")
    return entries[:limit]


def encode(engine: Engine, entries: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Token ids of prompt entries; conversations through the model's chat template."""
    return [
        engine.encode_chat(entry["messages"]) if "messages" in entry else engine.encode(entry["text"])
        for entry in entries
    ]


def repeated_ngram_share(sequences: Iterable[Sequence[int]], n: int = 8) -> float:
    """Share of n-grams that already occurred in the same sequence: how much of the text is loops."""
    repeated = total = 0
    for tokens in sequences:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0

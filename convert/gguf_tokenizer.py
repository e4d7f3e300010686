"""The tokenizer and the chat template that a GGUF file carries in its metadata.

A file has the vocabulary, the merges and the kind of every token, but names the rule that splits text before BPE
(`tokenizer.ggml.pre`) instead of holding it. The rules below are those of the models' own tokenizer.json.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from convert.gguf_config import config_json
from convert.gguf_file import GGUFFile, open_gguf
from dflash_jax.errors import UserError
from dflash_jax.tokenizer import Tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}"
)
# `tokenizer.ggml.pre` -> pattern; "smollm" splits off single digits and then words as GPT-2 does.
_PATTERNS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2, "qwen35": _QWEN35}
_DIGITS = "smollm"
# These look a whole piece up before they merge, and begin every text with a token.
_WHOLE_WORDS = ("llama-bpe", "llama3")
# Kinds of tokens (llama.cpp, `llama_token_type`).
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
      UserError: a kind of tokenizer, or a splitting rule, that is not supported.
    """
    file = open_gguf(path)
    templates = {}
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        templates["default"] = (template, f"{path}: tokenizer.chat_template")
    return Tokenizer(_backend(file), special=_special(file), chat_templates=templates, source=str(path))


def write_side_files(path: Path, folder: Path) -> None:
    """Writes what a Hugging Face folder has beside its weights: config, tokenizer and chat template."""
    file = open_gguf(path)
    texts = {"config.json": config_json(file), "tokenizer_config.json": _special(file)}
    for name, value in texts.items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _backend(file).save(str(folder / "tokenizer.json"))
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _special(file: GGUFFile) -> dict[str, str]:
    """Special tokens by Hugging Face name."""
    tokens = file.metadata.get("tokenizer.ggml.tokens") or []
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
    return {name: tokens[number] for name, number in ids.items() if number is not None and number < len(tokens)}


def _backend(file: GGUFFile) -> tokenizers.Tokenizer:
    metadata: dict[str, Any] = file.metadata
    kind, rule = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise UserError(f"{file.path}: tokenizer.ggml.model {kind!r} is not supported (supported: 'gpt2')")
    if rule not in (_DIGITS, *_PATTERNS):
        known = ", ".join((_DIGITS, *_PATTERNS))
        raise UserError(f"{file.path}: tokenizer.ggml.pre {rule!r} is not supported (supported: {known})")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule in _WHOLE_WORDS)
    except Exception as error:  # the library has no type of its own
        raise UserError(f"{file.path}: vocabulary and merges do not fit ({error})") from None
    backend = tokenizers.Tokenizer(model)
    split = (
        pre_tokenizers.Digits(individual_digits=True)
        if rule == _DIGITS
        else pre_tokenizers.Split(Regex(_PATTERNS[rule]), "isolated")
    )
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule == _DIGITS)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])  # type: ignore[attr-defined]
    backend.decoder = decoders.ByteLevel()
    if rule.startswith("qwen"):
        backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([_added(token) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    backend.add_tokens([_added(token) for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED])
    first = metadata.get("tokenizer.ggml.bos_token_id")
    if first is not None and metadata.get("tokenizer.ggml.add_bos_token", rule in _WHOLE_WORDS):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )
    return backend


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)

"""Trains the bundled target's tokenizer and writes its folder in the plain Hugging Face layout.

Byte-level BPE with the pieces of the Qwen tokenizers: NFC, a pre-tokenizer that keeps a word with its leading
space and every digit alone, and the same control tokens. Ids:

    0 ... 2041   bytes and merges
    2042         <|endoftext|>   end of a document, padding, stop
    2043         <|im_start|>    opens a chat turn
    2044         <|im_end|>      closes a chat turn, stop
    2045         <think>         known to the tokenizer, never written by this non-thinking model
    2046         </think>
    2047         <|mask|>        the drafter's mask

Run ``python -m dflash_jax.train.tokenizer`` to rebuild ``assets/target`` (tokenizer files, chat template, generation
config) and ``assets/prompts.json``. The result is the same on every machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from dflash_jax.train.corpus import prompts, texts

VOCAB_SIZE = 2048
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|mask|>")
# As in Qwen, the thinking marks are ordinary text to a decoder that skips special tokens.
_NOT_SPECIAL = ("<think>", "</think>")
MODEL_MAX_LENGTH = 1024
TRAINING_BYTES = 30_000_000
PROMPT_COUNT = 64
PROMPT_SEED = 7

# Contractions; letters (with marks) behind at most one other sign; single digits; signs; line breaks; blanks.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

CHAT_TEMPLATE = """\
{#- ChatML turns as in Qwen. The model does not think: without enable_thinking, or with enable_thinking=false, the
    answer starts right after the assistant header; enable_thinking=true is an error and not silently ignored. -#}
{%- if enable_thinking is defined and enable_thinking -%}
    {{- raise_exception('enable_thinking=true: this is a non-thinking model, use enable_thinking=false') -}}
{%- endif -%}
{%- if tools -%}
    {{- raise_exception('tools: this model was not trained to call tools') -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('unknown role ' ~ message.role ~ ', use system, user or assistant') -}}
    {%- endif -%}
    {%- if message.role == 'system' and not loop.first -%}
        {{- raise_exception('the system message must come first') -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type != 'text' -%}
                {{- raise_exception('content of type ' ~ part.type ~ ': this model reads text only') -}}
            {%- endif -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def training_texts(n_bytes: int, seed: int = 0) -> Iterator[str]:
    """Rendered training documents up to about ``n_bytes``, without the control tokens of the chat form."""
    total = 0
    for text in texts(seed):
        for token in CONTROL_TOKENS:
            text = text.replace(token, "")
        yield text
        total += len(text.encode())
        if total >= n_bytes:
            return


def train_tokenizer(n_bytes: int = TRAINING_BYTES, seed: int = 0) -> Tokenizer:
    """Byte-level BPE with ``VOCAB_SIZE`` ids in total, trained on ``n_bytes`` of the corpus. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(n_bytes, seed), trainer)
    tokenizer.add_tokens(
        [AddedToken(t, special=t not in _NOT_SPECIAL, normalized=False) for t in CONTROL_TOKENS]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the corpus gave {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}: use more text"
        )
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict:
    """The content of ``tokenizer_config.json``, readable by ``transformers.AutoTokenizer``."""
    added = {}
    for token in CONTROL_TOKENS:
        added[str(tokenizer.token_to_id(token))] = {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token not in _NOT_SPECIAL,
        }  # fmt: skip
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "mask_token": "<|mask|>",
        "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def generation_config(tokenizer: Tokenizer) -> dict:
    """The content of ``generation_config.json``: stop at the end of a turn or of a document, greedy by default."""
    im_end, end = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    return {"bos_token_id": None, "do_sample": False, "eos_token_id": [im_end, end], "pad_token_id": end}


def write_assets(assets: Path, n_bytes: int = TRAINING_BYTES) -> Tokenizer:
    """Write the tokenizer files to ``assets/target`` and the held-out prompts to ``assets/prompts.json``."""
    target = assets / "target"
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(n_bytes)
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", tokenizer_config(tokenizer))
    _write_json(target / "generation_config.json", generation_config(tokenizer))
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(assets / "prompts.json", prompts("heldout", PROMPT_COUNT, PROMPT_SEED))
    return tokenizer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Command line: rebuild the tokenizer and prompt files."""
    parser = argparse.ArgumentParser(description="Train the bundled target's tokenizer and write its folder.")
    parser.add_argument("--assets", type=Path, default=Path(__file__).resolve().parents[1] / "assets")
    parser.add_argument("--bytes", type=int, default=TRAINING_BYTES, help="training text in bytes")
    arguments = parser.parse_args()
    tokenizer = write_assets(arguments.assets, arguments.bytes)
    print(f"wrote {arguments.assets} with {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()

"""Checkpoints in and out: Hugging Face safetensors folders, Orbax folders and GGUF files, by one strict key map.

    config, target = load_target(resolve_model("org/name-or-folder"), "bfloat16")
    drafter_config, drafter, notes = load_drafter(folder, config, "bfloat16")

`python -m convert SRC DST` turns a Hugging Face folder into an Orbax folder that the same functions load, and
`python -m convert.quantise SRC DST` a drafter into one of 8 bits.
"""

from convert.hub import resolve_model
from convert.keymap import (
    KeyMap,
    abstract_drafter,
    abstract_mtp,
    abstract_target,
    match_drafter,
    match_target,
)
from convert.load import load_drafter, load_mtp, load_target, load_tokenizer, stored_dtype
from convert.save import save_drafter, save_target

__all__ = [
    "KeyMap",
    "abstract_drafter",
    "abstract_mtp",
    "abstract_target",
    "load_drafter",
    "load_mtp",
    "load_target",
    "load_tokenizer",
    "match_drafter",
    "match_target",
    "resolve_model",
    "save_drafter",
    "save_target",
    "stored_dtype",
]

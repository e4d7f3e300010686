"""Checkpoints in and out: Hugging Face safetensors folders and Orbax folders, by one strict key map.

    config, target = load_target(resolve_model("org/name-or-folder"), "bfloat16")
    drafter_config, drafter, notes = load_drafter(folder, config, "bfloat16")

`python -m convert SRC DST` turns a Hugging Face folder into an Orbax folder that the same functions load.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.hub import resolve_model
    from convert.keymap import (
        KeyMap,
        abstract_drafter,
        abstract_mtp,
        abstract_target,
        match_drafter,
        match_target,
    )
    from convert.load import load_drafter, load_mtp, load_target, stored_dtype
    from convert.save import save_drafter, save_target

__all__ = [
    "KeyMap",
    "abstract_drafter",
    "abstract_mtp",
    "abstract_target",
    "load_drafter",
    "load_mtp",
    "load_target",
    "match_drafter",
    "match_target",
    "resolve_model",
    "save_drafter",
    "save_target",
    "stored_dtype",
]

_MODULES = {"resolve_model": "hub", "save_drafter": "save", "save_target": "save"} | dict.fromkeys(
    ("load_drafter", "load_mtp", "load_target", "stored_dtype"), "load"
)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'keymap')}"), name)


# `dflash_jax.load` calls this package and this package builds the modules of that one. Importing that one first, while
# nothing here is half imported, makes every order of imports work.
import dflash_jax  # noqa: E402, F401

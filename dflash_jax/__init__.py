"""DFlash-JAX: lossless speculative decoding for Qwen3.5/3.6 hybrid models.

The shortest use:

    import dflash_jax

    engine = dflash_jax.load()  # the bundled pair; or load("org/target", "org/drafter")
    print(engine.generate(["Once upon a time"])[0].text)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_jax.engine import Engine
    from dflash_jax.errors import UserError
    from dflash_jax.loading import load
    from dflash_jax.request import Chunk, Completion, SamplingParams
    from dflash_jax.tree import BestFirst, SpineFirst, TreePolicy

__version__ = "0.1.0"

__all__ = [
    "BestFirst",
    "Chunk",
    "Completion",
    "Engine",
    "SamplingParams",
    "SpineFirst",
    "TreePolicy",
    "UserError",
    "load",
]

# Imported when first used: JAX takes seconds, and the command line must answer --help before that.
_MODULES = {
    "BestFirst": "tree",
    "Chunk": "request",
    "Completion": "request",
    "Engine": "engine",
    "SamplingParams": "request",
    "SpineFirst": "tree",
    "TreePolicy": "tree",
    "UserError": "errors",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])

"""DFlash-JAX: lossless speculative decoding for Qwen3.5/3.6 hybrid models.

    import dflash_jax

    engine = dflash_jax.load()  # the bundled pair; or load("org/target", "org/drafter")
    print(engine.generate(["Once upon a time"])[0].text)
"""

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

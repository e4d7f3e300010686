"""The real shapes of a tree's construction, by name: what tests, benchmarks and the compile check run."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tree_search import bordered, candidates_kernel, search_kernel

# Tokens of a device's slice of the vocabulary, and depths.
VOCABULARIES: dict[str, tuple[int, int]] = {
    "qwen3.6": (248320, 15), "qwen3.6-tp2": (124160, 15), "smollm2": (49152, 9), "bundled": (2048, 15),
}  # fmt: skip
BUDGETS = (15, 31, 63, 127, 255)


def cases(device_kind: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every shape; the launch is the same on every device."""
    del device_kind
    for name, (vocab, depths) in VOCABULARIES.items():
        for k in (31, 63):
            function = functools.partial(candidates_kernel.top_candidates, k=k)
            yield f"draft_candidates/{name}/{k}", function, (jax.ShapeDtypeStruct((1, depths, vocab), jnp.float32),)
    for budget in BUDGETS:
        ids = jax.ShapeDtypeStruct((1, 15, budget), jnp.int32)
        costs = jax.eval_shape(bordered, ids)
        function = functools.partial(search_kernel.search, budget=budget, spine=0, window=3, paths=16)
        yield f"tree_search/{budget}", function, (jax.ShapeDtypeStruct((1,), jnp.int32), costs, ids)

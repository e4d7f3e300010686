"""Reads the goldens and hands their weights to the JAX modules."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from tests.goldens import cases, weights


class Goldens:
    """One file of reference tensors. `digests` say with which weights each case was computed."""

    def __init__(self, name: str):
        with safe_open(cases.FOLDER / f"{name}.safetensors", framework="numpy") as file:
            self.digests: dict[str, str] = json.loads(file.metadata()["about"])["digests"]
            self.tensors: dict[str, np.ndarray] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def __getitem__(self, key: str) -> np.ndarray:
        return self.tensors[key]

    def check_weights(self, case: str, values: dict[str, np.ndarray]) -> None:
        """Fails where this numpy makes other weights than the oracle's did."""
        assert weights.digest(values) == self.digests[case], (
            f"{case}: the weights made here are not those of the goldens; run the scripts in tests/goldens again"
        )


@functools.cache
def goldens(name: str) -> Goldens:
    """`targets` or `drafters`."""
    return Goldens(name)


def build[M: nnx.Module](make: Callable[[], M], values: dict[str, np.ndarray]) -> M:
    """The module that `make` makes, with these parameters; fails on a name or shape that one side lacks.

    The module is made without values, since its random initialisation would be thrown away.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    flat = {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)}
    assert flat.keys() == values.keys(), sorted(flat.keys() ^ values.keys())
    filled = []
    for name, (path, variable) in flat.items():
        assert variable.shape == values[name].shape, (name, variable.shape, values[name].shape)
        filled.append((path, variable.replace(jnp.asarray(values[name], variable.dtype))))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def page_tables(lengths: np.ndarray, page_size: int) -> jax.Array:
    """Block tables of slots that need `lengths` tokens, [slots, entries].

    Pages are interleaved between the slots and in falling order, so that a table that is not used cannot pass. Entries
    that a slot does not need name the first page of the longest slot, where no row that is not valid may be written.
    """
    needed = -(-np.asarray(lengths) // page_size)
    slots, entries = len(needed), int(needed.max())
    tables = np.arange(slots * entries)[::-1].reshape(entries, slots).T
    unused = np.arange(entries) >= needed[:, None]
    return jnp.asarray(np.where(unused, tables[int(needed.argmax()), 0], tables), jnp.int32)


def relative(a: Any, b: np.ndarray) -> float:
    """‖a − b‖ / ‖b‖ in double precision."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def assert_close(found: Any, expected: np.ndarray, bound: float, what: str) -> None:
    """Two arrays agree in norm, and in the largest difference relative to the largest value."""
    difference = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).max()
    error, largest = relative(found, expected), float(difference / np.abs(expected).max())
    # Written so that NaN fails.
    assert error <= bound and largest <= bound, f"{what}: relative error {error:.1e}, largest {largest:.1e}"

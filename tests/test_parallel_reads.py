"""Safetensors are read ahead by threads: how far, in which order, and how often each byte."""

import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from convert.reader import READERS
from convert.safetensors_source import SafetensorsSource
from dflash_jax.sharding import COLUMNS, REPLICATED, ROWS, make_mesh

COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    values = np.arange(COUNT * 32, dtype=np.float32).reshape(COUNT, 8, 4)
    save_file({f"t{i:02d}": values[i] for i in range(COUNT)}, path / "model.safetensors")
    return path


def requests(source: SafetensorsSource, spec: PartitionSpec | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Of all tensors, last one first."""
    sharding = None if spec is None else NamedSharding(make_mesh(2), spec)
    return {
        i.name: jax.ShapeDtypeStruct(i.shape, jnp.float32, sharding=sharding)
        for i in reversed(source.tensors)
    }


def test_few_tensors_are_read_ahead_and_in_file_order(folder, monkeypatch):
    source, started = SafetensorsSource(folder), []
    own = SafetensorsSource._parts
    monkeypatch.setattr(SafetensorsSource, "_parts", lambda *args: started.append(args[1]) or own(*args))
    names = []
    for name, _ in source.read(requests(source), lambda size: None):
        names.append(name)
        time.sleep(0.02)  # time enough to run ahead
        assert len(started) <= len(names) - 1 + READERS
    assert names == [f"t{i:02d}" for i in range(COUNT)] and sorted(started) == names


def test_several_are_read_at_a_time(folder, monkeypatch):
    source, together = SafetensorsSource(folder), threading.Barrier(READERS, timeout=30)
    own = SafetensorsSource._parts
    monkeypatch.setattr(SafetensorsSource, "_parts", lambda *args: (together.wait(), own(*args))[1])
    assert len(list(source.read(requests(source), lambda size: None))) == COUNT


@pytest.mark.parametrize("spec", [None, REPLICATED, ROWS, COLUMNS])
def test_every_byte_is_read_once_and_lands_where_it_belongs(folder, spec, monkeypatch):
    sizes: list[int] = []

    class Recording:
        """A tensor in its file that writes down which parts are taken."""

        def __init__(self, array: np.ndarray):
            self.array = array

        def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
            sizes.append(self.array[index].size)
            return self.array[index]

    source = SafetensorsSource(folder)
    own = SafetensorsSource._view
    monkeypatch.setattr(SafetensorsSource, "_view", lambda *args: Recording(own(*args)))
    advanced: list[int] = []
    found = dict(source.read(requests(source, spec), advanced.append))
    parts = 2 if spec in (ROWS, COLUMNS) else 1
    assert sizes == [32 // parts] * COUNT * parts and advanced == [128] * COUNT
    for i in range(COUNT):
        np.testing.assert_array_equal(found[f"t{i:02d}"], np.arange(32.0).reshape(8, 4) + 32 * i)
    if spec is not None:
        assert found["t00"].sharding.spec == spec


def test_a_failed_read_reaches_the_caller(folder, monkeypatch):
    source = SafetensorsSource(folder)

    def fail(self: SafetensorsSource, name: str, leaf: jax.ShapeDtypeStruct) -> None:
        raise OSError(5, "Input/output error", name)

    monkeypatch.setattr(SafetensorsSource, "_parts", fail)
    with pytest.raises(OSError, match="t00"):
        list(source.read(requests(source), lambda size: None))
    assert not [t for t in threading.enumerate() if t.name.startswith("read-weights")]

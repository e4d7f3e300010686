"""Programs kept on disk: found without tracing, and only where everything that they follow from is the same."""

import dataclasses
import enum
import errno
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dflash_jax
from dflash_jax import Engine, SamplingParams, executables, programs
from dflash_jax import round as rounds
from dflash_jax.acceptance import greedy, sample
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.round import RoundSpec
from dflash_jax.target import Target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tree import SpineFirst
from tests.models import random_drafter, random_target, save_random_pair

PARAMS = SamplingParams(max_new_tokens=12, method="ar", ignore_eos=True)
KEEP_IN = executables.keep_in  # before a fixture replaces it
TREE = dataclasses.replace(PARAMS, method="ddtree", tree_budget=5)


def engine() -> Engine:
    """The same models each time, and none of their programs."""
    target = random_target(3, layers=2)
    drafter = random_drafter(target, target_layer_ids=(0, 1))
    return Engine(target, drafter, Tokenizer.from_folder(BUNDLED_TARGET), max_slots=1, prefill_chunk=16)


def tokens(one: Engine, params: SamplingParams = PARAMS) -> list[int]:
    return one.generate([[5, 6, 7]], params)[0].token_ids


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(executables, "_folder", tmp_path / "programs")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield tmp_path / "programs"
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def sort_and_add(x):
    return jnp.sort(x) + 3


def test_what_comes_from_the_cache_of_jax_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(executables, "_folder", tmp_path)
    folder, least = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    try:
        kept = []
        for forget in (True, True, False):  # compiled; from disk; the same one, still in memory
            if forget:
                jax.clear_caches()
            lowered = jax.jit(sort_and_add).lower(jnp.zeros((1000,)))
            kept.append(executables.compiled(lowered, None)[1])
        assert kept == [True, False, False]
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
        compilation_cache.reset_cache()


def files(folder: Path) -> set[Path]:
    return set(folder.glob("*.program"))


def test_a_second_engine_traces_nothing(folder, monkeypatch):
    first = engine()
    expected = tokens(first)
    assert files(folder)

    def traced(*_, **__):
        raise AssertionError("a program was traced")

    for module, name in ((programs, "decode"), (rounds, "prefill")):
        monkeypatch.setattr(module, name, traced)
    second = engine()
    assert tokens(second) == expected
    (done,) = second.generate([[5, 6, 7]], PARAMS)
    assert done.kernels == first.generate([[5, 6, 7]], PARAMS)[0].kernels
    with pytest.raises(AssertionError, match="traced"):
        tokens(engine(), TREE)


def test_a_folder_that_may_only_be_read_serves(folder, monkeypatch):
    expected = tokens(engine())

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "read-only")

    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(programs, "decode", refused)
    assert tokens(engine()) == expected


def test_what_cannot_be_written_leaves_nothing(folder, monkeypatch):
    written = []

    def full(path: Path, data: bytes) -> int:
        written.append(path)
        with path.open("wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert tokens(engine()) == tokens(engine())
    assert written and not list(folder.iterdir())
    assert len(set(written)) == len(written)  # two that keep the same program do not write one file


def test_what_cannot_be_serialised_is_not_kept(folder, monkeypatch):
    def impossible(_):
        raise NotImplementedError

    monkeypatch.setattr(executables.serialize_executable, "serialize", impossible)
    assert tokens(engine()) and not files(folder)


def test_what_ended_processes_left_is_removed(folder):
    folder.mkdir()
    left, now = folder / "old.part", folder / "now.part"
    for path in (left, now):
        path.touch()
    os.utime(left, (0, time.time() - 2 * executables._ABANDONED))
    tokens(engine())
    assert not left.exists() and now.exists()


def test_models_of_other_classes_are_not_kept(folder):
    class Own(Target):
        def logits(self, hidden, implementation="xla"):
            return -super().logits(hidden, implementation)

    def other(kind: type[Target]) -> Engine:
        target = random_target(3, layers=2)
        target.__class__ = kind
        return Engine(target, None, Tokenizer.from_folder(BUNDLED_TARGET), max_slots=1, prefill_chunk=16)

    usual = tokens(other(Target))
    assert tokens(other(Own)) != usual
    assert tokens(other(Target)) == usual


def test_what_modules_hold_counts(folder):
    outlines = set()
    for eps in (None, 1e-3):
        target = random_target(3, layers=2)
        target.norm.eps = target.norm.eps if eps is None else eps
        outlines.add(executables.outline([target]))
    assert len(outlines) == 2 and None not in outlines


def test_arguments_on_other_devices_are_not_kept(folder):
    first, second = jax.devices()[:2]
    arguments = (jax.device_put(jnp.zeros(3), second),)
    assert executables.entry([first], arguments, ()) is None
    assert executables.entry([second], arguments, ()) is not None


def test_the_source_is_that_of_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(executables, "_folder", None)
    read = []
    monkeypatch.setattr(executables, "source_digest", lambda: read.append(1))
    KEEP_IN(None)
    assert not read
    KEEP_IN(tmp_path)
    assert read


def test_damaged_and_foreign_files_cost_their_compilation(folder):
    expected = tokens(engine())
    for i, path in enumerate(sorted(files(folder))):
        path.write_bytes(b"" if i % 2 else path.read_bytes()[:-100])
    assert tokens(engine()) == expected


def test_nothing_is_found_once_the_source_has_changed(folder, monkeypatch):
    tokens(engine())
    before = files(folder)
    monkeypatch.setattr(executables, "source_digest", lambda: "another")
    tokens(engine())
    assert len(files(folder)) == 2 * len(before)


def test_a_policy_from_elsewhere_is_not_kept(folder):
    @dataclasses.dataclass(frozen=True)
    class Own(SpineFirst):
        pass

    own, usual = engine(), engine()
    own.policy = Own()
    expected = tokens(own, TREE)
    kept = files(folder)
    assert tokens(usual, TREE) == expected
    assert len(files(folder)) == len(kept) + 1


def test_two_devices(folder, tmp_path):
    models = save_random_pair(tmp_path / "pair")

    def loaded(tp: int) -> Engine:
        return dflash_jax.load(*models, tp=tp, dtype="float32", max_slots=1, max_model_len=128)

    expected = tokens(loaded(2))
    kept = files(folder)
    assert tokens(loaded(2)) == expected and files(folder) == kept
    assert tokens(loaded(1)) == expected and len(files(folder)) == 2 * len(kept)


def test_the_folder_is_bounded(folder, monkeypatch):
    tokens(engine())
    largest = max(path.stat().st_size for path in files(folder))
    monkeypatch.setattr(executables, "MOST_BYTES", largest)
    tokens(engine(), dataclasses.replace(PARAMS, temperature=0.5))
    assert sum(path.stat().st_size for path in files(folder)) <= largest


def test_descriptions():
    class Mine(enum.Enum):
        A = 1

    chain = RoundSpec(3, 4, rule=greedy)
    assert executables.describe(chain) == executables.describe(dataclasses.replace(chain))
    different = [chain, dataclasses.replace(chain, rule=sample), dataclasses.replace(chain, budget=2), (1,), (True,)]
    assert len({executables.describe(value) for value in different}) == len(different)
    for unknown in (lambda x: x, functools.partial(greedy), Mine.A, jax, object()):
        with pytest.raises(executables._Unknown):
            executables.describe(unknown)

"""Programs that are compiled side by side."""

import threading
import time

import jax
import pytest

from dflash_jax.programs import Programs
from dflash_jax.round import RoundSpec
from tests.models import random_target


def programs() -> tuple[Programs, list[str]]:
    one, said = Programs(random_target(3), None), []
    one.on_compile = said.append
    return one, said


def compiling(one: Programs, *buffers: int):
    """Calls that compile a round for each of these sizes."""
    state = one.init(None, 1, 512, 64)
    return [
        lambda buffer=buffer: one.decode(state, 1, RoundSpec(0), buffer, compile_only=True) for buffer in buffers
    ]


def test_they_are_those_that_are_compiled_one_by_one_and_are_announced_once():
    one, said = programs()
    jobs = compiling(one, 3, 4)
    start = time.perf_counter()
    one.together(jobs)
    assert said == ["programs"] and 0 < one.compile_seconds <= time.perf_counter() - start
    before, known = one.compile_seconds, set(one.compiled)
    for job in jobs:
        job()
    one.together(jobs)  # nothing is left to do or to say
    assert said == ["programs"] and one.compile_seconds == before and set(one.compiled) == known and len(known) == 2
    one.together(compiling(one, 4, 5))
    assert said == ["programs"] * 2 and len(one.compiled) == 3 and one.compile_seconds > before
    result = one.decode(one.init(None, 1, 512, 64), 1, RoundSpec(0), 5)
    assert result is not None and result[1][0].fetch()[0].count.tolist() == [0]  # no slot is active
    compiling(one, 6)[0]()
    assert said[2:] == ["decode"]


def test_one_that_fails_is_an_error_and_the_next_are_said_again():
    one, said = programs()

    def fail() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        one.together([fail])
    said.clear()
    compiling(one, 4)[0]()
    assert said == ["decode"]


def test_they_are_for_the_device_of_the_caller():
    one, seen = programs()[0], []
    device = jax.devices()[1]
    with jax.default_device(device):
        one.together([lambda: seen.append((jax.config.jax_default_device, threading.current_thread()))])
    assert [found for found, _ in seen] == [device] and seen[0][1] is not threading.current_thread()

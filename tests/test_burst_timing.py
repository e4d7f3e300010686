"""Times are right, and no burst in vain, whether or not handing a burst over makes the host wait for its end."""

import dataclasses
import functools
import re
import time

import jax
import pytest

from dflash_jax import Engine, SamplingParams
from dflash_jax.flights import Flight
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.scheduler import Scheduler
from dflash_jax.tokenizer import Tokenizer
from tests.models import random_drafter, random_target

PARAMS = SamplingParams(max_new_tokens=24, method="dflash", ignore_eos=True)
WAIT = 0.3  # seconds that a burst takes longer than it does


@functools.cache
def engine() -> Engine:
    target = random_target(3)
    tokenizer = Tokenizer.from_folder(BUNDLED_TARGET)
    return Engine(target, random_drafter(target), tokenizer, max_slots=2, prefill_chunk=16)


@pytest.fixture
def blocked(monkeypatch):
    """Handing a burst over returns at its end, as on a GPU; the bursts that were handed over."""
    decode, bursts = engine().programs.decode, []

    def wait(state, max_rounds, spec, buffer, own=None, slots=None, **options):
        result = decode(state, max_rounds, spec, buffer, own, slots, **options)
        if result is not None:
            jax.block_until_ready(result)
            time.sleep(WAIT)
            bursts.append(max_rounds)
        return result

    monkeypatch.setattr(engine().programs, "decode", wait)
    return bursts


def test_a_burst_that_blocks_the_host_counts_as_decoding_and_none_follows_it(blocked):
    engine().generate([[5, 6, 7]], PARAMS)
    blocked.clear()
    (done,) = engine().generate([[5, 6, 7]], PARAMS)
    assert len(blocked) == 1
    assert done.decode_seconds >= WAIT > done.prefill_seconds


def test_an_adaptive_text_is_one_burst(blocked):
    """Budgets change on the device: the host is not asked, so the text is not cut for it, nor is its end guessed at."""
    params = dataclasses.replace(PARAMS, method="ddtree", max_new_tokens=200)
    engine().generate([[5, 6, 7]], params)  # which times the rounds
    blocked.clear()
    (done,) = engine().generate([[5, 6, 7]], params)
    assert len(blocked) == 1 and done.rounds > 16 and done.completion_tokens == 200


def test_rounds_handed_over_one_by_one_have_no_loop_for_the_host_to_wait_in():
    scheduler = Scheduler(engine(), 2, 512, burst=1, interleave=True)
    scheduler.submit(engine().request([5, 6, 7], PARAMS))
    while scheduler.busy:
        scheduler.step()
    texts = {key[1][2]: p.as_text() for key, p in engine().programs.compiled.items() if key[0] == "decode"}
    loops = {loop: re.findall(r"^.* while\(.*$", text, re.M) for loop, text in texts.items()}
    assert not [line for line in loops[False] if "known_trip_count" not in line]
    if True in loops:
        assert [line for line in loops[True] if "known_trip_count" not in line]


def test_several_processes_do_not_look_at_what_one_may_see_earlier(monkeypatch):
    expected = engine().generate([[5, 6, 7]], PARAMS)[0].token_ids
    looks = []
    monkeypatch.setattr(Flight, "ready", property(lambda flight: looks.append(flight) or True))

    def decoded() -> list[int]:
        scheduler, found = Scheduler(engine(), 2, 512, burst=1, interleave=True), []
        scheduler.submit(engine().request([5, 6, 7], PARAMS))
        while scheduler.busy:
            found += [token for _, chunk in scheduler.step() for token in chunk.token_ids]
        scheduler.close()
        return found

    assert decoded() == expected and looks
    looks.clear()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert decoded() == expected and not looks

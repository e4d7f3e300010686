"""Rounds that hold only as many slots as their requests need give the same tokens, and leave the other slots alone."""

import dataclasses
import functools
import random

import jax
import numpy as np
import pytest

from dflash_jax import Engine, SamplingParams
from dflash_jax.budget import BudgetController, LatencyCurve
from dflash_jax.flights import Request
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.scheduler import Scheduler, widths_of
from dflash_jax.settle import Evidence
from dflash_jax.slots import put_slots, take_slots
from dflash_jax.tokenizer import Tokenizer
from tests.models import random_drafter, random_mtp, random_target
from tests.scheduling import text

SLOTS = 5
AR = SamplingParams(max_new_tokens=20, method="ar", ignore_eos=True)
CHAIN = dataclasses.replace(AR, method="dflash")
TREE = dataclasses.replace(AR, method="ddtree", tree_budget=7)
ADAPTIVE = dataclasses.replace(TREE, tree_budget="auto")
MTP = dataclasses.replace(AR, method="mtp")
SAMPLED = dataclasses.replace(CHAIN, temperature=0.9, seed=5, top_p=0.9, presence_penalty=0.8, logit_bias=((7, 2.0),))


@functools.cache
def engine() -> Engine:
    target = random_target(3)
    tokenizer = Tokenizer.from_folder(BUNDLED_TARGET)
    return Engine(
        target, random_drafter(target), tokenizer, max_slots=SLOTS, prefill_chunk=16, mtp=random_mtp(target)
    )


def scheduler(**options) -> Scheduler:
    return Scheduler(engine(), SLOTS, 512, burst=1, interleave=True, narrow=True, few_programs=True, **options)


@functools.cache
def alone(length: int, params: SamplingParams) -> list[int]:
    if params.tree_budget == "auto":
        params = dataclasses.replace(params, tree_budget=7)
    return engine().generate([text(length)], params)[0].token_ids


@pytest.fixture
def widths(monkeypatch) -> list[int]:
    """Of the rounds that are handed over."""
    decode, seen = engine().programs.decode, []

    def note(state, max_rounds, spec, buffer, own=None, slots=None, *, compile_only=False, **options):
        if not compile_only:
            seen.append(SLOTS if slots is None else len(slots))
            assert slots is None or len(set(slots)) == len(slots)
        return decode(state, max_rounds, spec, buffer, own, slots, compile_only=compile_only, **options)

    monkeypatch.setattr(engine().programs, "decode", note)
    return seen


def test_widths():
    assert [widths_of(n) for n in (1, 2, 3, 8, 16, 32, 64)] == [
        (1,), (2,), (1, 3), (1, 8), (1, 4, 16), (1, 4, 32), (1, 4, 16, 64),
    ]  # fmt: skip


@pytest.mark.parametrize("ways", [(CHAIN, SAMPLED), (ADAPTIVE,), (MTP,)], ids=["sampled", "auto", "mtp"])
def test_requests_that_come_and_go_get_what_they_get_alone(ways, widths):
    """Up to all slots at once, in slots that become free in any order, some cancelled, some preempted."""
    rng = random.Random(7)
    one = scheduler(pages=24, lazy=True)
    asked: dict[Request, tuple[int, SamplingParams]] = {}
    done: dict[Request, list[int]] = {}
    step = 0
    while len(asked) < 24 or one.busy:
        if len(asked) < 24 and (rng.random() < 0.3 or not one.busy):
            way = rng.choice(ways)
            for _ in range(rng.choice((1, 1, 1, SLOTS))):
                params = dataclasses.replace(way, max_new_tokens=rng.choice((1, 30)))
                ask = rng.choice((3, 40)), params
                request = engine().request(text(ask[0]), ask[1])
                one.submit(request)
                asked[request] = ask
        if rng.random() < 0.03 and one.busy:
            one.cancel(rng.choice([r for r in asked if r not in done]))
        done |= {r: chunk.completion.token_ids for r, chunk in one.step() if chunk.completion is not None}
        one.check()
        step += 1
        assert step < 1000
    assert len(done) >= 20 and {1, SLOTS} <= set(widths)
    for request, ids in done.items():
        assert ids == alone(*asked[request])
    one.close()


def test_a_request_is_not_moved_and_costs_a_round_of_its_own_width(widths):
    """The first to come is the last to stay, in a slot of a middle number."""
    one = scheduler()
    short, long = (dataclasses.replace(CHAIN, max_new_tokens=n) for n in (2, 60))
    requests = [engine().request(text(17), long if i == 3 else short) for i in range(SLOTS)]
    for request in requests:
        one.submit(request)
    emitted = []
    while one.busy:
        emitted += [i for r, chunk in one.step() if r is requests[3] for i in chunk.token_ids]
        assert requests[3].slot in (None, 3)
    assert widths[-5:] == [1] * 5
    assert emitted == alone(17, long)
    one.close()


def test_the_other_slots_stay_as_they_are():
    """Bit for bit, and those beside the request in its round too."""
    one = scheduler()
    requests = [engine().request(text(n), CHAIN) for n in (5, 17, 33)]
    for request in requests:
        one.submit(request)
    while not all(r.decoding for r in requests):
        one.step()
    state = one._state
    assert state is not None
    before = jax.device_get(state)
    spec = one._full_spec(requests[1].spec)
    own = np.arange(SLOTS) == 1
    result = engine().programs.decode(state, None, spec, one._buffer(spec), own, [1, 0, 4, 2])
    assert result is not None
    after, (output, histogram) = jax.device_get(result[0]), result[1][0].fetch()
    assert output.count.shape == (4,) and histogram.shape[0] == 4
    assert output.count[0] > 0 and not output.count[1:].any()
    assert after.lengths[1] == before.lengths[1] + output.count[0]
    others = ~own
    names = ("lengths", "taps", "num_taps", "active", "anchor")
    rows = [(getattr(before, name), getattr(after, name), 0) for name in names]
    rows += [(getattr(before.cache, name), getattr(after.cache, name), 1) for name in ("recurrent", "conv")]
    for old, new, axis in rows:
        np.testing.assert_array_equal(np.compress(others, old, axis), np.compress(others, new, axis))
    mine = set(before.block_tables[1].tolist())
    apart = [page for page in range(before.cache.kv.shape[1]) if page not in mine]
    np.testing.assert_array_equal(before.cache.kv[:, apart], after.cache.kv[:, apart])
    np.testing.assert_array_equal(before.cache.draft_kv[:, apart], after.cache.draft_kv[:, apart])


def test_slots_taken_out_and_put_back():
    state = engine().new_state(SLOTS, 512, 8, engine().spec_of(TREE, 512))
    filled = jax.tree.map(lambda x: np.arange(x.size).reshape(x.shape).astype(x.dtype), state)
    slots = np.asarray([4, 1, 2])
    part = take_slots(jax.tree.map(jax.numpy.asarray, filled), slots)
    assert part.lengths.tolist() == filled.lengths[slots].tolist()
    np.testing.assert_array_equal(part.cache.recurrent, filled.cache.recurrent[:, slots])
    back = put_slots(jax.tree.map(jax.numpy.asarray, filled), part, slots)
    jax.tree.map(np.testing.assert_array_equal, back, filled)
    # Every field with a row a slot has been thought of.
    for field in dataclasses.fields(part):
        if field.name != "cache":
            assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(getattr(part, field.name)))


def test_caches_are_written_in_place():
    one = scheduler()
    one.submit(engine().request(text(5), CHAIN))
    one.step()
    one.close()
    found = 0
    for (name, static, shapes, _), program in engine().programs.compiled.items():
        if name == "decode" and static[3:5] == (1, True):
            whole = sum(np.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)
            assert program.memory_analysis().alias_size_in_bytes >= 0.99 * whole
            found += 1
    assert found


def test_a_budget_is_chosen_by_the_time_of_rounds_of_this_width():
    """The chain pays alone, where a round costs its weights, and not among many, where it costs its rows."""
    few, many = (LatencyCurve((0, 7, 15), seconds) for seconds in ((1.0, 1.1, 2.0), (1.0, 6.0, 12.0)))
    controller = BudgetController({1: few, 16: many})
    three = Evidence(np.asarray([[1, 1, 3, 3, 1, 3, 3]], np.float32))
    for _ in range(10):  # texts of which drafts bring three tokens a round, and larger trees no more
        controller.observe(2, three)
    chosen = {}
    for width in (1, 16, 1):
        controller.use(width)
        assert controller.curve is (few if width == 1 else many)
        np.testing.assert_allclose(controller.steering().seconds, controller.curve.seconds)  # bursts choose by it too
        chosen[width] = controller.next()
    assert chosen == {1: 1, 16: 0}

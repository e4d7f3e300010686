"""Requests at random over few slots, pages and kept prefixes: each gets its own text, and what is kept is what it says.

Prompts share beginnings and end on, before and behind the end of a page; pages run out while texts grow; some requests
are cancelled, in the queue, in the middle of a prompt or of a text, and begin again.
"""

import dataclasses
import functools
import random

import numpy as np
import pytest

from dflash_jax import SamplingParams
from dflash_jax.flights import Request
from dflash_jax.scheduler import Scheduler
from tests.test_prefix_cache import AR, MTP, PAGE, TREE, engine, text

PENALISED = dataclasses.replace(AR, temperature=0.9, seed=4, repetition_penalty=1.5, frequency_penalty=0.3)
DRAWN = dataclasses.replace(PENALISED, method="ddtree", tree_budget=7)
ADAPTIVE = dataclasses.replace(TREE, tree_budget="auto")
LENGTHS = (2 * PAGE, 2 * PAGE + 1, 8 * PAGE, 161)
SHARED = (PAGE, 40, 200)
SLOTS, CAPACITY, PAGES, PLACES = 4, 512, 24, 4
Ask = tuple[int, int, SamplingParams]


def make(prefixes: int, lazy: bool = True) -> Scheduler:
    return Scheduler(
        engine(), SLOTS, CAPACITY, pages=PAGES, burst=1, interleave=True, few_programs=True, lazy=lazy,
        narrow=True, prefixes=prefixes,
    )  # fmt: skip


def prompt(length: int, shared: int) -> list[int]:
    """So many tokens, of which the first `shared` (at most) are those of all others."""
    return [*text(200)[: min(shared, length)], *text(length, length + shared)][:length]


@functools.cache
def alone(length: int, shared: int, params: SamplingParams) -> list[int]:
    """Its text with nothing beside it and nothing kept, of a fixed budget."""
    one = make(0)
    one.submit(engine().request(prompt(length, shared), dataclasses.replace(params, tree_budget=7)))
    ids = [i for _ in iter(lambda: one.busy, False) for _, chunk in one.step() for i in chunk.token_ids]
    one.close()
    return ids


def check_kept(one: Scheduler, known: dict[bytes, tuple[list[int], tuple[bool, bool]]]) -> None:
    """Pages and states of all kept prefixes are those of a request that has just read them."""
    assert one.prefixes is not None
    for key, kept in one.prefixes._kept.items():
        tokens, (drafts, mtp) = known[key]
        assert kept.tokens == len(tokens) == PAGE * len(kept.pages)
        fresh = make(PLACES)
        assert fresh.prefixes is not None
        params = dataclasses.replace(MTP if mtp else TREE if drafts else AR, max_new_tokens=1)
        fresh.submit(engine().request([*tokens, 0], params))
        while fresh.busy:
            fresh.step()
        own = fresh.prefixes._kept[key]

        def parts(of: Scheduler, prefix=kept, drafts=drafts, mtp=mtp) -> list[np.ndarray]:
            assert of._state is not None and of._store is not None
            cache, store = of._state.cache, of._store
            found = [cache.kv[:, list(prefix.pages)]]
            if drafts:
                assert cache.draft_kv is not None
                context = np.asarray(cache.draft_kv[:, list(prefix.pages)])
                context = context.reshape(context.shape[0], -1, *context.shape[3:])
                found.append(context[:, : -1 if mtp else None])  # its last entry: see `prefix_cache`
            found += [store.cache.recurrent[:, prefix.place], store.cache.conv[:, prefix.place]]
            if mtp:
                assert store.taps is not None
                found.append(store.taps[prefix.place, 0])
            return [np.asarray(x) for x in found]

        for mine, theirs in zip(parts(one), parts(fresh, own), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-3)
        fresh.close()


def soak(seed: int, ways: tuple[SamplingParams, ...], steps: int) -> tuple[int, int]:
    """Random requests for so many steps, then until all have ended; prompt tokens not read again, and preemptions."""
    rng = random.Random(seed)
    one = make(PLACES, lazy=rng.random() < 0.8)
    assert one.prefixes is not None
    known, keys_of = {}, one.prefixes.keys

    def note(tokens: list[int], kind: tuple[bool, bool]) -> list[bytes]:
        keys = keys_of(tokens, kind)
        known.update({key: (list(tokens[: (i + 1) * PAGE]), kind) for i, key in enumerate(keys)})
        return keys

    one.prefixes.keys = note  # type: ignore[method-assign, assignment]
    asks: dict[Request, Ask] = {}
    texts: dict[Request, list[int]] = {}
    open_, cached, step = [], 0, 0
    while step < steps or one.busy:
        if step < steps and len(open_) < 7 and rng.random() < 0.4:
            ask = rng.choice(LENGTHS), rng.choice(SHARED), rng.choice(ways)
            for _ in range(rng.choice((1, 1, 2))):
                request = engine().request(prompt(*ask[:2]), ask[2])
                one.submit(request)
                open_.append(request)
                asks[request], texts[request] = ask, []
        if open_ and rng.random() < 0.05:
            one.cancel(open_.pop(rng.randrange(len(open_))))
            one.check()
        for request, chunk in one.step():
            assert request in open_
            texts[request] += chunk.token_ids
            if chunk.completion is not None:
                open_.remove(request)
                assert texts[request] == chunk.completion.token_ids == alone(*asks[request]), (seed, asks[request])
                cached += chunk.completion.cached_tokens
        one.check()
        step += 1
        assert step < 50 * steps, "it never comes to rest"
    assert not open_
    check_kept(one, known)
    one.close()
    assert one.pool.free == PAGES
    return cached, one.preemptions


def longer(*ways: SamplingParams) -> tuple[SamplingParams, ...]:
    return tuple(dataclasses.replace(params, max_new_tokens=n) for params in ways for n in (1, 70))


def test_a_few() -> None:
    found = [soak(seed, longer(TREE), 60) for seed in range(6)]
    assert sum(cached for cached, _ in found) > 0 and sum(preempted for _, preempted in found) > 0


@pytest.mark.slow
@pytest.mark.parametrize("ways", [(TREE, AR, DRAWN), (TREE, MTP), (ADAPTIVE, PENALISED, MTP, TREE)], ids=len)
def test_many(ways: tuple[SamplingParams, ...]) -> None:
    found = [soak(seed, longer(*ways), 150) for seed in range(10)]
    assert sum(cached for cached, _ in found) > 0 and sum(preempted for _, preempted in found) > 0

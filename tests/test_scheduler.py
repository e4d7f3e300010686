"""Requests that come, go and are cancelled at any time get the tokens they get alone, and nothing leaks."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from dflash_jax import Chunk, Completion, Engine, SamplingParams, UserError
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.round import DecodeState
from dflash_jax.sampling import SamplingNeeds
from dflash_jax.scheduler import Request, Scheduler
from dflash_jax.tokenizer import Tokenizer
from tests.models import VOCAB, random_drafter, random_mtp, random_target

AR = SamplingParams(max_new_tokens=24, method="ar", ignore_eos=True)
CHAIN = dataclasses.replace(AR, method="dflash")
TREE = dataclasses.replace(AR, method="ddtree", tree_budget=7)
MTP = dataclasses.replace(AR, method="mtp")


@functools.cache
def engine() -> Engine:
    """Random models, whose drafts are mostly wrong, and a draft head beside the drafter."""
    target = random_target(3)
    tokenizer = Tokenizer.from_folder(BUNDLED_TARGET)
    return Engine(target, random_drafter(target), tokenizer, max_slots=2, prefill_chunk=16, mtp=random_mtp(target))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


@functools.cache
def alone(length: int, params: SamplingParams) -> Completion:
    return engine().generate([prompt(length)], params)[0]


def scheduler(pages: int | None = None, interleave: bool = True) -> Scheduler:
    return Scheduler(engine(), 2, 512, pages=pages, burst=1, interleave=interleave)


def submit(to: Scheduler, length: int, params: SamplingParams) -> Request:
    request = engine().request(prompt(length), params)
    to.submit(request)
    return request


def run(
    one: Scheduler, until: Callable[[], bool] = lambda: False, limit: int = 400
) -> list[tuple[Request, Chunk]]:
    """Steps, with everything checked after each, until nothing is left to do."""
    chunks = []
    for _ in range(limit):
        if until() or not one.busy:
            return chunks
        chunks += one.step()
        one.check()
    raise AssertionError("the scheduler never comes to rest")


def completions(chunks: list[tuple[Request, Chunk]]) -> dict[Request, Completion]:
    return {request: chunk.completion for request, chunk in chunks if chunk.completion is not None}


def at_rest(one: Scheduler) -> bool:
    return (one.running, one.waiting, one.pool.free) == (0, 0, one.pool.pages)


SAMPLED = dataclasses.replace(TREE, temperature=0.9, seed=5, logprobs=2, top_p=0.9)
PENALISED = dataclasses.replace(AR, temperature=1.1, seed=6, presence_penalty=0.8, logit_bias=((7, 2.0),))
ARRIVALS = [  # step, prompt length, parameters, step at which it is cancelled
    (0, 40, TREE, None),
    (0, 3, AR, None),
    (2, 20, CHAIN, 4),
    (5, 33, SAMPLED, None),
    (6, 70, CHAIN, None),
    (6, 5, PENALISED, None),
    (9, 50, TREE, 60),
    (14, 17, SAMPLED, 30),
    (40, 3, dataclasses.replace(AR, max_new_tokens=1), None),
]


def test_requests_that_come_and_go_get_what_they_get_alone() -> None:
    """Methods, prompts in pieces, seeds and cancellations in two slots; sampling joins a batch that is greedy."""
    one = scheduler()
    cancelled, chunks, step, left = {}, [], 0, list(ARRIVALS)
    requests: dict[Request, tuple[int, SamplingParams]] = {}
    together = set()
    while left or one.busy:
        while left and left[0][0] <= step:
            _, length, params, end = left.pop(0)
            request = submit(one, length, params)
            requests[request] = (length, params)
            if end is not None:
                cancelled[request] = end
        for request in [r for r, end in cancelled.items() if end == step]:
            one.cancel(request)
            assert request.slot is None and request.pages == []
        chunks += one.step()
        one.check()
        together.add(frozenset(r.params.method for r in one._running.values() if r.decoding))
        step += 1
        assert step < 500
    assert at_rest(one) and {"ar", "ddtree"} in together
    done = completions(chunks)
    finished = [r for r in requests if r not in cancelled or r in done]
    assert len(finished) >= len(requests) - 3 and set(done) == set(finished)
    for request in finished:
        expected = alone(*requests[request])
        own = [chunk for r, chunk in chunks if r is request]
        assert [i for chunk in own for i in chunk.token_ids] == done[request].token_ids == expected.token_ids
        assert "".join(chunk.text for chunk in own) == expected.text
        assert done[request].rounds == expected.rounds  # the drafts were as good as alone
        if request.params.logprobs is not None:
            assert [p for chunk in own for p in chunk.logprobs] == done[request].logprobs
            assert [p.token_id for p in done[request].logprobs] == expected.token_ids
    one.close()


def test_a_long_prompt_stalls_nobody() -> None:
    one = scheduler()
    first = submit(one, 3, AR)
    run(one, lambda: first.decoding)
    long = submit(one, 300, AR)
    chunks = []
    run(one, lambda: long.prefilled > 0)
    while not long.decoding:  # 300 tokens in pieces of 16
        before = long.prefilled
        chunks.append([r for r, _ in one.step()])
        assert long.prefilled > before
    assert sum(first in step for step in chunks) >= 15
    assert completions(run(one))[long].token_ids == alone(300, AR).token_ids


def test_prompts_first_where_decoding_may_wait() -> None:
    one = scheduler(interleave=False)
    first, long = submit(one, 3, AR), submit(one, 300, AR)
    chunks = run(one, lambda: long.decoding)
    assert [(r, len(c.token_ids)) for r, c in chunks] == [(first, 1)]  # that of its own prompt
    one.close()


@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode"])
def test_cancel_frees_slot_and_pages_at_once(stage: str) -> None:
    one = scheduler()
    stays = submit(one, 3, AR)
    others = [submit(one, 100, TREE) for _ in range(2)]
    goes = others[1] if stage == "waiting" else others[0]
    ready = {
        "waiting": lambda: one.waiting == 1 and others[0].slot is not None,
        "prefill": lambda: 0 < goes.prefilled < 100,
        "decode": lambda: goes.decoding and len(goes.checker.token_ids) > 3,
    }[stage]
    chunks = run(one, ready)
    assert one.busy
    free = one.pool.free
    one.cancel(goes)
    one.check()
    assert (one.running, one.waiting) == ((2, 0) if stage == "waiting" else (1, 1))
    assert one.pool.free == free + (0 if stage == "waiting" else one.pool.pages_for(124))
    one.cancel(goes)  # twice is once
    chunks += run(one)
    done = completions(chunks)
    assert set(done) == {stays, *others} - {goes} and at_rest(one)
    assert done[stays].token_ids == alone(3, AR).token_ids
    survivor = next(r for r in others if r is not goes)
    assert done[survivor].token_ids == alone(100, TREE).token_ids
    one.cancel(stays)  # it has ended: nothing happens
    one.check()
    one.close()


def test_admission_waits_for_pages_in_order() -> None:
    """Three pages: a request of two blocks the next of two, and a small one behind does not overtake it."""
    one = scheduler(pages=3)
    first, second, small = submit(one, 100, TREE), submit(one, 101, TREE), submit(one, 3, TREE)
    one.step()
    assert (first.slot, second.slot, small.slot) == (0, None, None) and one.pool.free == 1
    done = completions(run(one))
    assert list(done) == [first, small, second] or list(done) == [first, second, small]
    for request, length in ((first, 100), (second, 101), (small, 3)):
        assert done[request].token_ids == alone(length, TREE).token_ids
    assert at_rest(one)
    with pytest.raises(UserError, match="--prompt has 200 tokens, with --max-new-tokens 24 more than the 192"):
        submit(one, 200, AR)
    assert at_rest(one)
    one.close()


def test_a_state_of_another_kind_waits_for_its_turn() -> None:
    """The draft head's state is not the drafter's. Autoregressive requests fit in either."""
    one = scheduler()
    order = [submit(one, 20, params) for params in (TREE, MTP, AR, CHAIN)]
    tree, mtp, ar, chain = order
    seen = set()

    def note() -> bool:
        seen.add(frozenset(r for r in order if r.slot is not None))
        return False

    done = completions(run(one, note))
    assert {frozenset((tree, mtp)), frozenset((mtp, chain))}.isdisjoint(seen) and {mtp, ar} in seen
    for request in order:
        expected = alone(20, request.params)
        assert done[request].token_ids == expected.token_ids and done[request].rounds == expected.rounds
    one.close()


def test_a_preempted_request_goes_on_with_its_text() -> None:
    """Two texts of four pages each in five pages: the younger one begins again, sampling and penalties as they were."""
    params = dataclasses.replace(TREE, max_new_tokens=150, temperature=1.1, frequency_penalty=0.7, logprobs=1)
    lengths = (100, 90, 20)

    def make() -> Scheduler:
        return Scheduler(engine(), 2, 512, pages=5, burst=1, interleave=True, lazy=True)

    def ask(to: Scheduler, length: int) -> Request:
        return submit(to, length, dataclasses.replace(params, seed=length))

    expected = {}
    for length in lengths:
        one = make()
        request = ask(one, length)
        expected[length] = completions(run(one))[request]
        assert one.preemptions == 0
        one.close()
    one = make()
    requests = {length: ask(one, length) for length in lengths}
    slots: list[int | None] = []

    def note() -> bool:
        slots.append(requests[100].slot)
        return False

    chunks = run(one, note, limit=1000)
    done = completions(chunks)
    assert one.preemptions > 0 and at_rest(one)
    assert len({slot for slot in slots if slot is not None}) == 1  # the oldest stays where it is
    for length, request in requests.items():
        own = [chunk for r, chunk in chunks if r is request]
        assert [i for chunk in own for i in chunk.token_ids] == expected[length].token_ids
        assert done[request].text == expected[length].text
        assert [p.token_id for p in done[request].logprobs or []] == expected[length].token_ids
        rounds = done[request].rounds
        assert sum(done[request].accepted_length_histogram) == sum(done[request].tree_budgets.values()) == rounds
        assert abs(rounds - expected[length].rounds) <= 3 * one.preemptions  # a prompt that is read emits a token too
    one.close()


def test_with_few_programs_whoever_drafts_can_join() -> None:
    """An autoregressive request that was there first has the drafter's state, and needs are rounded up."""
    one = engine().scheduler(2, 512, burst=1, interleave=True, few_programs=True)
    first = submit(one, 3, AR)
    run(one, lambda: first.decoding)
    second = submit(one, 20, dataclasses.replace(CHAIN, temperature=0.9, seed=5, top_p=0.9, logit_bias=((7, 2.0),)))
    run(one, lambda: second.decoding)
    assert first.slot is not None and one.needs == SamplingNeeds(True, True, True)
    done = completions(run(one))
    assert done[first].token_ids == alone(3, AR).token_ids
    assert done[second].token_ids == alone(20, second.params).token_ids
    one.close()


def test_needs_grow_while_slots_are_in_use_and_shrink_after() -> None:
    one = scheduler()
    plain = submit(one, 3, AR)
    run(one, lambda: plain.decoding)
    assert one.needs is None
    sampled = submit(one, 3, PENALISED)
    run(one, lambda: sampled.slot is not None)
    assert one.needs == SamplingNeeds(penalties=True, bias=True)
    done = completions(run(one))
    assert done[plain].token_ids == alone(3, AR).token_ids
    assert done[sampled].token_ids == alone(3, PENALISED).token_ids
    submit(one, 3, AR)
    one.step()
    assert one.needs is None
    one.close()


@pytest.mark.parametrize("what", ["page", "slot", "active", "table"])
def test_the_check_sees_what_is_wrong(what: str) -> None:
    one = scheduler()
    request = submit(one, 20, AR)
    run(one, lambda: request.decoding)
    state = one._state
    assert state is not None and request.slot is not None
    if what == "page":
        request.pages.pop()
    elif what == "slot":
        del one._running[request.slot]
    elif what == "active":
        one._state = dataclasses.replace(state, active=state.active.at[1].set(True))
    else:
        one._state = dataclasses.replace(state, block_tables=state.block_tables + 1)
    with pytest.raises(RuntimeError, match=r"page|slot"):
        one.check()


@pytest.mark.parametrize("params", [TREE, MTP])
def test_rounds_for_one_slot_leave_the_other_as_it_was(params: SamplingParams) -> None:
    """To the bit: the taps that wait to become draft context too, which a wrong draft would not show in the text."""
    one = scheduler()
    first, second = submit(one, 3, params), submit(one, 20, params)
    run(one, lambda: first.decoding and second.decoding)
    one.step()
    state = one._state
    assert state is not None and second.slot == 1

    def second_slot(now: DecodeState) -> list[np.ndarray]:
        pages = [now.cache.kv[:, second.pages], now.cache.draft_kv[:, second.pages]]
        states = [now.cache.recurrent[:, 1], now.cache.conv[:, 1]]
        rest = dataclasses.replace(now, cache=None)
        return jax.device_get([*pages, *states, *(leaf[1] for leaf in jax.tree.leaves(rest))])

    before, lengths = second_slot(state), np.asarray(state.lengths)
    assert np.asarray(state.num_taps)[1] > 0
    result = engine().programs.decode(state, 2, one._full_spec(first.spec), 256, [True, False])
    assert result is not None
    for old, new in zip(before, second_slot(result[0]), strict=True):
        np.testing.assert_array_equal(old, new)
    assert np.asarray(result[0].lengths)[0] > lengths[0]


def test_an_adaptive_budget_among_others_and_while_prompts_come() -> None:
    """It waits for free slots once, to time its rounds; then it shares slots with other methods."""
    adaptive = dataclasses.replace(TREE, tree_budget="auto")
    one = scheduler()
    one.engine.controllers.clear()
    first = submit(one, 3, AR)
    chunks = run(one, lambda: first.decoding)
    auto = submit(one, 40, adaptive)
    chunks += run(one, lambda: auto.slot is not None)
    assert first in completions(chunks) and len(one.engine.controllers) == 1
    seen = []
    controller = one.engine.controllers[one.curve_key(auto.spec)]
    controller.curve = dataclasses.replace(controller.curve, seconds=(9.0, 1.0, 1.0, 1.0))  # drafts pay
    observe = controller.observe
    controller.observe = lambda index, evidence: seen.append(evidence.rounds) or observe(index, evidence)  # type: ignore[method-assign]
    order = [submit(one, *pair) for pair in ((20, CHAIN), (70, adaptive))]
    together = set()

    def note() -> bool:
        together.add(frozenset(r.params.method for r in [*order, auto] if r.slot is not None and r.decoding))
        return False

    done = completions(chunks + run(one, note))
    assert {"dflash", "ddtree"} in together
    for request, length in ((first, 3), (auto, 40), *zip(order, (20, 70), strict=True)):
        assert done[request].token_ids == alone(length, dataclasses.replace(request.params, tree_budget=7)).token_ids
    for request in (auto, order[1]):
        assert sum(done[request].tree_budgets.values()) == done[request].rounds
        assert max(done[request].tree_budgets) > 0  # it did draft
    # What other methods' rounds reach is not its evidence.
    assert 0 < sum(int(rounds.sum()) for rounds in seen) <= done[auto].rounds + done[order[1]].rounds + 4
    one.engine.controllers.clear()
    one.close()

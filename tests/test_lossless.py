"""Speculative decoding emits exactly the autoregressive tokens (fp32), alone and in a batch, for every method."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax
from dflash_jax import BestFirst, Engine, SamplingParams, SpineFirst
from dflash_jax.loading import BUNDLED_PROMPTS, BUNDLED_TARGET
from dflash_jax.prompts import encode_prompt, read_prompt_file
from dflash_jax.tokenizer import Tokenizer
from pallas_kernels import tree_search
from pallas_kernels.gdn_scan import path_kernel
from pallas_kernels.gdn_scan.configs import TreeConfig
from pallas_kernels.tree_search import search_kernel
from tests.models import VOCAB, random_drafter, random_target

AR = SamplingParams(max_new_tokens=48, method="ar", ignore_eos=True)
CHAIN = dataclasses.replace(AR, method="dflash")
TREE = dataclasses.replace(AR, method="ddtree", tree_budget=16)


def new_engine() -> Engine:
    """Random models, whose drafts are mostly wrong: every kind of round happens."""
    target = random_target(3)
    return Engine(
        target, random_drafter(target), Tokenizer.from_folder(BUNDLED_TARGET), max_slots=4, prefill_chunk=32
    )


engine = functools.cache(new_engine)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in (1, 31, 32, 33, 100)]


@functools.cache
def expected() -> list[list[int]]:
    return [engine().generate([prompt], AR)[0].token_ids for prompt in prompts()]


def test_random_models_are_a_fair_test() -> None:
    """Texts vary, so equal tokens mean something."""
    assert len({tuple(ids) for ids in expected()}) == len(expected())
    assert all(len(set(ids)) > 8 for ids in expected())


@pytest.mark.parametrize(
    "params",
    [CHAIN, dataclasses.replace(CHAIN, block_size=3), TREE, dataclasses.replace(TREE, tree_budget=1)],
)
def test_every_method_equals_autoregressive(params: SamplingParams) -> None:
    results = [engine().generate([prompt], params)[0] for prompt in prompts()]
    assert [r.token_ids for r in results] == expected()
    for r in results:
        assert sum(r.accepted_length_histogram) == r.rounds
        assert sum(n * c for n, c in enumerate(r.accepted_length_histogram)) == r.completion_tokens - 1
        assert r.finish_reason == "length" and r.completion_tokens == 48


@pytest.mark.parametrize("params", [AR, TREE])
def test_a_batch_equals_each_prompt_alone(params: SamplingParams) -> None:
    """Five prompts on four slots: lengths differ, and one slot is used twice."""
    assert [r.token_ids for r in engine().generate(prompts(), params)] == expected()


def test_best_first_is_lossless_too() -> None:
    engine().policy = BestFirst()
    try:
        assert [engine().generate([p], TREE)[0].token_ids for p in prompts()] == expected()
    finally:
        engine().policy = SpineFirst()


def test_the_delta_rule_by_paths_is_lossless_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search's kernel gives paths, the round hands them to every layer, and a kernel takes them: interpreted."""
    config, taken = TreeConfig(16, 16, 16, "ieee", num_stages=1), []
    usual, search = dflash_jax.deltanet.tree_delta_rule, search_kernel.search

    def by_paths(*operands: Any, layer: int, paths: jax.Array | None, **rest: Any) -> Any:
        if paths is None:  # a round without a draft
            return usual(*operands, layer=layer, paths=paths, **rest)
        taken.append(layer)
        place = jnp.array([layer], jnp.int32)
        return path_kernel.tree_delta_rule(*operands[:-1], place, paths, config=config, interpret=True)

    monkeypatch.setattr(dflash_jax.deltanet, "tree_delta_rule", by_paths)
    monkeypatch.setattr(dflash_jax.round, "path_rows", lambda *_: 16)
    monkeypatch.setattr(tree_search, "search_serves", lambda *_: True)
    monkeypatch.setattr(tree_search, "search", functools.partial(search, interpret=True))
    engine = new_engine()
    assert [engine.generate([p], TREE)[0].token_ids for p in prompts()] == expected()
    assert set(taken) == {0, 1, 2}


def test_limits_of_different_length_in_one_batch() -> None:
    """Requests that end inside an accepted block free their slots without touching their neighbours."""
    params = [dataclasses.replace(TREE, max_new_tokens=n) for n in (1, 2, 48, 17, 30)]
    results = engine().generate(prompts(), params)
    for result, ids, p in zip(results, expected(), params, strict=True):
        assert result.token_ids == ids[: p.max_new_tokens]


def test_a_second_request_does_not_compile() -> None:
    engine().generate(prompts()[:1], TREE)
    assert engine().generate(prompts(7)[1:2], TREE)[0].compile_seconds == 0.0


def test_stop_token_anywhere_in_a_block() -> None:
    """Each token of the text in turn is made the stop token; ids end there, with the token included."""
    model = engine().target
    original = model.config
    try:
        for place in (0, 1, 5, 20):
            stop = expected()[3][place]
            first = expected()[3].index(stop)
            model.config = dataclasses.replace(original, eos_token_ids=(stop,))
            for params in (AR, TREE):
                result = engine().generate(prompts()[3:4], dataclasses.replace(params, ignore_eos=False))[0]
                assert result.token_ids == expected()[3][: first + 1]
                assert (result.finish_reason, result.stop) == ("stop", stop)
    finally:
        model.config = original


def test_a_request_that_its_first_token_stops_leaves_its_slot_at_rest() -> None:
    """Only the host sees a stop string. A slot that kept decoding would write into the next request's pages."""
    fresh = Engine(engine().target, None, engine().tokenizer, max_slots=4, prefill_chunk=32)
    rng = np.random.default_rng(5)
    short = [rng.integers(0, VOCAB, 3).tolist() for _ in range(3)] + [prompts()[3]]
    word = engine().tokenizer.decode(expected()[3][:1])
    assert word
    params = [AR] * 3 + [dataclasses.replace(AR, stop=(word,), max_new_tokens=200)]
    stopped = fresh.generate(short, params)[3]
    assert (stopped.finish_reason, stopped.stop, stopped.text) == ("stop", word, "")
    assert not any(np.asarray(state.active).any() for state in fresh._states.values())
    long = [rng.integers(0, VOCAB, 250).tolist(), *prompts()[:2]]
    alone = [engine().generate([p], AR)[0].token_ids for p in long]
    assert [r.token_ids for r in fresh.generate(long, AR)] == alone


def test_stream_equals_generate() -> None:
    chunks = list(engine().stream(prompts()[4], TREE))
    assert [i for chunk in chunks for i in chunk.token_ids] == expected()[4]
    assert chunks[-1].completion is not None and all(c.completion is None for c in chunks[:-1])
    assert "".join(c.text for c in chunks) == chunks[-1].completion.text
    assert len(chunks) > 3


def test_max_model_len_ends_the_text() -> None:
    small = Engine(engine().target, None, engine().tokenizer, max_model_len=40, prefill_chunk=32)
    result = small.generate([prompts()[2]], AR)[0]
    assert result.token_ids == expected()[2][:8] and result.finish_reason == "length"


@functools.cache
def bundled() -> Engine:
    return dflash_jax.load(dtype="float32", max_slots=8)


def check_bundled(count: int, tokens: int, budgets: tuple[int, ...], batch: int) -> None:
    entries = read_prompt_file(str(BUNDLED_PROMPTS))[:count]
    ids = [encode_prompt(bundled(), entry, chat=None, system=None, thinking=None) for entry in entries]
    base = SamplingParams(max_new_tokens=tokens, method="ar")
    methods = [base, dataclasses.replace(base, method="dflash")]
    methods += [dataclasses.replace(base, method="ddtree", tree_budget=b) for b in budgets]
    if bundled().mtp is not None:
        methods += [dataclasses.replace(base, method="mtp")]
    reference = [bundled().generate([p], base)[0] for p in ids]
    for params in methods[1:]:
        alone = [bundled().generate([p], params)[0] for p in ids]
        assert [r.token_ids for r in alone] == [r.token_ids for r in reference]
        assert sum(r.rounds for r in alone) < sum(r.rounds for r in reference)
    for params in methods:
        for start in range(0, len(ids), batch):
            together = bundled().generate(ids[start : start + batch], params)
            assert [r.token_ids for r in together] == [r.token_ids for r in reference[start : start + batch]]


def test_bundled_pair() -> None:
    check_bundled(count=3, tokens=48, budgets=(16,), batch=3)


@pytest.mark.slow
def test_bundled_pair_in_full() -> None:
    check_bundled(count=20, tokens=200, budgets=(1, 7, 16, 63), batch=5)

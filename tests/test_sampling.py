"""Sampling: filters against plain NumPy, the noise, seeds and batches, log-probabilities, what is refused.

`test_sampling_law.py` holds whole rounds to the exact law.
"""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax
from dflash_jax import Completion, Engine, SamplingParams, UserError, sampling
from dflash_jax.loading import BUNDLED_PROMPTS, BUNDLED_TARGET
from dflash_jax.prompts import encode_prompt, read_prompt_file
from dflash_jax.sampling import SamplingNeeds, SamplingState, slot_settings
from dflash_jax.target import Rows
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tree import root_only_tree
from tests.models import VOCAB, random_drafter, random_target
from tests.oracles import next_token_law

EVERYTHING = SamplingNeeds(filters=True, penalties=True, bias=True)
scores_of = jax.jit(sampling.next_token_scores)


def state_of(requests: list[SamplingParams], vocab: int) -> SamplingState:
    rows = [slot_settings(params, EVERYTHING, vocab) for params in requests]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


# ---------------------------------------------------------------- filters and noise


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.31, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.37, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.7, -0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.9]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (5, -100.0), (3, 0.25))]),
)
TOLD, SAID, WORDS = (5, 3, 0, 1), (6, 4, 0, 1), 32  # lengths of prompt and text in each of four slots


@hypothesis.given(st.lists(PARAMS, min_size=4, max_size=4), st.integers(0, 2**32 - 1), st.booleans())
@hypothesis.settings(max_examples=60, derandomize=True)
def test_distribution_against_numpy(requests: list[SamplingParams], seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (4, 1, WORDS)).astype(np.float32)
    if ties:  # equal values, also at the thresholds, and both zeros; scaled by powers of two they stay equal
        logits = np.copysign(np.round(np.abs(logits) / 2) * 2, logits)
        requests = [dataclasses.replace(params, temperature=0.5, repetition_penalty=2.0) for params in requests]
    prompt, text = rng.integers(0, WORDS, (4, 5)), rng.integers(0, WORDS, (4, 6))
    slots, order = jnp.arange(4), jnp.arange(5)
    state = state_of(requests, WORDS)
    state = sampling.count_prompt(state, slots, jnp.asarray(prompt), order < jnp.asarray(TOLD)[:, None])
    state = sampling.count_emitted(state, slots, jnp.asarray(text), jnp.asarray(SAID))
    scores = scores_of(jnp.asarray(logits), root_only_tree(slots), state)
    kept, got = np.isfinite(scores), np.asarray(sampling.probabilities(scores))
    for slot, params in enumerate(requests):
        past = prompt[slot, : TOLD[slot]].tolist(), text[slot, : SAID[slot]].tolist()
        want = next_token_law(logits[slot, 0], params, *past)
        if params.top_p < 1:  # where a hair more or less of top-p decides, either side is right
            hairs = [dataclasses.replace(params, top_p=params.top_p * s) for s in (1 - 1e-5, 1 + 1e-5)]
            low, high = (next_token_law(logits[slot, 0], hair, *past) > 0 for hair in hairs)
            if not np.array_equal(low, high):
                continue
        np.testing.assert_array_equal(kept[slot, 0], want > 0)
        np.testing.assert_allclose(got[slot, 0], want, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_only_batch_mates_need_changes_no_bit(temperature: float) -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 20, (1, 1, 300)), jnp.float32)
    state = state_of([SamplingParams(temperature=temperature)], 300)
    np.testing.assert_array_equal(scores_of(logits, root_only_tree(jnp.zeros((1,), jnp.int32)), state), logits)


def test_noise_depends_on_seed_position_token_and_stream_alone() -> None:
    state = state_of([SamplingParams(temperature=1.0, seed=s) for s in (5, 5, 5 + (1 << 40), 6)], 64)
    start = jnp.asarray([10, 12, 10, 10])
    noise = np.asarray(sampling.gumbel(state, 0, start, 4, 64))
    np.testing.assert_array_equal(noise[0, 2:], noise[1, :2])
    for other in (noise[2], noise[3], np.asarray(sampling.gumbel(state, 1, start, 4, 64))[0]):
        assert np.abs(noise[0] - other).min() > 0
    assert len(np.unique(noise[0])) == noise[0].size
    cold = dataclasses.replace(state, temperature=jnp.zeros((4,)))
    np.testing.assert_array_equal(sampling.gumbel(cold, 0, start, 2, 64), 0.0)


def test_noise_has_its_law_in_the_upper_tail() -> None:
    """P(noise > z) = 1 - exp(-exp(-z)); noise of 23 bits would have few values where a large vocabulary is decided."""
    state = state_of([SamplingParams(temperature=1.0, seed=s) for s in range(32)], 1 << 16)
    noise = np.asarray(sampling.gumbel(state, 0, jnp.zeros((32,), jnp.int32), 1, 1 << 16)).ravel()
    assert np.isfinite(noise).all()
    for z in (-2.0, 0.0, 3.0, 9.0, 11.0):
        expected = -np.expm1(-np.exp(-z)) * noise.size
        assert abs((noise > z).sum() - expected) < 5 * np.sqrt(expected)
    assert len(np.unique(noise[noise > 9.0])) > 0.99 * (noise > 9.0).sum()
    coins = np.asarray(sampling.uniform(state, 2, jnp.zeros((32,), jnp.int32), 4096)).ravel()
    assert coins.min() >= 0 and coins.max() < 1 and abs(coins.mean() - 0.5) < 0.005


# ---------------------------------------------------------------- seeds and batches


@functools.cache
def engine() -> Engine:
    """Random models, whose drafts are mostly wrong."""
    target = random_target(3)
    return Engine(target, random_drafter(target), Tokenizer.from_folder(BUNDLED_TARGET), max_slots=8, prefill_chunk=32)


PROMPTS = [np.random.default_rng(1).integers(0, VOCAB, length).tolist() for length in (3, 40, 33, 5, 17)]
BASE = SamplingParams(max_new_tokens=24, method="ar", ignore_eos=True, tree_budget=12)
MIXED = [
    dataclasses.replace(BASE, logprobs=0),
    dataclasses.replace(BASE, temperature=0.8, seed=2),
    dataclasses.replace(BASE, temperature=2.5, seed=3, top_p=0.9, top_k=40, min_p=0.001, logprobs=3),
    dataclasses.replace(BASE, temperature=1.2, seed=2**63, presence_penalty=1.0, repetition_penalty=1.2, logprobs=20),
    dataclasses.replace(BASE, frequency_penalty=5.0, logit_bias=((7, 9.0), (11, 9.0))),
]


@functools.cache
def together(method: str, **changes: object) -> list[Completion]:
    """Temperatures, filters, penalties, bias and greedy decoding in one round."""
    return engine().generate(PROMPTS, [dataclasses.replace(p, method=method, **changes) for p in MIXED])  # type: ignore[arg-type]


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_a_batch_draws_what_each_request_draws_alone() -> None:
    for i in (0, 2):  # without the parts of the program that only the others need
        assert engine().generate([PROMPTS[i]], MIXED[i])[0].token_ids == together("ar")[i].token_ids
    order = [3, 0, 4, 2, 1]  # in other slots
    moved = engine().generate([PROMPTS[i] for i in order], [MIXED[i] for i in order])
    assert ids_of(moved) == [together("ar")[i].token_ids for i in order]


def test_trees_draw_what_autoregressive_decoding_draws() -> None:
    assert ids_of(together("ddtree")) == ids_of(together("ar"))
    assert any(r.rounds < r.completion_tokens - 1 for r in together("ddtree"))


def test_seeds_and_parameters_matter() -> None:
    chosen = [MIXED[i] for i in (2, 2, 3, 3, 4)]
    chosen = [dataclasses.replace(params, seed=seed) for seed, params in enumerate(chosen)]
    texts = ids_of(engine().generate([PROMPTS[0]] * 5, chosen))
    assert len({tuple(ids) for ids in texts}) == 5
    biased = together("ar")[4].token_ids
    assert {7, 11} & set(biased)
    assert max(np.bincount(biased)) < len(biased) / 2  # against the frequency penalty a bias of 9 lasts two tokens


def test_drawn_drafts_do_not_depend_on_the_batch() -> None:
    drawn = together("dflash", draft_sampling="probabilistic")
    for i in (0, 4):  # temperature 0 is greedy
        assert drawn[i].token_ids == together("ar")[i].token_ids
    assert ids_of(drawn[1:4]) != ids_of(together("ar")[1:4])
    order = [2, 4, 3, 1, 0]
    params = [dataclasses.replace(MIXED[i], method="dflash", draft_sampling="probabilistic") for i in order]
    moved = engine().generate([PROMPTS[i] for i in order], params)
    assert ids_of(moved) == [drawn[i].token_ids for i in order]


@pytest.mark.parametrize("method", ["ar", "ddtree"])
def test_logprobs_are_the_models_own(method: str) -> None:
    """Against one causal pass over prompt and text: no temperature, filter, penalty or bias in them."""
    model = engine().target

    @jax.jit
    def own_log_probs(tokens: jax.Array, count: int) -> jax.Array:
        order = jnp.arange(len(tokens))[None]
        hidden = model(Rows(tokens[None], order, order < count), model.empty_context(1)).hidden
        return jax.nn.log_softmax(model.logits(hidden)[0])

    for i, (params, result) in enumerate(zip(MIXED, together(method), strict=True)):
        if params.logprobs is None:
            assert result.logprobs is None
            continue
        text = PROMPTS[i] + result.token_ids[:-1]
        expected = np.asarray(own_log_probs(jnp.asarray(text + [0] * (64 - len(text))), len(text)))
        assert result.logprobs is not None and [entry.token_id for entry in result.logprobs] == result.token_ids
        for entry, row in zip(result.logprobs, expected[len(PROMPTS[i]) - 1 : len(text)], strict=True):
            best = np.argsort(-row)[: params.logprobs]
            assert [token for token, _ in entry.top] == best.tolist()
            got = [entry.logprob, *(value for _, value in entry.top)]
            np.testing.assert_allclose(got, row[[entry.token_id, *best]], atol=1e-3)


def bundled_texts(methods: tuple[str, ...], alone: bool) -> None:
    pair = dflash_jax.load(dtype="float32", max_slots=4)
    entries = read_prompt_file(str(BUNDLED_PROMPTS))[:3]
    ids = [encode_prompt(pair, entry, chat=None, system=None, thinking=None) for entry in entries]
    base = SamplingParams(max_new_tokens=32, top_p=0.95, seed=4, tree_budget=16)
    params = [dataclasses.replace(base, temperature=t) for t in (0.7, 0.0, 1.2)]
    texts = []
    for method in methods:
        chosen = [dataclasses.replace(p, method=method) for p in params]
        results = pair.generate(ids, chosen)
        texts.append(ids_of(results))
        if method != "ar":
            assert sum(r.rounds for r in results) < 0.6 * sum(r.completion_tokens for r in results)
        if alone:
            texts.append([pair.generate([one], p)[0].token_ids for one, p in zip(ids, chosen, strict=True)])
    assert all(text == texts[0] for text in texts)


def test_bundled_pair_draws_one_text_a_seed() -> None:
    bundled_texts(("ar", "ddtree"), alone=False)


@pytest.mark.slow
def test_bundled_pair_draws_one_text_a_seed_alone_too() -> None:
    bundled_texts(("ar", "dflash", "ddtree"), alone=True)


def test_what_no_engine_can_serve() -> None:
    with pytest.raises(UserError, match="--logit-bias names token 96, outside the vocabulary of 96"):
        engine().generate([PROMPTS[0]], dataclasses.replace(BASE, logit_bias=((96, 1.0),)))
    with pytest.raises(UserError, match="--draft-sampling must be one of greedy, probabilistic"):
        SamplingParams(draft_sampling="both")  # type: ignore[arg-type]


def test_what_a_slot_goes_on_with_compiles_nothing():
    """Texts and prompts of any length: a server would stall for each new one."""
    params = SamplingParams(repetition_penalty=1.5)
    slot_settings(params, EVERYTHING, 50, [3], [4])
    with jax.no_tracing():
        row = slot_settings(params, EVERYTHING, 50, [3, 3, 5], [4, 9, 9, 9])
    assert row.penalties is not None
    assert np.flatnonzero(row.penalties.prompt).tolist() == [4, 9]
    assert {i: int(n) for i, n in enumerate(row.penalties.counts) if n} == {3: 2, 5: 1}

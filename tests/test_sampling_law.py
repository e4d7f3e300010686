"""Whole rounds draw texts from the exact law: 10^5 of them on a toy vocabulary, by chi-square.

The target and the drafter are tables; the loop, the tree, the rule, the walk and the commit are the product's.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import SamplingParams, acceptance, sampling
from dflash_jax import round as rounds
from dflash_jax.acceptance import reject_and_resample, sample
from dflash_jax.cache import Cache, RowUpdates
from dflash_jax.decoding import decode
from dflash_jax.round import DecodeState, RoundSpec
from dflash_jax.sampling import DRAFT_STREAM, SamplingNeeds, SamplingState, slot_settings, tempered
from dflash_jax.sharding import Vocabulary
from dflash_jax.target import TargetOutput
from dflash_jax.tree import BestFirst, Tree, chain_tree
from tests.oracles import next_token_law

pytestmark = pytest.mark.usefixtures("optimised")

WORDS, LENGTH, DRAWS = 8, 4, 100_000
PROMPT, ANCHOR = [6, 1], 3
EVERYTHING = SamplingNeeds(filters=True, penalties=True, bias=True)

SETTINGS = {
    "0.5": SamplingParams(
        temperature=0.5, min_p=0.02, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.3,
        logit_bias=((2, 0.7),),
    ),
    "1.0": SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=-0.6, frequency_penalty=0.9),
    "1.5": SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.2, repetition_penalty=1.5),
}  # fmt: skip
PLAIN = SamplingParams(temperature=1.0)
SPECS = {
    "ar": RoundSpec(0, rule=sample),
    "chain": RoundSpec(3, 4, rule=sample),
    "sampled chain": RoundSpec(3, 4, rule=reject_and_resample, sampled_draft=True),
    **{f"tree of {budget}": RoundSpec(budget, 4, BestFirst(), rule=sample) for budget in (3, 7, 15)},
}


@functools.cache
def tables() -> tuple[np.ndarray, np.ndarray]:
    """Logits: the target's by (position modulo 4, token); the drafter's by (depth - 1, anchor)."""
    rng = np.random.default_rng(11)
    target = rng.normal(0, 1.6, (4, WORDS, WORDS))
    return target.astype(np.float32), (target + rng.normal(0, 0.9, target.shape)).astype(np.float32)


class ToyTarget:
    """Hidden states are row numbers of the tables."""

    config = types.SimpleNamespace(vocab_size=WORDS)
    vocabulary = Vocabulary()

    def embed(self, tokens: jax.Array) -> jax.Array:
        return tokens[..., None].astype(jnp.float32)

    def logits(self, hidden: jax.Array, implementation: str = "xla") -> jax.Array:
        table = jnp.asarray(np.concatenate([t.reshape(-1, WORDS) for t in tables()]))
        return table[hidden[..., 0].astype(jnp.int32)]

    def __call__(self, rows, context, *, taps, implementation) -> TargetOutput:
        batch, count = rows.tokens.shape
        hidden = (rows.positions % 4 * WORDS + rows.tokens)[..., None].astype(jnp.float32)
        updates = RowUpdates(
            kv=jnp.zeros((0, batch, count, 2, 1, 1)), conv_inputs=jnp.zeros((0, batch, count, 1)),
            final_state=None, keys=None, innovations=None, path_decay=None,
        )  # fmt: skip
        return TargetOutput(hidden, jnp.zeros((batch, count, 1)) if taps else None, updates)


class ToyDrafter:
    """Marginals that depend on the anchor, as a block-diffusion drafter's do."""

    config = types.SimpleNamespace(mask_token_id=0, target_layer_ids=(0,))

    def context_kv(self, taps: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.zeros((1, *taps.shape[:2], 2, 1, 1))

    def __call__(self, block, pages, tables, lengths, *, implementation) -> jax.Array:
        depth = jnp.maximum(jnp.arange(block.shape[1]) - 1, 0)
        return (4 * WORDS + depth * WORDS + block[:, :1, 0].astype(jnp.int32))[..., None].astype(jnp.float32)


def toy_state(state: SamplingState, drafted: bool) -> DecodeState:
    """Every slot at the anchor behind the prompt."""
    count = state.temperature.shape[0]
    slots, zeros = jnp.arange(count), jnp.zeros((count,), jnp.int32)
    state = sampling.count_prompt(state, slots, jnp.tile(jnp.asarray([PROMPT]), (count, 1)), jnp.ones((count, 2), bool))
    state = sampling.count_emitted(state, slots, zeros[:, None] + ANCHOR, zeros + 1)
    cache = Cache(
        kv=jnp.zeros((0, 1, 1, 2, 1, 1)), recurrent=jnp.zeros((0, count, 1, 1, 1)), conv=jnp.zeros((0, count, 0, 1)),
        draft_kv=jnp.zeros((1, 1, 1, 2, 1, 1)),
    )  # fmt: skip
    return DecodeState(
        cache=cache, block_tables=zeros[:, None], lengths=zeros + len(PROMPT), anchor=zeros + ANCHOR,
        taps=jnp.zeros((count, LENGTH, 1)) if drafted else None, num_taps=zeros, active=jnp.ones((count,), bool),
        remaining=zeros + LENGTH, stop_ids=zeros[:, None] - 1, histogram=jnp.zeros((count, LENGTH + 1), jnp.int32),
        sampling=state,
    )  # fmt: skip


def compile_rounds(spec: RoundSpec) -> Callable[[SamplingState], tuple[jax.Array, jax.Array]]:
    """Texts of LENGTH tokens, and rounds by tokens emitted."""

    def run(state: SamplingState) -> tuple[jax.Array, jax.Array]:
        start = toy_state(state, drafted=bool(spec.budget))
        drafter = ToyDrafter() if spec.budget else None
        final, output = decode(ToyTarget(), drafter, start, jnp.int32(LENGTH), spec, 2 * LENGTH)
        return output.tokens[:, :LENGTH], final.histogram.sum(axis=0)

    return jax.jit(run)


def draw(run: Callable, params: SamplingParams) -> np.ndarray:
    """Texts of requests that differ in their seeds alone."""
    row = slot_settings(params, EVERYTHING if params != PLAIN else SamplingNeeds(), WORDS)
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (DRAWS, *leaf.shape)), row)
    seeds = np.stack([np.full(DRAWS, 9), np.arange(DRAWS)], axis=1)
    tokens, histogram = run(dataclasses.replace(state, seed=jnp.asarray(seeds, jnp.uint32)))
    assert np.asarray(histogram) @ np.arange(LENGTH + 1) == DRAWS * LENGTH
    return np.asarray(tokens)


rounds_of = functools.cache(lambda method: compile_rounds(SPECS[method]))
texts_of = functools.cache(lambda method, setting: draw(rounds_of(method), SETTINGS[setting]))


@functools.cache
def exact_law(params: SamplingParams) -> np.ndarray:
    """Probability of each of the 8^4 texts."""
    law = np.ones((WORDS,) * LENGTH)
    for place in range(LENGTH):
        for text in itertools.product(range(WORDS), repeat=place):
            said = [ANCHOR, *text]
            row = next_token_law(tables()[0][(len(PROMPT) + place) % 4][said[-1]], params, PROMPT, said)
            law[text] *= row.reshape(-1, *[1] * (LENGTH - 1 - place))
    return law.ravel()


def p_value(texts: np.ndarray, law: np.ndarray) -> float:
    """Pearson's chi-square; texts that are expected fewer than five times are counted together."""
    observed = np.bincount(texts @ WORDS ** np.arange(LENGTH)[::-1], minlength=len(law))
    if observed[law == 0].any():
        return 0.0
    expected = law * len(texts)
    cell = np.where(expected >= 5, np.arange(len(law)), len(law))
    o, e = (np.bincount(cell, x, len(law) + 1) for x in (observed, expected))
    statistic = ((o - e)[e > 0] ** 2 / e[e > 0]).sum()
    return float(jax.scipy.special.gammaincc(((e > 0).sum() - 1) / 2, statistic / 2))


# The rest of the product draws the same texts once more.
QUICK = {("ar", "1.0"), ("tree of 3", "0.5"), ("tree of 7", "1.0"), ("tree of 15", "1.5")}
CASES = [
    pytest.param(method, setting, marks=() if "chain" in method or (method, setting) in QUICK else pytest.mark.slow)
    for method in SPECS
    for setting in SETTINGS
]


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_texts_follow_the_exact_law(method: str, setting: str) -> None:
    texts = texts_of(method, setting)
    assert p_value(texts, exact_law(SETTINGS[setting])) > 0.001
    # Sample-and-match: the draft decides how many tokens a round emits, not which. Rejection draws others.
    other = (texts != texts_of("chain", setting)).any(axis=1).mean()
    assert other > 0.1 if method == "sampled chain" else other == 0.0


def test_the_test_tells_laws_apart() -> None:
    """A filter or penalty that does nothing would be seen."""
    for setting in SETTINGS:
        for left_out in ("min_p", "top_k", "top_p", "frequency_penalty", "repetition_penalty", "logit_bias"):
            changed = dataclasses.replace(SETTINGS[setting], **{left_out: getattr(PLAIN, left_out)})
            if changed != SETTINGS[setting]:
                assert p_value(texts_of("chain", setting), exact_law(changed)) < 1e-6, (setting, left_out)


def best_chain(
    anchor: jax.Array, log_probs: jax.Array, lengths: jax.Array, state: SamplingState
) -> tuple[Tree, jax.Array]:
    """The drafter's best tokens, passed off as drawn from its marginals."""
    del lengths
    scores = tempered(log_probs, state)
    return chain_tree(anchor, jnp.argmax(scores, axis=-1).astype(jnp.int32)), scores


def test_acceptance_of_fixed_tokens_by_p_over_q_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "sampled_chain", best_chain)
    texts = draw(compile_rounds(SPECS["sampled chain"]), PLAIN)
    assert p_value(texts, exact_law(PLAIN)) < 1e-6


def test_a_residual_drawn_with_the_drafts_randomness_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "TARGET_STREAM", DRAFT_STREAM)
    texts = draw(compile_rounds(SPECS["sampled chain"]), PLAIN)
    assert p_value(texts, exact_law(PLAIN)) < 1e-6

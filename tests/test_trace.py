"""Traced rounds are the engine's rounds: same tokens, same lengths, and what they show is consistent."""

import itertools

import numpy as np
import pytest

import dflash_jax
from dflash_jax import BestFirst, Engine, SamplingParams, SpineFirst, UserError
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.trace import trace_rounds
from tests.models import random_target


@pytest.fixture(scope="module")
def engine():
    return dflash_jax.load(dtype="float32", max_slots=1)


@pytest.fixture(scope="module")
def prompt(engine):
    return engine.encode_chat([{"role": "user", "content": "Tell me about owls"}])


def test_rounds_are_those_of_generate(engine, prompt):
    params = SamplingParams(max_new_tokens=200, method="ddtree", tree_budget=15)
    whole = engine.generate([prompt], params)[0]
    traced = list(trace_rounds(engine, prompt, rounds=100, budget=15))
    tokens = [token for one in traced for token in one.tokens]
    assert [int(traced[0].tree.tokens[0, 0]), *tokens] == whole.token_ids
    assert whole.finish_reason == "stop"  # so the trace ended by itself
    assert np.bincount([len(one.tokens) for one in traced], minlength=17).tolist() == whole.accepted_length_histogram
    assert max(len(one.path) for one in traced) > 3
    for one, after in itertools.pairwise(traced):
        rows = np.asarray(one.tree.tokens[0])
        assert one.tokens == [*rows[one.path[1:]].tolist(), one.bonus]
        assert one.chosen[one.path].tolist() == one.tokens
        assert np.exp(one.log_probs).sum(axis=1) == pytest.approx(1, abs=1e-4)
        assert int(after.tree.tokens[0, 0]) == one.bonus


def test_the_policy_is_the_one_asked_for(engine, prompt):
    best = next(trace_rounds(engine, prompt, rounds=100, budget=15)).tree
    chain = next(trace_rounds(engine, prompt, rounds=100, budget=15, policy=SpineFirst())).tree
    assert engine.policy == BestFirst()
    assert np.asarray(chain.parents[0]).tolist() == list(range(-1, 15))
    assert (np.bincount(np.asarray(best.depths[0])) > 1).any()


def test_what_cannot_be_traced_is_said(engine, prompt):
    alone = Engine(random_target(1), None, Tokenizer.from_folder(BUNDLED_TARGET))
    with pytest.raises(UserError, match="needs a drafter"):
        next(trace_rounds(alone, [1], rounds=1))
    with pytest.raises(UserError, match="found 0 and 31"):
        next(trace_rounds(engine, prompt, rounds=0))

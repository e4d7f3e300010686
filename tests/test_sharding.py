"""Tensor parallelism on virtual devices: the tokens of one device, and the collectives that were meant."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax
from dflash_jax import Engine, SamplingParams, UserError, programs
from dflash_jax.budget import BudgetController, LatencyCurve
from dflash_jax.packing import Packed
from dflash_jax.round import DecodeState
from dflash_jax.sharding import (
    REPLICATED,
    Vocabulary,
    make_mesh,
    parameter_spec,
    row_order,
    shard_program,
    top_k_in_two_stages,
)
from tests.models import hybrid_config, save_random_pair

PROMPTS = ["Tell me about owls", "Once upon a time", "def f(x):", "The capital of", "A"]
METHODS = {
    "ar": SamplingParams(max_new_tokens=16, method="ar", ignore_eos=True),
    "dflash": SamplingParams(max_new_tokens=16, method="dflash", ignore_eos=True),
    "ddtree": SamplingParams(max_new_tokens=16, method="ddtree", tree_budget=7, ignore_eos=True),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Engine]:
    """The same random pair, whose heads four devices can share, on one, two and four."""
    folders = save_random_pair(tmp_path_factory.mktemp("pair"), heads=2)
    return {tp: dflash_jax.load(*folders, tp=tp, dtype="float32") for tp in (1, 2, 4)}


@pytest.fixture(scope="module")
def expected_tokens(engines: dict[int, Engine]) -> list[list[int]]:
    """Autoregressive, on one device."""
    return [c.token_ids for c in engines[1].generate(PROMPTS, METHODS["ar"])]


@pytest.mark.parametrize(
    ("tp", "method", "batch"),
    [(2, method, batch) for method in METHODS for batch in (1, 5)] + [(4, "ddtree", 1)],
)
def test_tokens_are_those_of_one_device(
    engines: dict[int, Engine], expected_tokens: list[list[int]], tp: int, method: str, batch: int
):
    done = engines[tp].generate(PROMPTS[:batch], METHODS[method])
    assert [c.token_ids for c in done] == expected_tokens[:batch]
    assert all(c.completion_tokens == 16 for c in done)


def test_an_adaptive_budget_gives_the_tokens_of_one_device(
    engines: dict[int, Engine], expected_tokens: list[list[int]]
):
    """Its choice, made on every device alike, changes what is drafted and no token.

    A curve by which drafts are tried and then given up stands in for a measured one: it may not depend on the machine.
    """
    params = dataclasses.replace(METHODS["ddtree"], tree_budget="auto")
    engine, taken = engines[2], set()
    engine.generate(PROMPTS, params)  # which measures
    for key, controller in engine.controllers.items():
        buckets = controller.curve.buckets
        engine.controllers[key] = BudgetController(LatencyCurve(buckets, (1.0, *[1.6] * (len(buckets) - 1))))
    for _ in range(3):  # a text goes on with what the device has learned from the one before
        done = engine.generate(PROMPTS, params)
        assert [c.token_ids for c in done] == expected_tokens
        assert all(sum(c.tree_budgets.values()) == c.rounds for c in done)
        taken |= {budget for c in done for budget in c.tree_budgets}
    assert len(taken) > 1


@pytest.mark.parametrize("architecture", ["dense", "llama", "moe"])
def test_other_architectures_on_two_devices(tmp_path: Path, architecture: str):
    folders = save_random_pair(tmp_path, heads=2 if architecture == "moe" else 1, architecture=architecture)
    one, two = (dflash_jax.load(*folders, tp=tp, dtype="float32") for tp in (1, 2))
    expected = [c.token_ids for c in one.generate(PROMPTS[:2], METHODS["ar"])]
    assert [c.token_ids for c in one.generate(PROMPTS[:2], METHODS["ddtree"])] == expected
    for method in ("ar", "ddtree"):
        assert [c.token_ids for c in two.generate(PROMPTS[:2], METHODS[method])] == expected


@pytest.mark.parametrize("tp", [1, 2])
def test_results_in_the_hosts_memory_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int):
    """As programs of GPUs leave them."""
    folders = save_random_pair(tmp_path, heads=1)
    usual = dflash_jax.load(*folders, dtype="float32")
    expected = [c.token_ids for c in usual.generate(PROMPTS[:2], METHODS["ddtree"])]
    fetch, kinds = Packed.fetch, set()
    monkeypatch.setattr(Packed, "fetch", lambda self: kinds.add(self.words.sharding.memory_kind) or fetch(self))
    monkeypatch.setattr(programs, "_APART", ("cpu",))
    apart = dflash_jax.load(*folders, tp=tp, dtype="float32")
    assert [c.token_ids for c in apart.generate(PROMPTS[:2], METHODS["ddtree"])] == expected
    assert [c.token_ids for c in apart.stream(PROMPTS[0], METHODS["ddtree"])][-1]
    assert kinds == {"pinned_host"}


@pytest.mark.parametrize("method", METHODS)
def test_a_round_has_the_intended_collectives_and_copies_no_cache(engines: dict[int, Engine], method: str):
    engine = engines[2]
    engine.generate(PROMPTS[:1], METHODS[method])
    spec = engine.spec_of(METHODS[method], 512)
    layers = engine.target.config.num_layers
    # Two sums a layer and the embedding's; greedy choice exchanges one pair a row.
    expected = {"all-reduce": 2 * layers + 1, "all-gather": 1, "all-to-all": 0, "collective-permute": 0}
    if spec.budget:
        # The drafter's layers; its fc and the block's embedding, which XLA lets travel together; of a tree, which
        # needs probabilities, peak and sum of the normaliser; and the candidates.
        expected["all-reduce"] += 2 * engine.drafter.config.num_layers + (1 if method == "dflash" else 3)
        expected["all-gather"] += 1
    found = 0
    for (name, static, *_), compiled in engine.programs.compiled.items():
        if name == "decode" and static[0] == spec:
            found += 1
            text = compiled.as_text()
            assert {op: len(re.findall(rf" {op}(?:-start)?\(", text)) for op in expected} == expected
            # Every device keeps its part of the state where it is.
            state = jax.eval_shape(lambda: engine.programs.init(engine.drafter.config, 1, 512, 64))
            assert isinstance(state, DecodeState)
            assert compiled.memory_analysis().alias_size_in_bytes >= state.cache.kv.size * 4 // 2
            assert len(re.findall("may-alias|must-alias", text.split("\n")[0])) >= 10
    assert found


def test_models_that_cannot_be_shared_evenly_are_refused():
    with pytest.raises(UserError, match="--tp 3 does not divide num_attention_heads 4"):
        dflash_jax.load(tp=3)
    with pytest.raises(UserError, match=r"--tp 99: this run has \d+ device"):
        dflash_jax.load(tp=99)


def test_every_device_takes_its_own_heads_of_the_joint_projection():
    config = hybrid_config()  # 2 key heads and 4 value heads of 16
    order = row_order("layers.0.linear_attn.in_proj_qkv.weight", config, 2)
    rows = [range(16), range(32, 48), range(64, 96), range(16, 32), range(48, 64), range(96, 128)]
    assert order.tolist() == [i for part in rows for i in part]
    assert row_order("layers.0.linear_attn.in_proj_z.weight", config, 2) is None
    assert row_order("layers.0.linear_attn.in_proj_qkv.weight", config, 1) is None


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("embed_tokens.weight", 0), ("layers.3.self_attn.q_proj.weight", 0), ("layers.3.self_attn.o_proj.weight", 1),
        ("layers.0.linear_attn.A_log", 0), ("layers.0.linear_attn.norm.weight", None), ("fc.weight", 1),
        ("layers.0.mlp.down_proj.weight", 1), ("layers.0.self_attn.q_norm.weight", None), ("norm.weight", None),
        ("layers.0.self_attn.q_proj.bias", 0), ("layers.0.mlp.gate_up_proj.bias", 0),
        ("layers.0.mlp.experts.gate_up_proj", 1), ("layers.0.mlp.experts.down_proj", 2),
        ("layers.0.mlp.gate.weight", None), ("layers.0.mlp.shared_expert.down_proj.weight", 1),
        ("layers.0.self_attn.o_proj.bias", None), ("layers.0.mlp.down_proj.bias", None),
    ],
)  # fmt: skip
def test_rules_of_parameters(name: str, axis: int | None):
    spec = parameter_spec(name)
    assert [i for i, part in enumerate(spec) if part] == ([] if axis is None else [axis])


def test_reductions_over_a_shared_vocabulary():
    """Ties across devices go to the smaller id, as on one device."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.integers(-4, 4, (3, 5, 64)), jnp.float32)
    mesh = make_mesh(4)

    def reduce(vocabulary: Vocabulary, x: jax.Array) -> tuple:
        return vocabulary.argmax(x), vocabulary.log_normaliser(x), vocabulary.top_k(x, 9)

    split = jax.sharding.PartitionSpec(None, None, "tensor")
    shared = shard_program(lambda x: reduce(Vocabulary(4), x), mesh, (split,), REPLICATED)
    results = jax.tree.leaves(jax.jit(shared)(logits))
    for a, b in zip(results, jax.tree.leaves(reduce(Vocabulary(), logits)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("ties", [False, True])
def test_top_k_in_two_stages_is_top_k(ties: bool):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.integers(0, 3, (2, 3, 4096)) if ties else rng.normal(size=(2, 3, 4096)), jnp.float32)
    for k in (1, 5, 8):
        values, tokens = top_k_in_two_stages(x, k)
        expected = jax.lax.top_k(x, k)
        assert np.array_equal(values, expected[0]) and np.array_equal(tokens, expected[1])

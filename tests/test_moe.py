"""Experts: which are read, how rows find them, and what happens to ties (parity is in test_parity_target)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.config import parse_target_config
from dflash_jax.errors import UserError
from dflash_jax.moe import SparseMoE, tile_pairs
from tests.goldens import cases
from tests.models import randomise

CONFIG = parse_target_config(cases.PLAINS["moe"])


@pytest.fixture(scope="module")
def block() -> SparseMoE:
    module = SparseMoE(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))
    randomise(module, 1)
    return module


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
def test_tiles_hold_every_pair_once_and_no_expert_that_no_row_chose(rows: int):
    rng = np.random.default_rng(rows)
    chosen = np.stack([rng.choice(6, 3, replace=False) for _ in range(rows)]) * 4  # experts 0, 4, … 20 of 24
    tiles = jax.jit(tile_pairs, static_argnums=1)(jnp.asarray(chosen), 24)
    count, found = int(tiles.count), []
    assert set(np.asarray(tiles.expert[:count]).tolist()) == set(chosen.reshape(-1).tolist())
    for expert, pairs in zip(np.asarray(tiles.expert), np.asarray(tiles.pairs[:count]), strict=False):
        own = [pair for pair in pairs.tolist() if pair < 3 * rows]
        assert own and all(chosen.reshape(-1)[pair] == expert for pair in own)
        found += own
    assert sorted(found) == list(range(3 * rows))
    assert (np.asarray(tiles.pairs[count:]) == 3 * rows).all()


def test_tiles_grow_with_the_rows():
    sizes = [tile_pairs(jnp.zeros((rows, 8), jnp.int32), 256).pairs.shape[1] for rows in (1, 16, 64, 512, 4096)]
    assert sizes == [1, 1, 4, 32, 64]


@pytest.mark.parametrize("rows", [1, 6, 70])
def test_output_is_the_definition(block: SparseMoE, rows: int):
    x = np.random.default_rng(2).normal(size=(rows, 64)).astype(np.float32)
    w = {name: np.asarray(v, np.float64) for name, v in (
        ("gate", block.gate.weight[...]), ("gate_up", block.experts.gate_up_proj[...]),
        ("down", block.experts.down_proj[...]), ("share", block.shared_expert_gate.weight[...]),
        ("s_gate", block.shared_expert.gate_proj.weight[...]), ("s_up", block.shared_expert.up_proj.weight[...]),
        ("s_down", block.shared_expert.down_proj.weight[...]),
    )}  # fmt: skip
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731
    expected = []
    for row in x.astype(np.float64):
        p = np.exp(w["gate"] @ row)
        best = np.argsort(-p)[:3]
        out = w["s_down"] @ (silu(w["s_gate"] @ row) * (w["s_up"] @ row)) / (1 + np.exp(-w["share"] @ row))
        for expert in best:
            gate, up = np.split(w["gate_up"][expert] @ row, 2)
            out = out + p[expert] / p[best].sum() * (w["down"][expert] @ (silu(gate) * up))
        expected.append(out)
    np.testing.assert_allclose(block(jnp.asarray(x)), expected, rtol=2e-5, atol=2e-5)


def test_experts_not_chosen_do_not_matter(block: SparseMoE):
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 64)), jnp.float32)
    chosen, _ = block.route(x)
    expected = block(x)
    spoiled = nnx.merge(*nnx.split(block))
    others = np.setdiff1d(np.arange(24), np.asarray(chosen))
    spoiled.experts.gate_up_proj[...] = spoiled.experts.gate_up_proj[...].at[others].set(jnp.nan)
    spoiled.experts.down_proj[...] = spoiled.experts.down_proj[...].at[others].set(jnp.nan)
    np.testing.assert_array_equal(spoiled(x), expected)
    spoiled.experts.down_proj[...] = spoiled.experts.down_proj[...].at[chosen[0, 2]].set(0)
    assert np.abs(np.asarray(spoiled(x)) - np.asarray(expected)).max() > 1e-3


def test_ties_go_to_the_lower_number_and_weights_are_equal(block: SparseMoE):
    tied = nnx.merge(*nnx.split(block))
    tied.gate.weight[...] = jnp.zeros_like(tied.gate.weight[...])
    chosen, weights = tied.route(jnp.ones((4, 64)))
    np.testing.assert_array_equal(chosen, [[0, 1, 2]] * 4)
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts_per_tok": 25}, "num_experts_per_tok is more than num_experts"),
        ({"mlp_only_layers": [0]}, "'mlp_only_layers' = [0] is not supported"),
        ({"moe_intermediate_size": None}, "'moe_intermediate_size' must be a positive integer"),
    ],
)
def test_configs_that_are_refused(change: dict, said: str):
    with pytest.raises(UserError) as caught:
        parse_target_config(cases.PLAINS["moe"] | change)
    assert said in str(caught.value)

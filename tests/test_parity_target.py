"""The target against Hugging Face transformers: fp32, random weights, 8 layers (tests/goldens/make_targets.py)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax import cache as caches
from dflash_jax.config import parse_target_config
from dflash_jax.layers import join
from dflash_jax.target import Rows, Target
from dflash_jax.tree import ancestor_index
from tests.goldens import cases
from tests.goldens.load import assert_close, build, goldens, page_tables, relative

BOUND = 1e-5
BROKEN = 1e-3
PAGE = 16
ALL = tuple(cases.TARGETS)
PLAIN = tuple(cases.PLAINS)
MAIN = ("hybrid", "dense")


def load(case: str, values: dict[str, np.ndarray] | None = None, **config: Any) -> Target:
    """The JAX target of a case, with the case's weights or those given, and with config fields changed."""
    if values is None:
        values = cases.target_weights(case)
        goldens("plains" if case in PLAIN else "targets").check_weights(case, values)
    parsed = dataclasses.replace(parse_target_config(cases.config_of(case)), **config)
    return build(lambda: Target(parsed, rngs=nnx.Rngs(0)), values)


@functools.cache
def loaded(case: str) -> Target:
    return load(case)


def batch_of(prompts: list[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Right-padded ids and lengths. Padding holds a token that a leak would show."""
    ids = np.full((len(prompts), max(map(len, prompts))), 201, np.int32)
    for row, value in enumerate(prompts):
        ids[row, : len(value)] = value
    return jnp.asarray(ids), jnp.asarray([len(p) for p in prompts], jnp.int32)


@functools.partial(jax.jit, static_argnames=("graph", "tree"))
def feed(
    graph: Any,
    state: Any,
    cache: caches.Cache,
    tokens: Int[Array, "B N"],
    done: Int[Array, " B"],
    count: Int[Array, " B"],
    tables: Int[Array, "B T"],
    tree: bool,
) -> tuple[caches.Cache, Float[Array, "B N V"], Float[Array, "B N F"]]:
    """One pass and its commit: `count` rows of each slot after `done` earlier ones; a tree is one chain."""
    model = nnx.merge(graph, state)
    slots, width = tokens.shape
    order = jnp.broadcast_to(jnp.arange(width), (slots, width))
    valid = order < count[:, None]
    rows = Rows(tokens=tokens, positions=done[:, None] + order, valid=valid)
    if tree:
        ancestors = jnp.tril(jnp.ones((width, width), bool)) & valid[:, None, :] | jnp.eye(width, dtype=bool)
        window = max(model.config.linear_conv_kernel_dim - 1, 0)
        rows = dataclasses.replace(
            rows, ancestors=ancestors, conv_taps=ancestor_index(order - 1, window) if window else None
        )
    context = caches.Context(
        pages=cache.kv, block_tables=tables, lengths=done, recurrent=cache.recurrent, conv=cache.conv
    )
    out = model(rows, context, taps=tuple(range(model.config.num_layers)))
    if tree:
        cache = caches.commit(cache, out.updates, tables, done, order, count)
    else:
        cache = caches.commit_causal(cache, out.updates, tables, done, jnp.arange(slots), count)
    return cache, model.logits(out.hidden), out.taps


class Runner:
    """Feeds prompts to a target over a paged cache, some rows at a time, and keeps what comes out."""

    def __init__(self, model: Target, prompts: list[np.ndarray]):
        self.graph, self.state = nnx.split(model)
        self.layers = model.config.num_layers
        self.ids, self.lengths = batch_of(prompts)
        self.tables = page_tables(np.asarray(self.lengths), PAGE)
        slots, entries = self.tables.shape
        self.cache = caches.init_cache(
            model.config, None, slots=slots, pages=slots * entries, page_size=PAGE, dtype=jnp.float32
        )
        # Whatever unused pages hold must not matter.
        self.cache = dataclasses.replace(self.cache, kv=jnp.full_like(self.cache.kv, jnp.nan))
        self.logits: list[np.ndarray] = []
        self.taps: list[np.ndarray] = []

    def run(self, rows: int, tree: bool = False) -> "Runner":
        """Feeds everything, `rows` at a time: causal rows, or as a tree that is one chain."""
        for start in range(0, self.ids.shape[1], rows):
            tokens = self.ids[:, start : start + rows]
            tokens = jnp.pad(tokens, [(0, 0), (0, rows - tokens.shape[1])], constant_values=77)
            done = jnp.minimum(self.lengths, start)
            count = jnp.clip(self.lengths - start, 0, rows)
            self.cache, logits, taps = feed(
                self.graph, self.state, self.cache, tokens, done, count, self.tables, tree
            )
            self.logits.append(np.asarray(logits))
            self.taps.append(np.asarray(taps))
        return self

    def logits_of(self, slot: int) -> np.ndarray:
        """[length, vocabulary] of a slot's own tokens."""
        return np.concatenate([x[slot] for x in self.logits])[: int(self.lengths[slot])]

    def taps_of(self, slot: int) -> np.ndarray:
        """[layers, positions, hidden] at TAP_POSITIONS."""
        joined = np.concatenate([x[slot] for x in self.taps])[list(cases.TAP_POSITIONS)]
        return joined.reshape(joined.shape[0], self.layers, -1).swapaxes(0, 1)


# The longest prompt is in the middle, so that no slot has the number of its prompt.
ORDER = (2, 0, 1)
LONGEST = ORDER.index(0)


def in_slots(model: Target, case: str) -> Runner:
    prompts = cases.prompts(case)
    return Runner(model, [prompts[k] for k in ORDER])


def check(runner: Runner, case: str) -> None:
    """Logits, taps and states of every slot against the oracle.

    The oracle ran each prompt alone, in a left-padded and in a right-padded batch. Slots stand for both kinds of batch:
    each has its own length, rows past its end are padding, and no slot has padding on the left.
    """
    gold = goldens("targets")
    for slot, prompt in enumerate(ORDER):
        logits = runner.logits_of(slot)
        expected = gold[f"{case}.logits.{prompt}"]
        assert_close(logits[-len(expected) :], expected, BOUND, f"logits of prompt {prompt}")
        for side in ("left", "right"):
            assert_close(
                logits[::4], gold[f"{case}.{side}.{prompt}"], BOUND, f"{side}-padded prompt {prompt}"
            )
        if case == "hybrid":
            for layer, found in enumerate(runner.cache.recurrent[:, slot]):
                expected = gold[f"{case}.recurrent.{prompt}"][layer]
                assert_close(found, expected, BOUND, f"state {layer} of prompt {prompt}")
            assert_close(
                runner.cache.conv[:, slot], gold[f"{case}.conv.{prompt}"], BOUND, "convolution window"
            )
    for layer, found in enumerate(runner.taps_of(LONGEST)):
        assert_close(found, gold[f"{case}.taps"][layer], BOUND, f"tap {layer}")


@pytest.mark.parametrize("case", ALL)
def test_prefill_in_one_go(case: str):
    check(in_slots(loaded(case), case).run(150), case)


@pytest.mark.parametrize("case", MAIN)
@pytest.mark.parametrize("rows", [7, 64, 100])
def test_prefill_in_chunks(case: str, rows: int):
    check(in_slots(loaded(case), case).run(rows), case)


@pytest.mark.parametrize("case", MAIN)
@pytest.mark.parametrize(("rows", "tree"), [(1, False), (1, True), (16, True)])
def test_token_by_token_and_chains(case: str, rows: int, tree: bool):
    check(in_slots(loaded(case), case).run(rows, tree), case)


def check_plain(case: str, model: Target, rows: int, tree: bool = False) -> None:
    """The longest prompt's logits and taps of a case of PLAINS."""
    gold = goldens("plains")
    runner = Runner(model, cases.prompts(case)[:1]).run(rows, tree)
    assert_close(runner.logits_of(0)[::4], gold[f"{case}.logits.0"], BOUND, "logits")
    for layer, found in enumerate(runner.taps_of(0)):
        assert_close(found, gold[f"{case}.taps"][layer], BOUND, f"tap {layer}")


@pytest.mark.parametrize(("rows", "tree"), [(150, False), (64, False), (16, True)])
@pytest.mark.parametrize("case", PLAIN)
def test_heads_biases_and_rotary_scalings(case: str, rows: int, tree: bool):
    check_plain(case, loaded(case), rows, tree)


def test_experts_of_a_few_rows():
    check_plain("moe", loaded("moe"), 7)
    check_plain("moe", loaded("moe"), 1, tree=True)


@pytest.mark.parametrize("case", ["llama3", "llama_yarn", "moe"])
def test_products_joined_with_their_biases(case: str):
    model = load(case)
    join(model)
    assert hasattr(model.layers[0].mlp.shared_expert if case == "moe" else model.layers[0].mlp, "gate_up_proj")
    check_plain(case, model, 150)


# What follows must fail: each way of being wrong is far outside of the bound.


def broken_logits(case: str, values: dict[str, np.ndarray], **config: Any) -> float:
    """Relative error of the longest prompt's logits with weights, or config fields, changed."""
    runner = in_slots(load(case, values, **config), case).run(150)
    return relative(runner.logits_of(LONGEST), goldens("targets")[f"{case}.logits.0"])


@pytest.mark.parametrize("case", MAIN)
@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_off_by_one_are_seen(case: str, shift: int):
    found = in_slots(loaded(case), case).run(150).taps_of(LONGEST)
    expected = goldens("targets")[f"{case}.taps"]
    for layer in range(1, 7):
        assert relative(found[layer + shift], expected[layer]) > BROKEN


def test_swapped_gate_halves_are_seen():
    values = cases.target_weights("hybrid")
    for name in [n for n in values if n.endswith("q_proj.weight")]:
        halves = values[name].reshape(6, 2, 32, 64)
        values[name] = np.ascontiguousarray(halves[:, ::-1]).reshape(values[name].shape)
    assert broken_logits("hybrid", values) > BROKEN


def test_gate_not_interleaved_by_head_is_seen():
    values = cases.target_weights("hybrid")
    for name in [n for n in values if n.endswith("q_proj.weight")]:
        halves = values[name].reshape(6, 2, 32, 64)
        values[name] = np.ascontiguousarray(halves.swapaxes(0, 1)).reshape(values[name].shape)
    assert broken_logits("hybrid", values) > BROKEN


@pytest.mark.parametrize("part", [0, 1], ids=["queries", "keys"])
def test_swapped_key_heads_are_seen(part: int):
    values = cases.target_weights("hybrid")
    for kind in ("in_proj_qkv.weight", "conv1d.weight"):
        for name in [n for n in values if n.endswith(kind)]:
            heads = values[name][part * 32 : part * 32 + 32].reshape(2, 16, *values[name].shape[1:])
            values[name][part * 32 : part * 32 + 32] = heads[::-1].reshape(32, *values[name].shape[1:])
    assert broken_logits("hybrid", values) > BROKEN


def test_tiled_value_heads_are_seen():
    """Value head j must use key head j // 3, not j % 2."""
    values = cases.target_weights("hybrid")
    order = np.asarray([0, 2, 4, 1, 3, 5])
    for layer in [n.removesuffix(".A_log") for n in values if n.endswith("A_log")]:
        for kind in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
            values[f"{layer}.{kind}"] = values[f"{layer}.{kind}"][order]
        for kind, start in (("in_proj_qkv.weight", 64), ("conv1d.weight", 64), ("in_proj_z.weight", 0)):
            rows = values[f"{layer}.{kind}"][start:]
            values[f"{layer}.{kind}"][start:] = rows.reshape(6, 24, *rows.shape[1:])[order].reshape(
                rows.shape
            )
        columns = values[f"{layer}.out_proj.weight"].reshape(64, 6, 24)
        values[f"{layer}.out_proj.weight"] = columns[:, order].reshape(64, 144)
    assert broken_logits("hybrid", values) > BROKEN


def test_reversed_convolution_is_seen():
    values = cases.target_weights("hybrid")
    for name in [n for n in values if n.endswith("conv1d.weight")]:
        values[name] = np.ascontiguousarray(values[name][..., ::-1])
    assert broken_logits("hybrid", values) > BROKEN


def shift_norms(values: dict[str, np.ndarray], by: float, own: bool = False) -> dict[str, np.ndarray]:
    """Adds to the weights of all norms but the Gated DeltaNet's own, or to those alone."""
    for name in [
        n for n in values if n.endswith("norm.weight") and n.endswith("linear_attn.norm.weight") == own
    ]:
        values[name] = values[name] + np.float32(by)
    return values


def test_plain_norms_in_a_zero_centred_model_are_seen():
    """1 + (w − 1) is what a plain norm would scale by."""
    assert broken_logits("hybrid", shift_norms(cases.target_weights("hybrid"), -1)) > BROKEN


def test_zero_centred_norms_in_a_plain_model_are_seen():
    assert broken_logits("dense", shift_norms(cases.target_weights("dense"), 1)) > BROKEN


def test_zero_centred_norm_inside_a_gated_deltanet_is_seen():
    assert broken_logits("hybrid", shift_norms(cases.target_weights("hybrid"), 1, own=True)) > BROKEN


@pytest.mark.parametrize(("case", "rotary_dim"), [("hybrid", 32), ("dense", 16)])
def test_wrong_rotary_width_is_seen(case: str, rotary_dim: int):
    rope = dataclasses.replace(loaded(case).config.rope, rotary_dim=rotary_dim)
    assert broken_logits(case, cases.target_weights(case), rope=rope) > BROKEN


def test_padding_that_is_not_masked_is_seen():
    """Rows past the prompt's end that are called valid must change the state."""
    runner = in_slots(loaded("hybrid"), "hybrid")
    runner.lengths = runner.lengths.at[0].add(3)
    runner.run(150)
    assert relative(runner.cache.recurrent[:, 0], goldens("targets")["hybrid.recurrent.2"]) > BROKEN


def plain_error(case: str, values: dict[str, np.ndarray], **config: Any) -> float:
    """Relative error of a case of PLAINS with weights, or config fields, changed."""
    runner = Runner(load(case, values, **config), cases.prompts(case)[:1]).run(150)
    return relative(runner.logits_of(0)[::4], goldens("plains")[f"{case}.logits.0"])


@pytest.mark.parametrize("case", ["llama3", "llama_linear", "llama_yarn", "dense_bias"])
def test_ignored_rotary_scaling_is_seen(case: str):
    rope = dataclasses.replace(loaded(case).config.rope, scaling=None)
    assert plain_error(case, cases.target_weights(case), rope=rope) > BROKEN


@pytest.mark.parametrize("field", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_every_number_of_llama3_scaling_matters(field: str):
    rope = loaded("llama3").config.rope
    changed = dataclasses.replace(rope.scaling, **{field: 2 * getattr(rope.scaling, field)})
    values = cases.target_weights("llama3")
    assert plain_error("llama3", values, rope=dataclasses.replace(rope, scaling=changed)) > BROKEN


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_a_lost_bias_is_seen(part: str):
    case = "llama_yarn" if part in ("gate_proj", "up_proj", "down_proj") else "llama3"
    values = cases.target_weights(case)
    for name in [n for n in values if n.endswith(f"{part}.bias")]:
        values[name] = np.zeros_like(values[name])
    assert plain_error(case, values) > BROKEN

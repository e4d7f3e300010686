"""Training: data order, label alignment, masks, the shared loop, resuming, and the drafter's loss."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convert import load_drafter
from dflash_jax import SamplingParams
from dflash_jax.config import FULL, LINEAR, parse_drafter_config, parse_target_config
from dflash_jax.deltanet import l2norm
from dflash_jax.drafter import Drafter
from dflash_jax.engine import Engine
from dflash_jax.errors import UserError
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.mtp import MTP
from dflash_jax.target import Rows, Target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.train import grouped, settings
from dflash_jax.train.data import Answers, Order, take_windows, window_starts
from dflash_jax.train.draft_loop import (
    chain_tau,
    draft_loss,
    evaluate_draft,
    frozen_inputs,
    train_draft,
    with_taps,
)
from dflash_jax.train.draft_loop import is_matrix as drafter_is_matrix
from dflash_jax.train.draft_loss import (
    agreement,
    context_mask,
    draft_hidden,
    loss_mask,
    make_blocks,
    sample_anchors,
)
from dflash_jax.train.loop import Clock, TrainState, fit, make_dispatch
from dflash_jax.train.mixers import delta_rule
from dflash_jax.train.optimizer import build_optimizer, decay_start, learning_rate, orthogonalise
from dflash_jax.train.responses import answer, repeated_share
from dflash_jax.train.settings import LoopSettings, OptimizerSettings, ResponseSettings
from dflash_jax.train.target_loop import init_params, target_loss
from pallas_kernels.gdn_scan import chunk_delta_rule

VOCAB, END = 32, 31
MODEL = {
    "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "layer_types": [LINEAR, FULL] * 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": True, "pad_token_id": END, "eos_token_id": END,
}  # fmt: skip
DRAFT = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "rope_theta": 1e4, "block_size": 4, "num_target_layers": 4, "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"],
    "dflash_config": {"mask_token_id": 30, "target_layer_ids": [0, 2]},
}  # fmt: skip
CONFIG = parse_target_config(MODEL)
DRAFT_CONFIG, _ = parse_drafter_config(DRAFT)
LOOP = LoopSettings(batch=4, steps=24, steps_per_dispatch=8, dtype="float32")
ADAMW = OptimizerSettings(peak_lr=1e-2, warmup_steps=4, weight_decay=0.01)


def recipe(**loop: object) -> settings.TargetRecipe:
    return settings.TargetRecipe(
        MODEL, settings.CorpusSettings(1000), dataclasses.replace(LOOP, **loop), ADAMW, sequence_length=16
    )


def perturbed(module: nnx.Module, seed: int = 1) -> nnx.Module:
    """The module with noise on every parameter, so that norms and gates matter to a comparison."""
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(tree, noisy))


@pytest.fixture(scope="module")
def target() -> Target:
    return perturbed(Target(CONFIG, rngs=nnx.Rngs(0)))


# --- data ---------------------------------------------------------------------------------------------------------


def test_windows_begin_at_document_starts_and_cover_the_stream():
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 9, 60)
    stream = np.concatenate([np.r_[np.full(n - 1, 5), END] for n in lengths]).astype(np.uint16)
    starts = window_starts(stream, 16, END)
    begins = {0, *(np.cumsum(lengths)).tolist()}
    assert set(starts.tolist()) <= begins
    assert np.all(starts + 17 <= len(stream))
    assert np.all(np.diff(starts) > 0)
    assert len(starts) >= 0.9 * len(stream) // 16
    # No token between two windows is left out by more than one document.
    assert np.diff(starts).max() <= 16 + 9


def test_window_labels_are_the_next_tokens():
    stream = jnp.arange(100, dtype=jnp.uint16)
    tokens = take_windows(stream, jnp.array([3, 40]), 17)
    assert tokens.shape == (2, 17)
    np.testing.assert_array_equal(tokens[:, 1:], tokens[:, :-1] + 1)
    assert tokens[1, 0] == 40


def test_a_stream_without_a_whole_window_is_an_error():
    with pytest.raises(UserError, match="no window of 17"):
        window_starts(np.zeros(10, np.uint16), 16, END)


def test_order_visits_every_example_once_an_epoch_and_depends_on_the_step_alone():
    order = Order(size=13, batch=4, seed=3)
    epoch = order.batches(0, order.steps_per_epoch)
    assert len(set(epoch.ravel().tolist())) == 12
    assert not np.array_equal(epoch, order.batches(order.steps_per_epoch, order.steps_per_epoch))
    np.testing.assert_array_equal(Order(13, 4, 3).batches(4, 3), order.batches(0, 7)[4:])
    with pytest.raises(UserError, match="fewer than one batch"):
        Order(size=3, batch=4, seed=0)


# --- the grouped forward ------------------------------------------------------------------------------------------


def test_grouped_forward_equals_the_target(target: Target):
    tokens = jax.random.randint(jax.random.key(2), (2, 21), 0, VOCAB)
    valid = jnp.arange(21) < jnp.array([[21], [13]])
    rows = Rows(tokens, jnp.broadcast_to(jnp.arange(21), tokens.shape), valid)
    expected = target(rows, target.empty_context(2), taps=(0, 1, 3), precise=False)
    for options in ({}, {"unroll": True}, {"remat": True}):
        hidden, taps = grouped.forward(
            grouped.group(target), CONFIG, tokens, valid, taps=(0, 1, 3), **options
        )
        np.testing.assert_allclose(hidden[0], expected.hidden[0], atol=2e-5)
        np.testing.assert_allclose(hidden[1, :13], expected.hidden[1, :13], atol=2e-5)
        np.testing.assert_allclose(taps[0], expected.taps[0], atol=2e-5)


def test_delta_rule_and_its_gradient_are_the_inference_ones():
    """Several chunks, the last one ragged, two value heads a key head; gradients of every input."""
    keys = jax.random.split(jax.random.key(3), 6)
    batch, rows = 2, 70
    q, k = (l2norm(jax.random.normal(key, (batch, rows, 2, 8))) for key in keys[:2])
    v = jax.random.normal(keys[2], (batch, rows, 4, 8))
    beta = jax.nn.sigmoid(jax.random.normal(keys[3], (batch, rows, 4)))
    g = -jax.nn.softplus(jax.random.normal(keys[4], (batch, rows, 4)) - 2.0)
    weight = jax.random.normal(keys[5], v.shape)

    def inference(*inputs: jax.Array) -> jax.Array:
        return chunk_delta_rule(*inputs, jnp.zeros((batch, 4, 8, 8)), chunk=16, implementation="xla")[0]

    def training(*inputs: jax.Array) -> jax.Array:
        return delta_rule(*inputs, chunk=16)

    def run(rule: Callable[..., jax.Array]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        loss = jax.jit(jax.grad(lambda *x: jnp.sum(rule(*x) * weight), argnums=(0, 1, 2, 3, 4)))
        return jax.jit(rule)(q, k, v, beta, g), loss(q, k, v, beta, g)

    (out, grads), (expected, expected_grads) = run(training), run(inference)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for name, a, b in zip(("q", "k", "v", "beta", "g"), grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4, err_msg=name)


def test_ungroup_gives_the_target_back(target: Target):
    again = grouped.ungroup(grouped.group(target), CONFIG)
    for a, b in zip(jax.tree.leaves(nnx.state(target)), jax.tree.leaves(nnx.state(again)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_decay_but_norms_gates_and_convolutions_do_not(target: Target):
    mask = grouped.is_matrix(grouped.group(target))
    decayed = {name for place in mask.places for name, value in place.items() if value}
    assert decayed == {
        *(f"linear_attn.{n}.weight" for n in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")),
        *(f"self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }
    assert mask.embed
    assert not mask.norm


def test_cast_keeps_the_gates_in_float32(target: Target):
    low = grouped.cast(grouped.group(target), jnp.bfloat16)
    kinds = {name: leaf.dtype for place in low.places for name, leaf in place.items()}
    assert {n for n, d in kinds.items() if d == jnp.float32} == {
        "linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"
    }  # fmt: skip
    assert low.embed.dtype == jnp.bfloat16


def test_embedding_gradient_is_the_scatter():
    table = jax.random.normal(jax.random.key(0), (VOCAB, 8))
    tokens = jax.random.randint(jax.random.key(1), (3, 7), 0, VOCAB)
    weight = jax.random.normal(jax.random.key(2), (3, 7, 8))
    fast = jax.grad(lambda t: jnp.sum(grouped.embed_lookup(t, tokens) * weight))(table)
    plain = jax.grad(lambda t: jnp.sum(t[tokens] * weight))(table)
    np.testing.assert_allclose(fast, plain, atol=1e-5)


def test_cross_entropy_value_gradient_and_argmax():
    hidden = jax.random.normal(jax.random.key(0), (10, 8))
    table = jax.random.normal(jax.random.key(1), (VOCAB, 8))
    labels = jax.random.randint(jax.random.key(2), (10,), 0, VOCAB)
    weights = jnp.linspace(0.0, 1.0, 10)

    def plain(hidden: jax.Array, table: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(jnp.matmul(hidden, table.T, precision="highest"))
        return -jnp.sum(weights * logs[jnp.arange(10), labels])

    loss, argmax = grouped.cross_entropy(hidden, table, labels, weights)
    np.testing.assert_allclose(loss, plain(hidden, table), rtol=1e-5)
    np.testing.assert_array_equal(argmax, jnp.argmax(hidden @ table.T, axis=-1))
    fast = jax.grad(lambda h, t: grouped.cross_entropy(h, t, labels, weights)[0], argnums=(0, 1))(hidden, table)
    for a, b in zip(fast, jax.grad(plain, argnums=(0, 1))(hidden, table), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# --- optimiser and clock ------------------------------------------------------------------------------------------


def test_schedule_warms_up_holds_and_decays_to_the_end():
    wsd = OptimizerSettings(peak_lr=1.0, final_lr_ratio=0.1, warmup_steps=10, decay_fraction=0.4)
    rate = [float(learning_rate(wsd, jnp.int32(s), jnp.int32(100))) for s in range(101)]
    np.testing.assert_allclose(rate[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(rate[10:61], 1.0)
    np.testing.assert_allclose(rate[80], 0.55, rtol=1e-6)
    np.testing.assert_allclose(rate[100], 0.1, rtol=1e-5)
    # Until the decay starts the length of the run has no effect: it may still be being measured.
    assert float(learning_rate(wsd, jnp.int32(decay_start(wsd, 100) - 1), jnp.int32(10**6))) == 1.0
    cosine = dataclasses.replace(wsd, schedule="cosine")
    np.testing.assert_allclose(learning_rate(cosine, jnp.int32(100), jnp.int32(100)), 0.1, rtol=1e-5)


def test_time_boxed_run_fits_and_settles_before_the_decay():
    loop = LoopSettings(batch=1, max_seconds=100.0, reserve_seconds=10.0, steps_per_dispatch=10)
    clock = Clock(loop, OptimizerSettings(decay_fraction=0.5))
    total = clock.total_steps(10, 0.1, 0)
    assert total % 10 == 0
    assert 890 <= total <= 910
    assert clock.total_steps(20, 0.2, total) < 500
    # In the decay the number stands, whatever the speed.
    assert clock.total_steps(total // 2, 5.0, total) == total


def test_orthogonalise_gives_singular_values_near_one():
    for shape in ((2, 24, 48), (48, 24)):
        x = jax.random.normal(jax.random.key(0), shape)
        values = jnp.linalg.svd(orthogonalise(x), compute_uv=False)
        assert float(values.min()) > 0.4
        assert float(values.max()) < 1.5


# --- recipes ------------------------------------------------------------------------------------------------------


def test_bundled_recipes_fit_each_other_and_the_size_limit():
    t = settings.load_target_recipe(settings.RECIPES / "bundled_target.json")
    d = settings.load_draft_recipe(settings.RECIPES / "bundled_draft.json")
    config = parse_target_config(t.model)
    drafter, _ = parse_drafter_config(d.model)
    from dflash_jax.config import check_pair

    check_pair(config, drafter)
    shapes = jax.eval_shape(
        lambda: [nnx.state(model) for model in (
            Target(config, rngs=nnx.Rngs(0)), MTP(config, rngs=nnx.Rngs(0)), Drafter(drafter, rngs=nnx.Rngs(0))
        )]
    )  # fmt: skip
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert 2 * count < 25.6e6
    head = settings.load_mtp_recipe(settings.RECIPES / "bundled_mtp.json")
    assert head.loop.steps is not None and head.loop.steps % head.loop.steps_per_dispatch == 0
    assert head.responses.max_prompt_tokens == d.responses.max_prompt_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loop": {"batch": 2, "steps": 1, "speed": 9}}, "unknown key 'speed'"),
        ({"loop": {"batch": "two", "steps": 1}}, "'batch' must be int"),
        ({"loop": {"batch": 2}}, "exactly one of 'steps' and 'max_seconds'"),
        ({"optimizer": {"kind": "sgd"}}, "must be 'adamw' or 'muon'"),
        ({"corpus": None}, "'corpus': expected a JSON object"),
    ],
)
def test_bad_recipes_are_one_line_errors(tmp_path: Path, change: dict, message: str):
    good = {"model": MODEL, "corpus": {"tokens": 9}, "loop": {"batch": 2, "steps": 4}, "optimizer": {}}
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(good))
    settings.load_target_recipe(path)
    path.write_text(json.dumps({**good, **change}))
    with pytest.raises(UserError, match=message) as caught:
        settings.load_target_recipe(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


# --- the loop -----------------------------------------------------------------------------------------------------


def toy_stream() -> jnp.ndarray:
    document = np.r_[np.random.default_rng(0).integers(0, 30, 24), END]
    return jnp.asarray(np.tile(document, 12), jnp.uint16)


def run_toy(out: Path, *, resume: bool = False, stop_after: int | None = None, kind: str = "adamw") -> TrainState:
    toy = recipe()
    optimizer_settings = dataclasses.replace(ADAMW, kind=kind)
    optimizer = build_optimizer(optimizer_settings, grouped.is_matrix)
    params = init_params(CONFIG, 0)
    state = TrainState(params, optimizer.init(params), jnp.int32(0))
    stream = toy_stream()
    starts = window_starts(np.asarray(stream), 16, END).astype(np.int32)
    order = Order(len(starts), 4, 0)
    return fit(
        "toy", state, make_dispatch(target_loss(CONFIG, toy), optimizer, optimizer_settings, 0), stream,
        lambda step, count: starts[order.batches(step, count)], Clock(LOOP, optimizer_settings), out,
        tokens_per_step=64, resume=resume, stop_after=stop_after, say=lambda text: None,
    )


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainState]:
    out = tmp_path_factory.mktemp("toy")
    return out, run_toy(out)


def test_loss_falls_on_a_memorised_text(toy_run: tuple[Path, TrainState]):
    out, state = toy_run
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [8, 16, 24]
    assert {"step", "loss", "lr", "tokens_per_second", "seconds"} <= set(lines[0])
    assert lines[0]["loss_mean"] > 2.5
    assert lines[-1]["loss"] < 1.0
    assert int(state.step) == 24


def test_muon_trains_too(tmp_path: Path, toy_run: tuple[Path, TrainState]):
    run_toy(tmp_path, kind="muon")
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["loss"] < 2.5


def test_resumed_equals_uninterrupted(tmp_path: Path, toy_run: tuple[Path, TrainState]):
    _, whole = toy_run
    interrupted = run_toy(tmp_path, stop_after=8)
    assert int(interrupted.step) == 8
    resumed = run_toy(tmp_path, resume=True)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [8, 16, 24]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


# --- answers ------------------------------------------------------------------------------------------------------


def test_answers_equal_recomputing_the_whole_sequence(target: Target):
    prompts = [[1, 2, 3], [7], [4, 9, 2, 8, 6]]
    response = ResponseSettings(prompts=3, max_prompt_tokens=8, max_new_tokens=10, batch=4)
    answers = answer(target, prompts, response, say=lambda text: None)

    @jax.jit
    def next_token(tokens: jax.Array, length: jax.Array) -> jax.Array:
        order = jnp.arange(tokens.shape[0])[None]
        out = target(Rows(tokens[None], order, order < length), target.empty_context(1))
        return jnp.argmax(target.logits(out.hidden[0, length - 1]))

    for row, ids in enumerate(prompts):
        tokens = np.zeros(20, np.int32)
        tokens[: len(ids)], length = ids, len(ids)
        while length < len(ids) + 10 and (length == len(ids) or tokens[length - 1] != END):
            tokens[length] = next_token(jnp.asarray(tokens), length)
            length += 1
        assert answers.prompt_lengths[row] == len(ids)
        assert answers.lengths[row] == length
        np.testing.assert_array_equal(answers.tokens[row, :length], tokens[:length])


def test_answers_stop_at_a_stop_token_and_survive_a_file(tmp_path: Path, target: Target):
    response = ResponseSettings(prompts=1, max_prompt_tokens=8, max_new_tokens=10, batch=2)
    first = answer(target, [[1, 2, 3]], response, say=lambda text: None)
    stop = int(first.tokens[0, 5])
    where = first.tokens[0, 3:].tolist().index(stop)
    stopping = Target(dataclasses.replace(CONFIG, eos_token_ids=(stop,)), rngs=nnx.Rngs(0))
    nnx.update(stopping, nnx.state(target))
    second = answer(stopping, [[1, 2, 3]], response, say=lambda text: None)
    assert second.lengths[0] == 3 + where + 1
    assert second.tokens[0, second.lengths[0] - 1] == stop
    second.save(tmp_path / "a.npz")
    again = Answers.load(tmp_path / "a.npz")
    np.testing.assert_array_equal(again.tokens, second.tokens)
    with pytest.raises(UserError, match=r"b\.npz"):
        Answers.load(tmp_path / "b.npz")


def test_repeated_share():
    looped = Answers(np.tile(np.uint16([1, 2]), (1, 10)), np.int32([0]), np.int32([20]))
    fresh = Answers(np.arange(20, dtype=np.uint16)[None], np.int32([0]), np.int32([20]))
    assert repeated_share(fresh) == 0.0
    assert repeated_share(looped) == 11 / 13


# --- the drafter's loss -------------------------------------------------------------------------------------------


def test_anchors_have_a_token_to_predict_and_are_distinct():
    mask = loss_mask(jnp.array([3, 5]), jnp.array([12, 7]), 16)
    np.testing.assert_array_equal(np.flatnonzero(mask[1]), [5, 6])
    seen = set()
    for seed in range(40):
        anchors, keep = sample_anchors(jax.random.key(seed), mask, 4)
        kept = anchors[0][keep[0]].tolist()
        assert len(set(kept)) == 4
        seen |= set(kept)
        # Of two answer tokens only the first has a successor in the answer.
        assert anchors[1][keep[1]].tolist() == [5]
    assert seen == set(range(3, 11))


def test_block_inputs_labels_and_weights():
    tokens = jnp.arange(10, 22)[None]
    mask = loss_mask(jnp.array([2]), jnp.array([11]), 12)
    anchors, keep = jnp.array([[4, 9, 0]]), jnp.array([[True, True, False]])
    blocks = make_blocks(tokens, mask, anchors, keep, size=4, mask_token_id=99, gamma=7.0)
    np.testing.assert_array_equal(blocks.inputs[0, :2], [[14, 99, 99, 99], [19, 99, 99, 99]])
    # No shift: slot k is labelled with the token at anchor + k.
    np.testing.assert_array_equal(blocks.labels[0, 0], [14, 15, 16, 17])
    # Slot 0 is never counted; nor is what lies past the answer (position 11) or past the row (position 12).
    np.testing.assert_array_equal(blocks.counted[0], [[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(blocks.weights[0, 0], [0, 1, np.exp(-1 / 7), np.exp(-2 / 7)], rtol=1e-6)
    np.testing.assert_array_equal(blocks.weights[0, 2], 0)


def test_slots_past_the_end_of_the_row_are_not_counted():
    """An answer that fills its row: a clamped gather must not pass the last token off as a label."""
    tokens = jnp.arange(10, 22)[None]
    mask = loss_mask(jnp.array([2]), jnp.array([12]), 12)
    blocks = make_blocks(
        tokens, mask, jnp.array([[10]]), jnp.array([[True]]), size=4, mask_token_id=99, gamma=7.0
    )
    np.testing.assert_array_equal(blocks.labels[0, 0], [20, 21, 0, 0])
    np.testing.assert_array_equal(blocks.counted[0, 0], [0, 1, 0, 0])
    np.testing.assert_array_equal(blocks.weights[0, 0], [0, 1, 0, 0])


def test_context_mask_stops_before_the_anchor_and_at_the_window():
    seen = context_mask(jnp.array([[5]]), 3, 8, None)
    np.testing.assert_array_equal(seen[0, 0], np.tile(np.arange(8) < 5, (3, 1)))
    windowed = context_mask(jnp.array([[5]]), 3, 8, 4)
    for k in range(3):
        np.testing.assert_array_equal(np.flatnonzero(windowed[0, 0, k]), np.arange(2 + k, 5))


def hidden_of_blocks(drafter: Drafter, taps: jax.Array, embeddings: jax.Array, anchors: jax.Array) -> jax.Array:
    return jax.jit(lambda t, e, a: draft_hidden(drafter, t, e, a))(taps, embeddings, anchors)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return perturbed(Drafter(DRAFT_CONFIG, rngs=nnx.Rngs(0)))


def test_blocks_equal_the_inference_drafter(drafter: Drafter):
    """Every block alone through the paged path, context shorter and longer than the sliding layer's window."""
    taps = jax.random.normal(jax.random.key(0), (1, 20, 64))
    embeddings = jax.random.normal(jax.random.key(1), (1, 3, 4, 32))
    anchors = jnp.array([[3, 9, 16]])
    together = hidden_of_blocks(drafter, taps, embeddings, anchors)
    pages = drafter.context_kv(taps, jnp.arange(20)[None]).reshape(2, 5, 4, 2, 1, 16)
    for block in range(3):
        alone = drafter(embeddings[:, block], pages, jnp.arange(5)[None], anchors[:, block])
        np.testing.assert_allclose(together[:, block], alone, atol=2e-5)


def test_a_block_depends_on_the_past_and_itself_alone(drafter: Drafter):
    taps = jax.random.normal(jax.random.key(0), (1, 20, 64))
    embeddings = jax.random.normal(jax.random.key(1), (1, 2, 4, 32))
    anchors = jnp.array([[7, 12]])
    before = hidden_of_blocks(drafter, taps, embeddings, anchors)
    # The anchor's own feature and everything after it is invisible to block 0; block 1 sees positions 7 … 11.
    later = hidden_of_blocks(drafter, taps.at[:, 7:].add(1.0), embeddings, anchors)
    np.testing.assert_array_equal(before[:, 0], later[:, 0])
    assert not np.allclose(before[:, 1], later[:, 1], atol=1e-3)
    earlier = hidden_of_blocks(drafter, taps.at[:, 6].add(1.0), embeddings, anchors)
    assert not np.allclose(before[:, 0], earlier[:, 0], atol=1e-3)
    # No block sees another; within a block the full layer is bidirectional.
    other = hidden_of_blocks(drafter, taps, embeddings.at[:, 1].add(1.0), anchors)
    np.testing.assert_array_equal(before[:, 0], other[:, 0])
    last = hidden_of_blocks(drafter, taps, embeddings.at[:, 0, 3].add(1.0), anchors)
    assert not np.allclose(before[:, 0, 1], last[:, 0, 1], atol=1e-4)


def test_agreement_counts_leading_runs():
    tokens = jnp.arange(12)[None]
    mask = loss_mask(jnp.array([0]), jnp.array([12]), 12)
    blocks = make_blocks(
        tokens, mask, jnp.array([[2, 6, 0]]), jnp.array([[True, True, False]]), size=4, mask_token_id=99, gamma=7.0
    )
    predicted = jnp.array([[[0, 3, 4, 9], [0, 9, 8, 9], [0, 1, 2, 3]]])
    result = agreement(blocks, predicted)
    assert float(result["tau"]) == (3 + 1) / 2
    np.testing.assert_allclose(result["accuracy"], [0.5, 1.0, 0.5])
    np.testing.assert_allclose(result["chain_accuracy"], [0.5, 0.5, 0.0])


def test_drafter_learns_its_target(tmp_path: Path, toy_run: tuple[Path, TrainState]):
    """The memorised text again: the drafter must come to predict whole blocks of it."""
    memorised = grouped.ungroup(toy_run[1].params, CONFIG)
    document = np.asarray(toy_stream()[:25])
    rows = np.stack([np.roll(document, -k) for k in range(8)])
    answers = Answers(rows.astype(np.uint16), np.full(8, 2, np.int32), np.full(8, 25, np.int32))
    draft_recipe = settings.DraftRecipe(DRAFT, ResponseSettings(8), LOOP, ADAMW, anchors=8)
    untrained = Drafter(DRAFT_CONFIG, rngs=nnx.Rngs(0))
    graph, params = nnx.split(untrained)
    optimizer = build_optimizer(ADAMW, drafter_is_matrix)
    state = fit(
        "toy-draft", TrainState(params, optimizer.init(params), jnp.int32(0)),
        make_dispatch(draft_loss(graph, CONFIG, draft_recipe), optimizer, ADAMW, 0),
        frozen_inputs(memorised, answers, jnp.float32), Order(8, 4, 0).batches,
        Clock(dataclasses.replace(LOOP, steps=240), ADAMW), tmp_path, tokens_per_step=96, say=lambda text: None,
    )  # fmt: skip
    before = evaluate_draft(Drafter(DRAFT_CONFIG, rngs=nnx.Rngs(0)), memorised, answers, draft_recipe, anchors=20)
    after = evaluate_draft(nnx.merge(graph, state.params), memorised, answers, draft_recipe, anchors=20)
    assert before["tau"] < 1.5
    assert after["tau"] > 3.0
    assert after["blocks"] == before["blocks"] == 8 * 20


def some_answers(target: Target, count: int = 6) -> Answers:
    limits = ResponseSettings(count, max_prompt_tokens=5, max_new_tokens=20, batch=4)
    return answer(target, [[7 + n, 3, 5][: 2 + n % 2] for n in range(count)], limits, say=lambda line: None)


def test_cached_taps_are_those_of_a_step(target: Target):
    """Also where the answers are no whole number of batches; the loss is the same, and no step runs the target."""
    answers = some_answers(target)
    plain = settings.DraftRecipe(DRAFT, ResponseSettings(6), LOOP, ADAMW, anchors=5)
    graph, params = nnx.split(Drafter(DRAFT_CONFIG, rngs=nnx.Rngs(0)))
    frozen = frozen_inputs(target, answers, jnp.float32)
    cached = with_taps(frozen, CONFIG, DRAFT_CONFIG.target_layer_ids, plain)
    assert cached["taps"].shape == (6, answers.tokens.shape[1], 64)
    loss = draft_loss(graph, CONFIG, plain)
    batch = jnp.array([5, 0, 4])
    wanted, found = (loss(params, (data, batch), jax.random.key(3))[0] for data in (frozen, cached))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    layers = jax.tree.map(jnp.zeros_like, cached["target"].places)
    without = cached | {"target": dataclasses.replace(cached["target"], places=layers)}
    np.testing.assert_allclose(loss(params, (without, batch), jax.random.key(3))[0], wanted, rtol=1e-5)


def test_chain_tau_is_that_of_decoding(target: Target):
    """The engine, decoding the same prompts with the same drafter, takes exactly so many rounds."""
    answers = some_answers(target)
    drafter = perturbed(Drafter(DRAFT_CONFIG, rngs=nnx.Rngs(0)))
    engine = Engine(target, drafter, Tokenizer.from_folder(BUNDLED_TARGET), max_model_len=64, prefill_chunk=32)
    rows = zip(answers.tokens.tolist(), answers.prompt_lengths, answers.lengths, strict=True)
    spans = [(tokens[:begin], tokens[begin:end]) for tokens, begin, end in rows]
    texts, taus = [text for _, text in spans], []
    for block in (4, 3):
        params = SamplingParams(max_new_tokens=20, method="dflash", block_size=block)
        runs = engine.generate([prompt for prompt, _ in spans], params)
        assert [run.token_ids for run in runs] == texts
        wanted = sum(run.completion_tokens - 1 for run in runs) / sum(run.rounds for run in runs)
        recipe = settings.DraftRecipe(DRAFT | {"block_size": block}, ResponseSettings(6), LOOP, ADAMW)
        taus.append(chain_tau(target, answers, recipe)(drafter))
        assert taus[-1] == pytest.approx(wanted)
    assert max(taus) > 1


def test_watch_sees_the_drafter_of_every_dispatch(tmp_path: Path, target: Target):
    answers = some_answers(target, 8)
    small = settings.DraftRecipe(DRAFT, ResponseSettings(8), LOOP, ADAMW, anchors=5, cache_taps=True)
    seen = {}
    summary = train_draft(
        small, tmp_path / "recipe.json", target, answers, answers, tmp_path, say=lambda line: None,
        watch=lambda step, drafter: seen.update({step: np.asarray(drafter.fc.weight[...])}),
    )  # fmt: skip
    assert list(seen) == [0, 8, 16, 24]
    np.testing.assert_array_equal(seen[0], Drafter(DRAFT_CONFIG, rngs=nnx.Rngs(0)).fc.weight[...])
    assert len({weight.tobytes() for weight in seen.values()}) == 4
    written = load_drafter(tmp_path / "drafter", CONFIG, jnp.float32, progress=False)[1].fc.weight[...]
    np.testing.assert_array_equal(written, seen[24].astype(jnp.bfloat16).astype(np.float32))
    steps = dataclasses.replace(small, cache_taps=False)
    without = train_draft(steps, tmp_path / "a.json", target, answers, answers, tmp_path / "a", say=lambda line: None)
    assert without["heldout"]["tau"] == pytest.approx(summary["heldout"]["tau"], abs=0.05)

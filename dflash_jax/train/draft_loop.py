"""Training of a drafter on its frozen target's own answers."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from convert import save_drafter
from dflash_jax.config import DrafterConfig, TargetConfig, check_pair, parse_drafter_config
from dflash_jax.drafter import Drafter
from dflash_jax.target import Target
from dflash_jax.train import grouped
from dflash_jax.train.data import Answers, Order
from dflash_jax.train.draft_loss import (
    Blocks,
    agreement,
    draft_hidden,
    leading_runs,
    loss_mask,
    make_blocks,
    sample_anchors,
)
from dflash_jax.train.loop import Clock, LossFn, TrainState, compile_dispatch, fit, make_dispatch
from dflash_jax.train.optimizer import build_optimizer
from dflash_jax.train.settings import AttentionKind, DraftRecipe
from dflash_jax.train.target_loop import memory_report

# Every array the steps read: the answers and the frozen target's weights.
Frozen = dict[str, Any]


def frozen_inputs(target: Target, answers: Answers, dtype: jnp.dtype) -> Frozen:
    """Device arrays of the answers and the target, grouped and cast once."""
    return {
        "target": grouped.cast(grouped.group(target), dtype),
        "tokens": jnp.asarray(answers.tokens),
        "prompt_lengths": jnp.asarray(answers.prompt_lengths),
        "lengths": jnp.asarray(answers.lengths),
    }


@functools.partial(jax.jit, static_argnames=("config", "layers", "attention"))
def _taps(
    params: grouped.GroupedParams,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    config: TargetConfig,
    layers: tuple[int, ...],
    attention: AttentionKind,
) -> Float[Array, "B T F"]:
    """The target's taps on right-padded sequences."""
    tokens = tokens.astype(jnp.int32)
    valid: Bool[Array, "B T"] = jnp.arange(tokens.shape[1]) < lengths[:, None]
    _, taps = grouped.forward(params, config, tokens, valid, taps=layers, attention=attention)
    assert taps is not None
    return taps


def with_taps(frozen: Frozen, config: TargetConfig, layers: tuple[int, ...], recipe: DraftRecipe) -> Frozen:
    """The inputs with the target's taps on all answers, [N, T, F], so that no later step runs the target."""
    rows, batch = frozen["tokens"].shape[0], recipe.loop.batch
    taps = []
    for begin in range(0, rows, batch):
        # The last batch repeats its last row, so that one shape is compiled.
        index = np.minimum(np.arange(begin, begin + batch), rows - 1)
        values = frozen["target"], frozen["tokens"][index], frozen["lengths"][index]
        taps.append(_taps(*values, config=config, layers=layers, attention=recipe.loop.attention))
    return frozen | {"taps": jnp.concatenate(taps)[:rows]}


def _blocks_and_hidden(
    drafter: Drafter,
    config: TargetConfig,
    recipe: DraftRecipe,
    frozen: Frozen,
    batch: Array,
    key: Array,
    size: int | None = None,
) -> tuple[Blocks, Float[Array, "B A n D"]]:
    """Blocks at fresh anchors of the sequences numbered `batch`, and the drafter's hidden states on them.

    `size`: rows of a block, where they are not the drafter's own.
    """
    tokens = frozen["tokens"][batch].astype(jnp.int32)
    lengths = frozen["lengths"][batch]
    mask = loss_mask(frozen["prompt_lengths"][batch], lengths, tokens.shape[1])
    if "taps" in frozen:
        taps = frozen["taps"][batch]
    else:
        layers, attention = drafter.config.target_layer_ids, recipe.loop.attention
        taps = _taps(frozen["target"], tokens, lengths, config=config, layers=layers, attention=attention)
    anchors, keep = sample_anchors(key, mask, recipe.anchors)
    blocks = make_blocks(
        tokens, mask, anchors, keep,
        size=size or drafter.config.block_size, mask_token_id=drafter.config.mask_token_id, gamma=recipe.decay_gamma,
    )
    embeddings = frozen["target"].embed[blocks.inputs]
    return blocks, draft_hidden(drafter, jax.lax.stop_gradient(taps), embeddings, anchors)


def head_of(frozen: Frozen) -> Float[Array, "V D"]:
    """The target's output table."""
    params = frozen["target"]
    return params.embed if params.head is None else params.head


def draft_loss(graph: nnx.GraphDef, config: TargetConfig, recipe: DraftRecipe) -> LossFn:
    """Σ w·CE / Σ w over the blocks' slots 1 … n − 1; embedding and head are the target's, frozen."""
    dtype = jnp.dtype(recipe.loop.dtype)

    def loss(
        params: nnx.State, inputs: tuple[Frozen, Array], key: Array
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        frozen, batch = inputs
        drafter = nnx.merge(graph, jax.tree.map(lambda p: p.astype(dtype), params))
        blocks, hidden = _blocks_and_hidden(drafter, config, recipe, frozen, batch, key)
        weights = blocks.weights[..., 1:]
        rows = hidden[:, :, 1:].reshape(-1, hidden.shape[-1])
        share = (weights / jnp.maximum(weights.sum(), 1e-6)).reshape(-1)
        head = jax.lax.stop_gradient(head_of(frozen))
        labels = blocks.labels[..., 1:].reshape(-1)
        total, predicted = grouped.cross_entropy(rows, head, labels, share)
        predicted = jnp.pad(predicted.reshape(weights.shape), ((0, 0), (0, 0), (1, 0)))
        return total, {"tau": agreement(blocks, predicted)["tau"]}

    return loss


def evaluate_draft(
    drafter: Drafter, target: Target, answers: Answers, recipe: DraftRecipe, anchors: int = 128
) -> dict[str, Any]:
    """Agreement of argmax drafts with held-out answers at many random anchors, bf16 or fp32 as the models are."""
    frozen = frozen_inputs(target, answers, target.dtype)
    if recipe.cache_taps:
        frozen = with_taps(frozen, target.config, drafter.config.target_layer_ids, recipe)
    batch = min(64, len(answers))
    index = np.arange(len(answers) // batch * batch, dtype=np.int32).reshape(-1, batch)
    wide = DraftRecipe(recipe.model, recipe.responses, recipe.loop, recipe.optimizer, anchors, recipe.decay_gamma)
    graph, params = nnx.split(drafter)
    config = target.config

    @jax.jit
    def run(params: nnx.State, frozen: Frozen, index: Array) -> dict[str, Array]:
        def one(inputs: tuple[Array, Array]) -> dict[str, Array]:
            rows, number = inputs
            key = jax.random.fold_in(jax.random.key(0), number)
            blocks, hidden = _blocks_and_hidden(nnx.merge(graph, params), config, wide, frozen, rows, key)
            logits = jnp.einsum(
                "band,vd->banv", hidden, head_of(frozen), preferred_element_type=jnp.float32
            )
            kept = jnp.sum(blocks.keep)
            return {**agreement(blocks, jnp.argmax(logits, axis=-1)), "kept": kept}

        return jax.lax.map(one, (index, jnp.arange(index.shape[0])))

    values = jax.device_get(run(params, frozen, index))
    share = values["kept"] / values["kept"].sum()
    mean = {key: np.tensordot(share, values[key], axes=1) for key in ("tau", "accuracy", "chain_accuracy")}
    return {
        "tau": round(float(mean["tau"]), 3),
        "accuracy_by_depth": [round(float(x), 4) for x in mean["accuracy"]],
        "chain_accuracy_by_depth": [round(float(x), 4) for x in mean["chain_accuracy"]],
        "blocks": int(values["kept"].sum()),
    }


def chain_tau(target: Target, answers: Answers, recipe: DraftRecipe) -> Callable[[Drafter], float]:
    """A function of a drafter: τ of decoding these greedy answers in rounds of a chain, exactly, without decoding.

    With greedy decoding the answer is known beforehand, so a round from any place of it is too: it emits the leading
    drafts that agree and one token more. All places are drafted in one pass; the rounds then jump from place to place.
    (`evaluate_draft` takes random places; decoding begins its rounds where the last guess went wrong, and gets less.)

    Args:
      target: in the dtype to draft in. answers: its greedy answers, of at least two tokens each.
      recipe: gives taps and rows of a block; a drafter of more rows is asked for so many only.

    The function compiles at its first call; drafters of one config share the program.
    """
    config = target.config
    own = drafter_config(recipe, "recipe: 'model'")
    frozen = with_taps(frozen_inputs(target, answers, target.dtype), config, own.target_layer_ids, recipe)
    everywhere = dataclasses.replace(recipe, anchors=frozen["tokens"].shape[1])

    @functools.partial(jax.jit, static_argnums=0)
    def runs(
        graph: nnx.GraphDef, params: nnx.State, frozen: Frozen
    ) -> tuple[Int[Array, "N A"], Int[Array, "N A"], Bool[Array, "N A"]]:
        def one(row: Int[Array, ""]) -> tuple[Array, Array, Array]:
            drafter = nnx.merge(graph, params)
            blocks, hidden = _blocks_and_hidden(
                drafter, config, everywhere, frozen, row[None], jax.random.key(0), own.block_size
            )
            logits = jnp.einsum("band,vd->banv", hidden, head_of(frozen), preferred_element_type=jnp.float32)
            return blocks.anchors[0], leading_runs(blocks, jnp.argmax(logits, axis=-1))[0], blocks.keep[0]

        return jax.lax.map(one, jnp.arange(frozen["tokens"].shape[0]))

    def tau(drafter: Drafter) -> float:
        graph, params = nnx.split(drafter)
        tokens = rounds = 0
        for places, lengths, keep in zip(*jax.device_get(runs(graph, params, frozen)), strict=True):
            run = dict(zip(places[keep].tolist(), lengths[keep].tolist(), strict=True))
            place, last = min(run), max(run) + 1
            tokens += last - place
            while place < last:
                place += 1 + run[place]
                rounds += 1
        return tokens / rounds

    return tau


def is_matrix(params: nnx.State) -> Any:
    """True for weight matrices."""
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


def drafter_config(recipe: DraftRecipe, source: str) -> DrafterConfig:
    """The drafter's parsed config.json."""
    config, _ = parse_drafter_config(recipe.model, source)
    return config


def train_draft(
    recipe: DraftRecipe,
    recipe_path: Path,
    target: Target,
    answers: Answers,
    heldout: Answers,
    out: Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = print,
    clock: Clock | None = None,
    watch: Callable[[int, Drafter], None] | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and writes `out/drafter` (config.json and bf16 weights); returns the summary it writes too.

    Args:
      recipe: what to train. recipe_path: its file, for errors.
      target: the frozen target.
      answers, heldout: its answers to training and to held-out prompts.
      out: run folder: `draft_run/` (metrics, checkpoints, summary.json), `drafter/`.
      resume: continue from the newest checkpoint.
      say: receives one-line reports.
      clock: when the stage began; now, if not given.
      watch: called with the steps done and the fp32 drafter, before the first step and after every
        `steps_per_dispatch`; the steps that follow overwrite its arrays.

    Raises:
      UserError: the drafter's config does not fit the target.
    """
    clock = clock or Clock(recipe.loop, recipe.optimizer)
    source = f"{recipe_path}: 'model'"
    config = drafter_config(recipe, source)
    check_pair(target.config, config, source)
    graph = nnx.split(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))[0]
    params = jax.jit(lambda: nnx.state(Drafter(config, rngs=nnx.Rngs(recipe.loop.seed))))()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    optimizer = build_optimizer(recipe.optimizer, is_matrix)
    state = TrainState(params, jax.jit(optimizer.init)(params), jnp.int32(0))
    frozen = frozen_inputs(target, answers, jnp.dtype(recipe.loop.dtype))
    if recipe.cache_taps:
        frozen = with_taps(frozen, target.config, config.target_layer_ids, recipe)
    batch = recipe.loop.batch
    order = Order(len(answers), batch, recipe.loop.seed)
    dispatch = make_dispatch(
        draft_loss(graph, target.config, recipe), optimizer, recipe.optimizer, recipe.loop.seed
    )
    dispatch = compile_dispatch(
        dispatch, state, frozen, jax.ShapeDtypeStruct((recipe.loop.steps_per_dispatch, batch), jnp.int32)
    )
    say(f"draft: {count:,} parameters, compiled after {clock.elapsed:.0f} s{memory_report(dispatch)}")

    def trained(state: TrainState) -> Drafter:
        return nnx.merge(graph, jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params))

    state = fit(
        "draft", state, dispatch, frozen, order.batches, clock, out / "draft_run",
        tokens_per_step=batch * recipe.anchors * (config.block_size - 1), resume=resume, say=say,
        export=lambda state: save_drafter(out / "drafter", recipe.model, trained(state), dtype=jnp.bfloat16),
        watch=None if watch is None else lambda step, state: watch(step, nnx.merge(graph, state.params)),
    )
    summary = {
        "steps": int(state.step),
        "epochs": round(int(state.step) / order.steps_per_epoch, 2),
        "parameters": count,
        "answers": len(answers),
        "heldout": evaluate_draft(trained(state), target, heldout, recipe),
        "seconds": round(clock.elapsed, 1),
    }
    (out / "draft_run" / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    say(f"draft: {summary}")
    return summary

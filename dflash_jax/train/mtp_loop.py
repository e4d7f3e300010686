"""Training of a target's multi-token-prediction head on the frozen target's own answers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from convert import load_target, save_target, stored_dtype
from convert.load import read_config
from dflash_jax.config import TargetConfig
from dflash_jax.mtp import MTP
from dflash_jax.train import grouped
from dflash_jax.train.data import Answers, Order
from dflash_jax.train.draft_loop import Frozen, frozen_inputs, head_of, is_matrix
from dflash_jax.train.draft_loss import loss_mask
from dflash_jax.train.loop import Clock, LossFn, TrainState, compile_dispatch, fit, make_dispatch
from dflash_jax.train.mtp_loss import Chains, chain_agreement, chain_hidden, make_chains
from dflash_jax.train.optimizer import build_optimizer
from dflash_jax.train.settings import MTPRecipe
from dflash_jax.train.target_loop import memory_report


def _chains_and_hidden(
    mtp: MTP, config: TargetConfig, recipe: MTPRecipe, frozen: Frozen, batch: Array
) -> tuple[Chains, Float[Array, "J B T D"]]:
    """All chains of the sequences numbered `batch`, and the head's hidden states on them."""
    tokens = frozen["tokens"][batch].astype(jnp.int32)
    lengths = frozen["lengths"][batch]
    mask = loss_mask(frozen["prompt_lengths"][batch], lengths, tokens.shape[1])
    valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
    hidden, _ = grouped.forward(frozen["target"], config, tokens, valid, attention=recipe.loop.attention)
    embeddings = frozen["target"].embed[jnp.roll(tokens, -1, axis=1)]
    outputs = chain_hidden(mtp, embeddings, jax.lax.stop_gradient(hidden), recipe.steps)
    return make_chains(tokens, mask, recipe.steps), outputs


def mtp_loss(graph: nnx.GraphDef, config: TargetConfig, recipe: MTPRecipe) -> LossFn:
    """Σ w·CE / Σ w over the steps of all chains, w = decay^(j − 1); embedding and head are the target's, frozen."""
    dtype = jnp.dtype(recipe.loop.dtype)

    def loss(params: nnx.State, inputs: tuple[Frozen, Array], key: Array) -> tuple[Array, dict[str, Array]]:
        del key
        frozen, batch = inputs
        mtp = nnx.merge(graph, jax.tree.map(lambda p: p.astype(dtype), params))
        chains, hidden = _chains_and_hidden(mtp, config, recipe, frozen, batch)
        weights = chains.counted * recipe.decay ** jnp.arange(recipe.steps)[:, None, None]
        share = (weights / jnp.maximum(weights.sum(), 1e-6)).reshape(-1)
        labels = jnp.broadcast_to(chains.labels, weights.shape).reshape(-1)
        head = jax.lax.stop_gradient(head_of(frozen))
        total, predicted = grouped.cross_entropy(hidden.reshape(-1, hidden.shape[-1]), head, labels, share)
        return total, {"tau": chain_agreement(chains, predicted.reshape(weights.shape))["tau"]}

    return loss


def evaluate_mtp(mtp: MTP, config: TargetConfig, frozen: Frozen, recipe: MTPRecipe) -> dict[str, Any]:
    """Agreement of argmax drafts with the answers in `frozen`, at every place in them."""
    count = frozen["tokens"].shape[0]
    batch = min(64, count)
    index = np.arange(count // batch * batch, dtype=np.int32).reshape(-1, batch)
    graph, params = nnx.split(mtp)

    @jax.jit
    def run(params: nnx.State, frozen: Frozen, index: Array) -> dict[str, Array]:
        def one(rows: Array) -> dict[str, Array]:
            chains, hidden = _chains_and_hidden(nnx.merge(graph, params), config, recipe, frozen, rows)
            logits = jnp.einsum("jbtd,vd->jbtv", hidden, head_of(frozen), preferred_element_type=jnp.float32)
            return {
                **chain_agreement(chains, jnp.argmax(logits, axis=-1)), "places": jnp.sum(chains.counted[0])
            }

        return jax.lax.map(one, index)

    values = jax.device_get(run(params, frozen, index))
    share = values["places"] / values["places"].sum()
    mean = {key: np.tensordot(share, values[key], axes=1) for key in ("tau", "accuracy", "chain_accuracy")}
    return {
        "tau": round(float(mean["tau"]), 3),
        "accuracy_by_step": [round(float(x), 4) for x in mean["accuracy"]],
        "chain_accuracy_by_step": [round(float(x), 4) for x in mean["chain_accuracy"]],
        "places": int(values["places"].sum()),
    }


def merge_head(source: Path, folder: Path, mtp: MTP) -> None:
    """Writes to `folder` the target that lies in `source` (which may be the same) with this head beside it.

    The target's own tensors keep their values and dtypes; every other file of the folder comes along.
    """
    raw = read_config(source)
    (raw["text_config"] if raw.get("text_config") else raw)["mtp_num_hidden_layers"] = 1
    kind = stored_dtype(source)
    _, target = load_target(source, kind, progress=False)
    graph, weights = nnx.split(mtp)
    mtp = nnx.merge(graph, jax.tree.map(lambda p: p.astype(kind), weights))
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and ".safetensors" not in path.name and folder.resolve() != source.resolve():
            shutil.copy(path, folder / path.name)
    save_target(folder, raw, target, mtp=mtp)


def train_mtp(
    recipe: MTPRecipe,
    source: Path,
    answers: Answers,
    heldout: Answers,
    out: Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = print,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and writes `out/target`, the target with its head; returns the summary it writes too.

    Args:
      recipe: how to train.
      source: folder of the frozen target.
      answers, heldout: its answers to training and to held-out prompts.
      out: run folder: `mtp_run/` (metrics, checkpoints, summary.json), `target/`.
      resume: continue from the newest checkpoint.
      say: receives one-line reports.
      clock: when the stage began; now, if not given.
    """
    clock = clock or Clock(recipe.loop, recipe.optimizer)
    config, target = load_target(source, recipe.loop.dtype)
    graph = nnx.split(nnx.eval_shape(lambda: MTP(config, rngs=nnx.Rngs(0))))[0]
    params = jax.jit(lambda: nnx.state(MTP(config, rngs=nnx.Rngs(recipe.loop.seed))))()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    optimizer = build_optimizer(recipe.optimizer, is_matrix)
    state = TrainState(params, jax.jit(optimizer.init)(params), jnp.int32(0))
    dtype = jnp.dtype(recipe.loop.dtype)
    frozen = frozen_inputs(target, answers, dtype)
    batch = recipe.loop.batch
    order = Order(len(answers), batch, recipe.loop.seed)
    dispatch = make_dispatch(mtp_loss(graph, config, recipe), optimizer, recipe.optimizer, recipe.loop.seed)
    dispatch = compile_dispatch(
        dispatch, state, frozen, jax.ShapeDtypeStruct((recipe.loop.steps_per_dispatch, batch), jnp.int32)
    )
    say(f"mtp: {count:,} parameters, compiled after {clock.elapsed:.0f} s{memory_report(dispatch)}")

    def trained(state: TrainState) -> MTP:
        return nnx.merge(graph, jax.tree.map(lambda p: p.astype(dtype), state.params))

    state = fit(
        "mtp", state, dispatch, frozen, order.batches, clock, out / "mtp_run",
        tokens_per_step=batch * answers.tokens.shape[1], resume=resume, say=say,
        export=lambda state: merge_head(source, out / "target", trained(state)),
    )
    summary = {
        "steps": int(state.step),
        "epochs": round(int(state.step) / order.steps_per_epoch, 2),
        "parameters": count,
        "answers": len(answers),
        "heldout": evaluate_mtp(trained(state), config, frozen_inputs(target, heldout, dtype), recipe),
        "seconds": round(clock.elapsed, 1),
    }
    (out / "mtp_run" / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    say(f"mtp: {summary}")
    return summary

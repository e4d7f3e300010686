"""Training of a target from scratch on the generated corpus."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from convert import save_target
from dflash_jax.config import TargetConfig, parse_target_config
from dflash_jax.errors import UserError
from dflash_jax.target import Target
from dflash_jax.train import grouped
from dflash_jax.train.corpus_files import corpus_paths, start_corpus
from dflash_jax.train.data import Order, load_stream, take_windows, window_starts
from dflash_jax.train.loop import Clock, LossFn, TrainState, compile_dispatch, fit, make_dispatch
from dflash_jax.train.optimizer import build_optimizer
from dflash_jax.train.settings import TargetRecipe


def target_loss(config: TargetConfig, recipe: TargetRecipe) -> LossFn:
    """Mean next-token cross-entropy (nats a token) of windows of the stream, fp32 logits."""
    length, dtype = recipe.sequence_length, jnp.dtype(recipe.loop.dtype)

    def loss(
        params: grouped.GroupedParams, inputs: tuple[Array, Int[Array, " B"]], key: Array
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        del key
        stream, starts = inputs
        tokens = take_windows(stream, starts, length + 1)
        cast = grouped.cast(params, dtype)
        hidden, _ = grouped.forward(
            cast, config, tokens[:, :-1],
            remat=recipe.loop.remat, unroll=recipe.loop.unroll, attention=recipe.loop.attention,
        )
        labels = tokens[:, 1:].reshape(-1)
        weights = jnp.full(labels.shape, 1.0 / labels.size, jnp.float32)
        head = cast.embed if cast.head is None else cast.head
        total, _ = grouped.cross_entropy(hidden.reshape(labels.size, -1), head, labels, weights)
        return total, {}

    return loss


def init_params(config: TargetConfig, seed: int) -> grouped.GroupedParams:
    """Freshly initialised fp32 master weights."""
    return jax.jit(lambda: grouped.group(Target(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))))()


def evaluate(
    params: grouped.GroupedParams, config: TargetConfig, recipe: TargetRecipe, stream: np.ndarray, separator: int
) -> float:
    """Mean loss (nats a token) over a held-out stream."""
    starts = window_starts(stream, recipe.sequence_length, separator)
    batch = min(recipe.loop.batch, len(starts))
    starts = starts[: len(starts) // batch * batch].reshape(-1, batch).astype(np.int32)
    loss = target_loss(config, recipe)

    @jax.jit
    def run(params: Any, stream: Array, starts: Array) -> Array:
        return jax.lax.map(lambda s: loss(params, (stream, s), jax.random.key(0))[0], starts).mean()

    return float(run(params, jnp.asarray(stream), starts))


def separator_of(config: TargetConfig, source: str) -> int:
    """The token that ends documents, which is also the padding token."""
    if config.pad_token_id is None:
        raise UserError(f"{source}: 'model' needs 'pad_token_id', the token that ends every document")
    return config.pad_token_id


def train_target(
    recipe: TargetRecipe,
    recipe_path: Path,
    out: Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = print,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and writes `out/target` (config.json and bf16 weights); returns the summary it writes too.

    Args:
      recipe: what to train.
      recipe_path: its file (the corpus process reads it).
      out: run folder: `corpus/`, `target_run/` (metrics, checkpoints, summary.json), `target/`.
      resume: continue from the newest checkpoint.
      say: receives one-line reports.
      clock: when the stage began; now, if not given.
    """
    clock = clock or Clock(recipe.loop, recipe.optimizer)
    config = parse_target_config(recipe.model, source=f"{recipe_path}: 'model'")
    separator = separator_of(config, str(recipe_path))
    corpus = start_corpus(recipe_path, out)
    try:
        params = init_params(config, recipe.loop.seed)
        optimizer = build_optimizer(recipe.optimizer, grouped.is_matrix)
        state = TrainState(params, jax.jit(optimizer.init)(params), jnp.int32(0))
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        say(f"target: {count:,} parameters, {jax.devices()[0].device_kind}")
        batch, chunk = recipe.loop.batch, recipe.loop.steps_per_dispatch
        dispatch = make_dispatch(target_loss(config, recipe), optimizer, recipe.optimizer, recipe.loop.seed)
        dispatch = compile_dispatch(
            dispatch, state, jax.ShapeDtypeStruct((recipe.corpus.tokens,), jnp.uint16),
            jax.ShapeDtypeStruct((chunk, batch), jnp.int32),
        )
        say(f"target: compiled after {clock.elapsed:.0f} s{memory_report(dispatch)}")
        if corpus.wait() != 0:
            raise UserError(f"{out / 'corpus'}: writing the corpus failed (see above)")
    finally:
        if corpus.poll() is None:
            corpus.terminate()
    train_path, heldout_path = corpus_paths(out)
    stream = load_stream(train_path, config.vocab_size)
    heldout = load_stream(heldout_path, config.vocab_size)
    starts = window_starts(stream, recipe.sequence_length, separator).astype(np.int32)
    order = Order(len(starts), batch, recipe.loop.seed)
    say(f"target: corpus of {len(stream) / 1e6:.0f}M tokens ready after {clock.elapsed:.0f} s")
    state = fit(
        "target", state, dispatch, jnp.asarray(stream), lambda step, n: starts[order.batches(step, n)], clock,
        out / "target_run", tokens_per_step=batch * recipe.sequence_length, resume=resume, say=say,
        export=lambda state: save_target(
            out / "target", recipe.model, grouped.ungroup(state.params, config), dtype=jnp.bfloat16
        ),
    )
    loss = evaluate(state.params, config, recipe, heldout, separator)
    summary = {
        "steps": int(state.step),
        "tokens": int(state.step) * batch * recipe.sequence_length,
        "parameters": count,
        "heldout_loss": round(loss, 4),
        "heldout_perplexity": round(math.exp(loss), 3),
        "seconds": round(clock.elapsed, 1),
    }
    (out / "target_run" / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    say(f"target: {summary}")
    return summary


def memory_report(compiled: Any) -> str:
    """Temporary memory of a compiled program, where the platform says."""
    analysis = compiled.memory_analysis()
    return f", {analysis.temp_size_in_bytes / 1e9:.1f} GB of temporaries" if analysis is not None else ""

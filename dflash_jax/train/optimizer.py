"""Optimiser and learning-rate schedule.

The learning rate is a traced function of (step, total steps), so that a run whose length is still being measured needs
no recompilation.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dflash_jax.train.settings import OptimizerSettings

# Quintic Newton-Schulz coefficients of Muon (Jordan et al. 2024): singular values end near 1 in five steps.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def learning_rate(
    settings: OptimizerSettings, step: Int[Array, ""], total: Int[Array, ""]
) -> Float[Array, ""]:
    """Learning rate of step 0, 1, …, total − 1."""
    step, total = jnp.asarray(step, jnp.float32), jnp.asarray(total, jnp.float32)
    warm = jnp.minimum((step + 1) / max(settings.warmup_steps, 1), 1.0)
    if settings.schedule == "wsd":
        left = (total - step) / jnp.maximum(settings.decay_fraction * total, 1.0)
        shape = jnp.clip(left, 0.0, 1.0)
    else:
        shape = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(step / total, 0.0, 1.0)))
    ratio = settings.final_lr_ratio
    return settings.peak_lr * warm * (ratio + (1.0 - ratio) * shape)


def decay_start(settings: OptimizerSettings, total: int) -> int:
    """First step whose learning rate depends on `total`; before it the length of the run may still change."""
    return int(total * (1.0 - settings.decay_fraction)) if settings.schedule == "wsd" else settings.warmup_steps


def orthogonalise(momentum: Float[Array, "... o i"]) -> Float[Array, "... o i"]:
    """Nearest semi-orthogonal matrices, roughly: five Newton-Schulz steps in bf16 over the last two axes."""
    a, b, c = _NEWTON_SCHULZ
    x = momentum.astype(jnp.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = x / (norm + 1e-7).astype(x.dtype)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).astype(momentum.dtype)


def _scale_by_muon(beta: float = 0.95) -> optax.GradientTransformation:
    """Orthogonalised Nesterov momentum, scaled to the size of AdamW's updates (arXiv 2502.16982, eq. 4)."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        momentum = jax.tree.map(lambda m, g: beta * m + g, state, updates)

        def direction(m: Array, g: Array) -> Array:
            return orthogonalise(beta * m + g) * (0.2 * max(g.shape[-2:]) ** 0.5)

        return jax.tree.map(direction, momentum, updates), momentum

    return optax.GradientTransformation(init, update)


def build_optimizer(
    settings: OptimizerSettings, is_matrix: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """Updates before the learning rate: the caller subtracts lr × update.

    Args:
      settings: the recipe's.
      is_matrix: parameters -> same tree of bools, True for weight matrices (which decay, and which Muon serves).
    """
    adam = optax.scale_by_adam(settings.b1, settings.b2, settings.eps)
    clip = optax.clip_by_global_norm(settings.clip_norm)
    decay = optax.add_decayed_weights(settings.weight_decay, mask=is_matrix)
    if settings.kind == "adamw":
        return optax.chain(clip, adam, decay)

    def labels(params: Any) -> Any:
        def label(path: Any, leaf: Array, matrix: bool) -> str:
            # Tables and maps to a handful of gates are no matrices in Muon's sense.
            table = "embed_tokens" in jax.tree_util.keystr(path)
            return "muon" if matrix and not table and min(leaf.shape[-2:]) >= 16 else "adam"

        return jax.tree_util.tree_map_with_path(label, params, is_matrix(params))

    return optax.chain(clip, optax.multi_transform({"muon": _scale_by_muon(), "adam": adam}, labels), decay)

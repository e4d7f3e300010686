"""Recipe files: JSON -> frozen dataclasses, with errors that name the file and the key."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, Literal

from dflash_jax.config import read_json
from dflash_jax.errors import UserError

AttentionKind = Literal["xla", "cudnn"]
PromptSource = Literal["corpus", "open"]

RECIPES = Path(__file__).parent / "recipes"


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (or Muon on the matrices) with a warm-up, a constant phase and a linear decay, or a cosine.

    Attributes:
      kind: "adamw", or "muon" (orthogonalised momentum on matrices, AdamW on everything else).
      peak_lr: learning rate after the warm-up.
      final_lr_ratio: learning rate of the last step over `peak_lr`.
      schedule: "wsd" (constant, then linear over the last `decay_fraction` of the run) or "cosine".
      warmup_steps: steps of linear warm-up.
      decay_fraction: see `schedule`.
      b1, b2, eps: AdamW's.
      weight_decay: on matrices alone; norms, gates and convolutions have none.
      clip_norm: bound on the global gradient norm.
    """

    kind: str = "adamw"
    peak_lr: float = 2e-3
    final_lr_ratio: float = 0.02
    schedule: str = "wsd"
    warmup_steps: int = 200
    decay_fraction: float = 0.4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """How long to train and how often to look up.

    Attributes:
      batch: sequences a step.
      steps: number of steps; None to fit the run into `max_seconds`. Exactly one of the two is set.
      max_seconds: wall seconds of the whole stage, waiting for data and compilation included. The number of steps
        follows from the measured speed and is settled before the decay starts, so the decay always completes.
      reserve_seconds: part of `max_seconds` kept for what follows the last step (evaluation, writing).
      steps_per_dispatch: optimiser steps in one compiled call.
      checkpoint_steps: steps between checkpoints; 0 for one at the end only.
      seed: of initial weights and of the order of the data.
      dtype: of activations and of the weights as they enter products; the master weights are fp32.
      remat: keep only the layers' inputs for the backward pass and recompute the rest.
      unroll: unroll the scan over layer groups (slower to compile).
      attention: "xla", or "cudnn" (fused; NVIDIA GPUs and bfloat16 alone).
    """

    batch: int
    steps: int | None = None
    max_seconds: float | None = None
    reserve_seconds: float = 8.0
    steps_per_dispatch: int = 20
    checkpoint_steps: int = 0
    seed: int = 0
    dtype: str = "bfloat16"
    remat: bool = True
    unroll: bool = False
    attention: AttentionKind = "xla"


@dataclasses.dataclass(frozen=True)
class CorpusSettings:
    """The generated text.

    Attributes:
      tokens, seed: size and seed of the training stream.
      heldout_tokens: size of the held-out stream (disjoint facts and prompts; see `corpus`).
      workers: processes that write it; 0 for one a core.
    """

    tokens: int
    heldout_tokens: int = 262_144
    seed: int = 1
    workers: int = 0


@dataclasses.dataclass(frozen=True)
class TargetRecipe:
    """Everything that determines a target: `model` is its config.json, word for word."""

    model: dict[str, Any]
    corpus: CorpusSettings
    loop: LoopSettings
    optimizer: OptimizerSettings
    sequence_length: int = 512


@dataclasses.dataclass(frozen=True)
class ResponseSettings:
    """The target's own greedy answers, which the drafter learns from.

    Attributes:
      prompts, seed: number and seed of the prompts of the training split.
      heldout_prompts: number of prompts of the held-out split, for the final measurement.
      max_prompt_tokens: longer prompts are left out.
      max_new_tokens: an answer is cut there.
      batch: sequences decoded at once.
      max_seconds: no new batch is begun after so many seconds; None for no limit.
      source: "corpus" (the generated text that the bundled target knows) or "open" (prompts for any chat model; see
        `open_prompts`).
      own_prompts: of an open source, how many prompts the target is to write itself, for both splits together.
    """

    prompts: int
    heldout_prompts: int = 256
    seed: int = 2
    max_prompt_tokens: int = 96
    max_new_tokens: int = 200
    batch: int = 2048
    max_seconds: float | None = None
    source: PromptSource = "corpus"
    own_prompts: int = 0


@dataclasses.dataclass(frozen=True)
class DraftRecipe:
    """Everything that determines a drafter, given its target: `model` is its config.json, word for word.

    Attributes:
      anchors: blocks a sequence and step, redrawn each time.
      decay_gamma: γ of the loss weights exp(−(k−1)/γ) at depth k.
      cache_taps: run the target once over all answers and keep its taps in device memory (answers × tokens × taps'
        width × bytes of `loop.dtype`), so that a step trains the drafter alone: right for few answers and many steps.
    """

    model: dict[str, Any]
    responses: ResponseSettings
    loop: LoopSettings
    optimizer: OptimizerSettings
    anchors: int = 32
    decay_gamma: float = 7.0
    cache_taps: bool = False


@dataclasses.dataclass(frozen=True)
class MTPRecipe:
    """Everything that determines a multi-token-prediction head, given its target, whose config fixes its shape.

    Attributes:
      steps: steps of a chain that are trained.
      decay: weight of a step's loss over that of the step before.
    """

    responses: ResponseSettings
    loop: LoopSettings
    optimizer: OptimizerSettings
    steps: int = 3
    decay: float = 0.8


def _build(kind: type, values: Any, where: str) -> Any:
    """A dataclass from a JSON object; unknown, missing and mistyped keys are errors."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(values).__name__}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    types = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise UserError(f"{where}: unknown key '{unknown[0]}' (known: {', '.join(fields)})")
    built = {}
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                raise UserError(f"{where}: no '{name}'")
            continue
        built[name] = _value(types[name], values[name], f"{where}: '{name}'")
    return kind(**built)


def _value(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, where)
    if typing.get_origin(kind) is Literal:
        if value in typing.get_args(kind):
            return value
        raise UserError(f"{where} must be one of {', '.join(typing.get_args(kind))}, found {value!r}")
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in options:
        return None
    if dict in (kind, typing.get_origin(kind)):
        if not isinstance(value, dict):
            raise UserError(f"{where} must be a JSON object, found {value!r}")
        return value
    if float in options and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    for option in (int, str, bool):
        if option in options and type(value) is option:
            return value
    raise UserError(f"{where} must be {getattr(kind, '__name__', kind)}, found {value!r}")


def _check(loop: LoopSettings, optimizer: OptimizerSettings, where: str) -> None:
    if (loop.steps is None) == (loop.max_seconds is None):
        raise UserError(f"{where}: 'loop' needs exactly one of 'steps' and 'max_seconds'")
    if loop.batch < 1 or loop.steps_per_dispatch < 1 or (loop.steps is not None and loop.steps < 1):
        raise UserError(f"{where}: 'batch', 'steps' and 'steps_per_dispatch' must be at least 1")
    if loop.dtype not in ("bfloat16", "float32"):
        raise UserError(f"{where}: 'dtype' must be 'bfloat16' or 'float32', found {loop.dtype!r}")
    if optimizer.kind not in ("adamw", "muon"):
        raise UserError(f"{where}: optimizer 'kind' must be 'adamw' or 'muon', found {optimizer.kind!r}")
    if optimizer.schedule not in ("wsd", "cosine"):
        raise UserError(f"{where}: 'schedule' must be 'wsd' or 'cosine', found {optimizer.schedule!r}")


def load_target_recipe(path: Path) -> TargetRecipe:
    """Reads a target recipe, or raises `UserError` naming the file and the key."""
    recipe = _build(TargetRecipe, read_json(path), str(path))
    _check(recipe.loop, recipe.optimizer, str(path))
    if recipe.sequence_length < 2:
        raise UserError(f"{path}: 'sequence_length' must be at least 2")
    return recipe


def load_draft_recipe(path: Path) -> DraftRecipe:
    """Reads a drafter recipe, or raises `UserError` naming the file and the key."""
    recipe = _build(DraftRecipe, read_json(path), str(path))
    _check(recipe.loop, recipe.optimizer, str(path))
    if recipe.anchors < 1 or recipe.decay_gamma <= 0:
        raise UserError(f"{path}: 'anchors' must be at least 1 and 'decay_gamma' positive")
    return recipe


def load_mtp_recipe(path: Path) -> MTPRecipe:
    """Reads a recipe of a draft head, or raises `UserError` naming the file and the key."""
    recipe = _build(MTPRecipe, read_json(path), str(path))
    _check(recipe.loop, recipe.optimizer, str(path))
    if recipe.steps < 1 or not 0 < recipe.decay <= 1:
        raise UserError(f"{path}: 'steps' must be at least 1, and 'decay' above 0 and at most 1")
    return recipe


def with_loop(recipe: Any, **changes: Any) -> Any:
    """The recipe with some loop settings replaced (command-line overrides)."""
    return dataclasses.replace(recipe, loop=dataclasses.replace(recipe.loop, **changes))

"""The loop that both trainings share: dispatch, clock, progress bar, metrics file, checkpoints."""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int
from tqdm import tqdm

from dflash_jax.errors import UserError
from dflash_jax.train import checkpoint
from dflash_jax.train.optimizer import decay_start, learning_rate
from dflash_jax.train.settings import LoopSettings, OptimizerSettings


@struct.dataclass
class TrainState:
    """All that a step changes: fp32 master weights, optimiser state, steps done."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]


LossFn = Callable[[Any, Any, Array], tuple[Array, dict[str, Array]]]


def make_dispatch(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, settings: OptimizerSettings, seed: int
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Several optimiser steps in one compiled call, as (state, data, batches, total steps) -> (state, metrics).

    Args:
      loss_fn: (params, (data, batch), key) -> (loss, scalar metrics).
      optimizer: update before the learning rate.
      settings: for the schedule.
      seed: of the keys given to `loss_fn`; they depend on the step alone, so a resumed run draws the same ones.
    """

    def dispatch(state: TrainState, data: Any, batches: Any, total: Array) -> tuple[TrainState, dict[str, Array]]:
        def one(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Array]]:
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            (loss, extra), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, (data, batch), key)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            lr = learning_rate(settings, state.step, total)
            params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
            metrics = {"loss": loss, "lr": lr, "grad_norm": _norm(grads), **extra}
            return TrainState(params, opt_state, state.step + 1), metrics

        return jax.lax.scan(one, state, batches)

    return jax.jit(dispatch, donate_argnums=0)


def _norm(tree: Any) -> Array:
    """L2 norm of all leaves together."""
    return jnp.sqrt(sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(tree)))


def compile_dispatch(dispatch: Any, state: TrainState, data: Any, batches: Any) -> Any:
    """Compiles ahead of time from shapes alone (data may still be being written); returns the executable."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, data, batches))
    return dispatch.lower(*shapes, jax.ShapeDtypeStruct((), jnp.int32)).compile()


class Metrics:
    """A JSONL file, one object a line, appended to when a run resumes."""

    def __init__(self, path: Path, resume: bool):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if resume else "w", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Appends one line."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@dataclasses.dataclass
class Clock:
    """Wall clock of a stage and, in a time-boxed run, the number of steps that fit."""

    settings: LoopSettings
    optimizer: OptimizerSettings
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the stage began."""
        return time.monotonic() - self.started

    def total_steps(self, done: int, step_seconds: float | None, current: int) -> int:
        """Steps of the whole run as seen after `done` of them; settled once the decay has begun."""
        if self.settings.steps is not None:
            return self.settings.steps
        assert self.settings.max_seconds is not None
        if step_seconds is None or (current and done >= decay_start(self.optimizer, current)):
            return current
        left = self.settings.max_seconds - self.settings.reserve_seconds - self.elapsed
        chunk = self.settings.steps_per_dispatch
        # Whole dispatches, so that the last one needs no program of its own.
        return done + max(int(left / step_seconds) // chunk, 1) * chunk


def fit(
    name: str,
    state: TrainState,
    dispatch: Any,
    data: Any,
    batches: Callable[[int, int], Any],
    clock: Clock,
    out: Path,
    *,
    tokens_per_step: int,
    resume: bool = False,
    say: Callable[[str], None] = print,
    stop_after: int | None = None,
    export: Callable[[TrainState], None] | None = None,
    watch: Callable[[int, TrainState], None] | None = None,
) -> TrainState:
    """Trains to the end of the schedule and leaves a checkpoint; returns the final state.

    Args:
      name: shown in the progress bar and the metrics.
      state: freshly initialised state (replaced by the newest checkpoint when resuming).
      dispatch: from `make_dispatch`, compiled or not.
      data: device arrays every batch reads.
      batches: (first step, count) -> batch inputs with leading axis `count`.
      clock: started when the stage began.
      out: folder for `metrics.jsonl` and `checkpoints/`.
      tokens_per_step: for the throughput figures.
      resume: continue from the newest checkpoint in `out`.
      say: receives one-line reports.
      stop_after: stop (with a checkpoint) once so many steps are done: an interrupted run, for tests.
      export: called with the trained state before the last checkpoint is written: the weights that a run is for come
        first.
      watch: called with the steps done and the state, before the first step and after every dispatch. The next
        dispatch overwrites the state's arrays: copy what is to be kept.

    Raises:
      UserError: the loss is no longer finite.
    """
    settings = clock.settings
    if settings.steps is not None and settings.steps % settings.steps_per_dispatch:
        raise UserError(
            f"'steps' {settings.steps} must be a multiple of 'steps_per_dispatch' {settings.steps_per_dispatch}"
        )
    folder = out / "checkpoints"
    done, total = 0, clock.total_steps(0, None, 0)
    if resume:
        restored = checkpoint.restore(folder, (state, jnp.int32(total)))
        if restored is not None:
            done, (state, saved_total) = restored
            total = total or int(saved_total)
            say(f"{name}: resumed at step {done}")
    speed: float | None = None
    saved = -1
    first = True
    with (
        Metrics(out / "metrics.jsonl", resume) as metrics,
        tqdm(
            total=total or None, initial=done, desc=name, unit="step", mininterval=5.0, file=sys.stderr
        ) as bar,
    ):
        if watch is not None:
            watch(done, state)
        while not total or done < total:
            count = settings.steps_per_dispatch
            began = time.monotonic()
            # Until the speed is known no decay may start: as far as the schedule knows, the run is very long.
            state, values = dispatch(state, data, batches(done, count), jnp.int32(total or 1 << 30))
            values = {key: jax.device_get(value) for key, value in values.items()}
            seconds = time.monotonic() - began
            done += count
            if not first:  # the first call may compile, load programs and warm up the clocks
                speed = seconds / count if speed is None else min(0.7 * speed + 0.3 * seconds / count, speed * 1.5)
            first = False
            total = clock.total_steps(done, speed, total)
            last = {key: float(value[-1]) for key, value in values.items()}
            rate = tokens_per_step * count / seconds
            metrics.write(
                stage=name, step=done, **last, loss_mean=float(values["loss"].mean()), tokens_per_second=round(rate),
                seconds=round(clock.elapsed, 2), total_steps=total,
            )
            if not math.isfinite(last["loss"]):
                raise UserError(f"{out / 'metrics.jsonl'}: loss is {last['loss']} at step {done}; lower 'peak_lr'")
            bar.total = total or None
            bar.update(count)
            bar.set_postfix_str(f"loss {last['loss']:.3f} {rate / 1e3:.0f}k tok/s", refresh=False)
            if watch is not None:
                watch(done, state)
            every = settings.checkpoint_steps
            if every and done // every > (done - count) // every and done < total:
                checkpoint.save(folder, done, (state, jnp.int32(total)))
                saved = done
            if stop_after is not None and done >= stop_after:
                break
    if export is not None and done >= total:
        export(state)
    if saved != done:
        checkpoint.save(folder, done, (state, jnp.int32(total)))
    return state

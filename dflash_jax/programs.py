"""Compiled programs of an engine: prefill, decode, and the small ones that admit and release slots.

Programs are compiled ahead of the call that needs them and kept by their static key, so that a second request never
compiles and compile time is never mistaken for decoding time.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from dflash_jax import round as rounds
from dflash_jax.cache import reset_slots
from dflash_jax.drafter import Drafter
from dflash_jax.mtp import MTP
from dflash_jax.round import DecodeState, RoundOutput, RoundSpec
from dflash_jax.target import Target


def admit_slot(
    state: DecodeState,
    slot: Int[Array, ""],
    table: Int[Array, " T"],
    limit: Int[Array, ""],
    stop_ids: Int[Array, " S"],
) -> DecodeState:
    """Empties a slot and gives it pages, a token limit and stop ids; nothing of its last request is left."""
    return dataclasses.replace(
        state,
        cache=reset_slots(state.cache, slot[None]),
        block_tables=state.block_tables.at[slot].set(table),
        lengths=state.lengths.at[slot].set(0),
        anchor=state.anchor.at[slot].set(0),
        taps=None if state.taps is None else state.taps.at[slot].set(0),
        num_taps=state.num_taps.at[slot].set(0),
        active=state.active.at[slot].set(False),
        remaining=state.remaining.at[slot].set(limit),
        stop_ids=state.stop_ids.at[slot].set(stop_ids),
        histogram=state.histogram.at[slot].set(0),
        next_tokens=None if state.next_tokens is None else state.next_tokens.at[slot].set(0),
    )


def release_slots(state: DecodeState, slots: Bool[Array, " B"]) -> DecodeState:
    """Stops decoding in the slots marked (a stop string, which only the host can see)."""
    return dataclasses.replace(state, active=state.active & ~slots)


class Programs:
    """Compiles each (program, shapes, spec) once.

    Attributes:
      compile_seconds: time spent compiling so far.
      on_compile: called with a description before each compilation.
    """

    def __init__(self, target: Target, drafter: Drafter | None, mtp: MTP | None = None):
        self._target_def, self._target = nnx.split(target)
        models = {False: drafter, True: mtp}  # by RoundSpec.mtp
        self._drafters = {own: nnx.split(model) for own, model in models.items() if model is not None}
        self._compiled: dict[Any, Any] = {}
        self.compile_seconds = 0.0
        self.on_compile: Callable[[str], None] = lambda name: None

    def _models(self, target: Any, drafter: Any, spec: RoundSpec) -> tuple[Target, Drafter | MTP | None]:
        merged = None if drafter is None else nnx.merge(self._drafters[spec.mtp][0], drafter)
        return nnx.merge(self._target_def, target), merged

    def _drafter_of(self, spec: RoundSpec) -> Any:
        """Weights of what drafts in this round; None for none."""
        return self._drafters[spec.mtp][1] if spec.budget else None

    def _get(
        self, key: Any, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], donate: int
    ) -> Any:
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(arguments[donate]))
        key = (name, key, shapes)
        if key not in self._compiled:
            self.on_compile(name)
            start = time.perf_counter()
            self._compiled[key] = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key]

    def decode(
        self, state: DecodeState, max_rounds: int, spec: RoundSpec, buffer: int, *, compile_only: bool = False
    ) -> tuple[DecodeState, RoundOutput, Int[Array, "B H"]] | None:
        """Up to `max_rounds` rounds on the device; also returns a copy of the histogram that outlives the state."""

        def run(target: Any, drafter: Any, state: DecodeState, max_rounds: Array) -> Any:
            state, output = rounds.decode(*self._models(target, drafter, spec), state, max_rounds, spec, buffer)
            return state, output, jnp.copy(state.histogram)

        drafter = self._drafter_of(spec)
        arguments = (self._target, drafter, state, jnp.asarray(max_rounds, jnp.int32))
        program = self._get((spec, buffer), "decode", run, arguments, 2)
        return None if compile_only else program(*arguments)

    def prefill(
        self,
        state: DecodeState,
        slot: int,
        tokens: Any,
        count: int,
        last: bool,
        spec: RoundSpec,
        *,
        compile_only: bool = False,
    ) -> tuple[DecodeState, RoundOutput] | None:
        """One chunk of one slot's prompt."""

        def run(
            target: Any,
            drafter: Any,
            state: DecodeState,
            slots: Array,
            tokens: Array,
            count: Array,
            last: Array,
        ) -> Any:
            models = self._models(target, drafter, spec)
            return rounds.prefill(*models, state, slots, tokens, count, last, spec)

        drafter = self._drafter_of(spec)
        arguments = (
            self._target,
            drafter,
            state,
            jnp.asarray([slot], jnp.int32),
            jnp.asarray(tokens, jnp.int32)[None],
            jnp.asarray([count], jnp.int32),
            jnp.asarray([last]),
        )
        program = self._get((spec, len(tokens)), "prefill", run, arguments, 2)
        return None if compile_only else program(*arguments)

    def admit(self, state: DecodeState, slot: int, table: Any, limit: int, stop_ids: Any) -> DecodeState:
        """See `admit_slot`."""
        arguments = (
            state,
            jnp.asarray(slot, jnp.int32),
            jnp.asarray(table, jnp.int32),
            jnp.asarray(limit, jnp.int32),
            jnp.asarray(stop_ids, jnp.int32),
        )
        return self._get((), "admit", admit_slot, arguments, 0)(*arguments)

    def release(self, state: DecodeState, slots: Any) -> DecodeState:
        """See `release_slots`."""
        arguments = (state, jnp.asarray(slots, bool))
        return self._get((), "release", release_slots, arguments, 0)(*arguments)

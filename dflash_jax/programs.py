"""Compiled programs of an engine: prefill, decode, and the small ones that admit and release slots.

Programs are compiled ahead of the call that needs them and kept by their static key, so that a second request never
compiles and compile time is never mistaken for decoding time.
"""

import concurrent.futures
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dflash_jax import executables
from dflash_jax import round as rounds
from dflash_jax.config import DrafterConfig
from dflash_jax.decoding import decode
from dflash_jax.drafter import Drafter
from dflash_jax.mtp import MTP
from dflash_jax.packing import Packed, pack
from dflash_jax.round import DecodeState, RoundSpec
from dflash_jax.sampling import SamplingState
from dflash_jax.sharding import REPLICATED, named, parameter_specs, shard_program, state_specs
from dflash_jax.slots import admit_slot, assign_pages, copy_slot, put_slots, release_slots, take_slots
from dflash_jax.steering import Steering
from dflash_jax.target import Target
from pallas_kernels import dispatch

# Devices whose memory is not the host's.
_APART = ("gpu", "cuda")
# From how many rows on products with weights are left to cuBLAS, and of how wide a model.
CUBLAS_ROWS, CUBLAS_WIDTH = 33, 2048


def _options(rows: int, width: int) -> dict[str, bool | int | str] | None:
    """Compiler options of a program whose products with weights have so many rows and inputs; None for XLA's own.

    On a GPU, products that share an input stay as they are: XLA would join them by copying their weights side by side
    in every round (`layers.join` has done that once, where it pays). And at 64 rows of the 27B shape an H200 takes
    17.4 ms a round with cuBLAS' products and 18.1 ms with XLA's, which are the faster ones below that.
    """
    if dispatch.target_device().platform not in ("gpu", "cuda"):
        return None
    options: dict[str, bool | int | str] = {"xla_disable_hlo_passes": "dot-merger"}
    if rows >= CUBLAS_ROWS and width >= CUBLAS_WIDTH:
        options["xla_gpu_enable_triton_gemm"] = False
    return options


def _on_host(mesh: Mesh | None, devices: Sequence[jax.Device]) -> jax.sharding.Sharding | None:
    """Where a program puts what the host will read, if the device's memory is another; None for where it is.

    A copy that the program makes is part of it. One that the host asks for afterwards takes 0.2 ms to set up.
    """
    if devices[0].platform not in _APART:
        return None
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(devices[0], memory_kind="pinned_host")
    return jax.sharding.NamedSharding(mesh, REPLICATED, memory_kind="pinned_host")


def shapes_of(states: Any) -> tuple[Any, Any]:
    """Shapes and types of the arrays of states, and how these are put together: what programs of them depend on."""
    leaves, structure = jax.tree.flatten(states)
    # A type's name takes longer to find than all the rest of a call's key.
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves), structure


def _copied(data: bytes, dtype: np.dtype, shape: tuple[int, ...], place: jax.sharding.Sharding) -> jax.Array:
    return jax.device_put(np.frombuffer(data, dtype).reshape(shape), place)


class _Weights:
    """A model's weights as a plain list, which a call hands over in a tenth of the time that `nnx.State` takes.

    Attributes:
      leaves: the arrays.
      specs: how each lies on the mesh.
    """

    def __init__(self, model: nnx.Module):
        self._graph, state = nnx.split(model)
        self.leaves, self._structure = jax.tree.flatten(state)
        self.specs = jax.tree.leaves(parameter_specs(state))

    def model(self, leaves: list[Any]) -> Any:
        """The model with these weights."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._structure, leaves))


class Programs:
    """Compiles each (program, shapes, spec) once.

    Attributes:
      compiled: the programs, by name, static key and shapes.
      ready: marks of callers for what they have had compiled (`Scheduler._compile`), so that they need not ask again.
      compile_seconds: time spent compiling so far.
      on_compile: called with a description before each compilation.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, mesh: Mesh | None = None, mtp: MTP | None = None
    ):
        self._target = _Weights(target)
        models = {False: drafter, True: mtp}  # by RoundSpec.mtp
        self._drafters = {own: _Weights(model) for own, model in models.items() if model is not None}
        self._mesh = mesh
        self._config, self._dtype = target.config, target.dtype
        # What programs depend on besides their arguments; the models without their weights.
        self._outline = executables.outline([model for model in (target, drafter, mtp) if model is not None])
        self._devices = [dispatch.target_device()] if mesh is None else list(mesh.devices.flat)
        self.compiled: dict[Any, Any] = {}
        self._choices: dict[Any, dispatch.Choices] = {}
        self.ready: set[Any] = set()
        self._copied = functools.lru_cache(maxsize=256)(_copied)
        self.compile_seconds = 0.0
        self.on_compile: Callable[[str], None] = lambda name: None
        # Of programs that are compiled side by side: guards what to say of all of them, which is said once.
        self._lock = threading.Lock()
        self._together: str | None = None

    def _models(self, weights: list[Any], spec: RoundSpec) -> tuple[Target, Drafter | MTP | None]:
        """Target and what drafts in this round, of the lists that `_weights` gives."""
        own, *drafting = weights
        return self._target.model(own), self._drafters[spec.mtp].model(drafting[0]) if drafting else None

    def _weights(self, spec: RoundSpec) -> list[_Weights]:
        """Of the target, and of what drafts in this round if anything does."""
        return [self._target, self._drafters[spec.mtp]] if spec.drafts else [self._target]

    def _get(
        self,
        key: Any,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        weights: list[_Weights] | None = None,
        rows: int = 0,
    ) -> Any:
        """The compiled program of a function that takes the leaves of `weights` (if any), a state, and small things.

        It returns the state and something that is alike on every device; the small things are that too. `rows` is how
        many rows its products with weights have.
        """
        donate = 0 if weights is None else 1
        key = (name, key, *shapes_of([x for x in arguments if isinstance(x, DecodeState)]))
        if key not in self.compiled:
            self._announce(name)
            start = time.perf_counter()
            options = _options(rows, self._config.hidden_size)
            mesh = None if self._mesh is None else str(self._mesh.shape)
            kept = executables.entry(self._devices, arguments, (key[:2], options, mesh), self._outline)
            if kept is not None and (found := kept.load(arguments)) is not None:
                self.compiled[key], self._choices[key] = found
                self._took(start)
                return self.compiled[key]
            specs = [state_specs(x) if isinstance(x, DecodeState) else REPLICATED for x in arguments]
            if weights is not None:
                specs[0] = [w.specs for w in weights]
            sharded = shard_program(function, self._mesh, tuple(specs), (specs[donate], REPLICATED))
            places = None, _on_host(self._mesh, self._devices)
            with dispatch.recording() as choices:
                lowered = jax.jit(sharded, donate_argnums=donate, out_shardings=places).lower(*arguments)
            self.compiled[key], new = executables.compiled(lowered, options)
            self._choices[key] = choices
            if kept is not None and new:
                kept.save(self.compiled[key], choices)
            self._took(start)
        return self.compiled[key]

    def _announce(self, name: str) -> None:
        with self._lock:
            if self._together is None:
                self.on_compile(name)
            elif self._together:
                self.on_compile(self._together)
                self._together = ""

    def _took(self, start: float) -> None:
        if self._together is None:
            self.compile_seconds += time.perf_counter() - start

    def together(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Makes calls with `compile_only` side by side, on as many threads as there are processors.

        Tracing is Python's, one at a time, but most of the time XLA compiles, which holds nobody up. `compile_seconds`
        counts the time of all of them once. Of several processes each makes one call after the other, in this order:
        where XLA tries out what is fastest, they tell each other.
        """
        if jax.process_count() > 1:
            for job in jobs:
                job()
            return
        start, known, device = time.perf_counter(), len(self.compiled), jax.config.jax_default_device

        def run(job: Callable[[], object]) -> None:
            with jax.default_device(device):  # of the calling thread
                job()

        self._together = "programs"
        try:
            with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(run, jobs))
        finally:
            self._together = None
            if len(self.compiled) > known:
                self._took(start)

    def init(
        self,
        drafter: DrafterConfig | None,
        slots: int,
        capacity: int,
        page_size: int,
        *,
        mtp_steps: int = 0,
        pages: int | None = None,
        abstract: bool = False,
    ) -> DecodeState:
        """See `round.init_state`; every device makes its own part. An abstract one is enough to compile for."""
        config, dtype = self._config, self._dtype

        def make() -> DecodeState:
            return rounds.init_state(
                config, drafter, slots=slots, capacity=capacity, page_size=page_size, dtype=dtype,
                mtp_steps=mtp_steps, pages=pages,
            )  # fmt: skip

        if self._mesh is None:
            return jax.eval_shape(make) if abstract else make()
        shapes = jax.eval_shape(make)
        shardings = named(self._mesh, state_specs(shapes))
        if abstract:
            return jax.tree.map(
                lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), shapes, shardings
            )
        return jax.jit(make, out_shardings=shardings)()

    def kernels(self, *specs: RoundSpec) -> dict[str, str]:
        """Op -> implementation in the programs compiled for `specs`; "pallas+xla" where its calls differ."""
        found: dispatch.Choices = {}
        for (_, static, *_), choices in self._choices.items():
            if static and static[0] in specs:
                for op, names in choices.items():
                    found.setdefault(op, set()).update(names)
        return {op: "+".join(sorted(names)) for op, names in sorted(found.items())}

    def _beside(self, state: DecodeState, values: Any) -> Any:
        """The same values where the state is, for a call: most of them are those of a call before, so they lie there.

        Each NumPy array of a call is a copy to every device, which takes the host of a GPU longer than the look.
        Of several processes, which would have to agree on each copy, every one hands over its own.
        """
        if jax.process_count() > 1:
            return values
        place = state.anchor.sharding
        return jax.tree.map(
            lambda x: self._copied(x.tobytes(), x.dtype, x.shape, place) if isinstance(x, np.ndarray) else x, values
        )

    def replicated(self, tree: Any) -> Any:
        """The same arrays on every device."""
        if self._mesh is None:
            return tree
        everywhere = named(self._mesh, jax.tree.map(lambda _: REPLICATED, tree))
        return jax.device_put(jax.tree.map(np.asarray, tree), everywhere)

    def decode(
        self,
        state: DecodeState,
        max_rounds: int | None,
        spec: RoundSpec,
        buffer: int,
        own: Any = None,
        slots: Any = None,
        *,
        steering: Steering | None = None,
        compile_only: bool = False,
    ) -> tuple[DecodeState, tuple[Packed, Float[Array, " M"] | None]] | None:
        """Up to `max_rounds` rounds on the device for the slots marked by `own` (None: for all).

        Without `max_rounds` it is one round, in a program without a loop: the host of a GPU has to wait for the end of
        a loop, and this one it just hands over.

        Args:
          state: of B slots.
          max_rounds: see above.
          spec: the rounds.
          buffer: see `decoding.decode`.
          own: a mark for each of the B.
          slots: numbers, all different, of the W slots that the rounds hold, by row of the results; None for all B.
            The rounds cost as much as in a state of W slots, and a copy of what these hold besides pages.
          steering: see `decoding.decode`.
          compile_only: whether nothing is run.

        Returns:
          The state; `RoundOutput` and histogram of the W slots; and the beliefs of `RoundOutput`, which the next call
          takes and the host need not read. None if nothing is run.
        """
        loop, whole = max_rounds is not None, state.anchor.shape[0]

        def run(
            weights: Any, state: DecodeState, max_rounds: Array, own: Array, steered_by: Any, *slots: Array
        ) -> Any:
            models = self._models(weights, spec)
            steering = None if state.beliefs is None else Steering(state.beliefs, *steered_by)
            state = dataclasses.replace(state, beliefs=None)
            part = take_slots(state, *slots) if slots else state
            part, output = decode(*models, part, max_rounds if loop else None, spec, buffer, own, steering)
            results = pack((dataclasses.replace(output, beliefs=None), part.histogram))
            state = put_slots(state, part, *slots) if slots else part
            return dataclasses.replace(state, beliefs=output.beliefs), results

        weights = self._weights(spec)
        marked = np.ones((whole,), bool) if own is None else np.asarray(own, bool)
        chosen = () if slots is None else (np.asarray(slots, np.int32),)
        marked = marked[chosen] if chosen else marked
        limit = np.asarray(max_rounds or 0, np.int32)
        steered_by = None
        if steering is not None:
            # Donated as the state is: of arrays that outlive a burst the next one's would find theirs in other places,
            # and a GPU's graphs would have to be told.
            state = dataclasses.replace(state, beliefs=steering.beliefs)
            steered_by = (steering.seconds, steering.keep, steering.forced)
        small = (limit, marked, steered_by, *chosen)
        arguments = ([w.leaves for w in weights], state, *small)
        key = (spec, buffer, loop, len(marked), bool(chosen), steering is not None)
        rows = len(marked) * ((spec.budget if steering is None else spec.buckets[1]) + 1)
        program = self._get(key, "decode", run, arguments, weights, rows)
        if compile_only:
            return None
        state, results = program(*arguments[:2], *self._beside(state, small))
        return dataclasses.replace(state, beliefs=None), (results, state.beliefs)

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
    ) -> tuple[DecodeState, Packed] | None:
        """One chunk of one slot's prompt; returns the state, and a `RoundOutput` of this slot beside None."""

        def run(
            weights: Any,
            state: DecodeState,
            slots: Array,
            tokens: Array,
            count: Array,
            last: Array,
        ) -> Any:
            models = self._models(weights, spec)
            state, output = rounds.prefill(*models, state, slots, tokens, count, last, spec)
            return state, pack((output, None))

        weights = self._weights(spec)
        chunk, place = np.asarray(tokens, np.int32)[None], np.asarray([slot], np.int32)
        small = (np.asarray([count], np.int32), np.asarray([last]))
        arguments = ([w.leaves for w in weights], state, place, chunk, *small)
        program = self._get((spec, len(tokens)), "prefill", run, arguments, weights)
        if compile_only:
            return None
        place, *small = self._beside(state, (place, *small))
        return program(*arguments[:2], place, chunk, *small)

    def admit(
        self,
        state: DecodeState,
        slot: int,
        table: Any,
        limit: int,
        stop_ids: Any,
        sampling: SamplingState | None = None,
    ) -> DecodeState:
        """See `admit_slot`."""
        place, pages, left, ends = (np.asarray(x, np.int32) for x in (slot, table, limit, stop_ids))
        own = jax.tree.map(np.asarray, sampling)
        program = self._get((), "admit", admit_slot, (state, place, pages, left, ends, own))
        place, left, ends = self._beside(state, (place, left, ends))
        return program(state, place, pages, left, ends, own)[0]

    def assign_pages(self, state: DecodeState, slot: int, table: Any) -> DecodeState:
        """See `assign_pages`."""
        arguments = (state, np.asarray(slot, np.int32), np.asarray(table, np.int32))
        return self._get((), "assign_pages", assign_pages, arguments)(*arguments)[0]

    def copy_slot(
        self, state: DecodeState, slot: int, source: DecodeState, place: int, tokens: int
    ) -> DecodeState:
        """See `copy_slot`."""
        arguments = (state, source, *(np.asarray(x, np.int32) for x in (slot, place, tokens)))
        return self._get((), "copy_slot", copy_slot, arguments)(*arguments)[0]

    def release(self, state: DecodeState, slots: Any) -> DecodeState:
        """See `release_slots`."""
        marked = np.asarray(slots, bool)
        program = self._get((), "release", release_slots, (state, marked))
        return program(state, self._beside(state, marked))[0]

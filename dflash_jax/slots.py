"""What is done to single slots of a decode state: given to a request, taken back, copied, and taken out for a round."""

import dataclasses

import jax
from jaxtyping import Array, Bool, Int

from dflash_jax.cache import reset_slots
from dflash_jax.round import DecodeState
from dflash_jax.sampling import SamplingState

# The fields of a state, its caches aside, that have a row a slot.
_ROWS = tuple(field.name for field in dataclasses.fields(DecodeState) if field.name != "cache")


def admit_slot(
    state: DecodeState,
    slot: Int[Array, ""],
    table: Int[Array, " T"],
    limit: Int[Array, ""],
    stop_ids: Int[Array, " S"],
    sampling: SamplingState | None,
) -> tuple[DecodeState, None]:
    """Empties a slot and gives it pages, a token limit, stop ids and its row of the sampling state.

    Nothing of its last request is left.
    """
    state = dataclasses.replace(
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
        sampling=jax.tree.map(lambda all_slots, own: all_slots.at[slot].set(own), state.sampling, sampling),
        next_tokens=None if state.next_tokens is None else state.next_tokens.at[slot].set(0),
    )
    return state, None


def assign_pages(
    state: DecodeState, slot: Int[Array, ""], table: Int[Array, " T"]
) -> tuple[DecodeState, None]:
    """Gives a slot in use another table, which begins with the pages that it has written."""
    return dataclasses.replace(state, block_tables=state.block_tables.at[slot].set(table)), None


def copy_slot(
    state: DecodeState, source: DecodeState, slot: Int[Array, ""], place: Int[Array, ""], tokens: Int[Array, ""]
) -> tuple[DecodeState, None]:
    """Puts what a slot of `source` holds besides pages into a slot of `state`, which then has read `tokens` tokens."""

    def copied(all_slots: Array, own: Array | None, axis: int) -> Array:
        assert own is not None
        row = jax.lax.dynamic_index_in_dim(own, place, axis, keepdims=True)
        return jax.lax.dynamic_update_slice_in_dim(all_slots, row, slot, axis)

    cache, other = state.cache, source.cache
    cache = dataclasses.replace(
        cache,
        recurrent=copied(cache.recurrent, other.recurrent, 1),
        conv=copied(cache.conv, other.conv, 1),
    )
    state = dataclasses.replace(
        state,
        cache=cache,
        lengths=state.lengths.at[slot].set(tokens),
        taps=None if state.taps is None else copied(state.taps, source.taps, 0),
        num_taps=copied(state.num_taps, source.num_taps, 0),
        next_tokens=None if state.next_tokens is None else copied(state.next_tokens, source.next_tokens, 0),
    )
    return state, None


def release_slots(state: DecodeState, slots: Bool[Array, " B"]) -> tuple[DecodeState, None]:
    """Stops decoding in the slots marked (a stop string, which only the host can see)."""
    return dataclasses.replace(state, active=state.active & ~slots), None


def _rows(slots: Int[Array, " W"], axis: int) -> tuple[slice | Array, ...]:
    return (*[slice(None)] * axis, slots)


def take_slots(state: DecodeState, slots: Int[Array, " W"]) -> DecodeState:
    """A state of the slots named alone, all different, in that order, which shares the pages."""

    def taken(leaf: Array, axis: int = 0) -> Array:
        return leaf.at[_rows(slots, axis)].get(mode="promise_in_bounds", unique_indices=True)

    cache = state.cache
    cache = dataclasses.replace(cache, recurrent=taken(cache.recurrent, 1), conv=taken(cache.conv, 1))
    rows = {name: jax.tree.map(taken, getattr(state, name)) for name in _ROWS}
    return dataclasses.replace(state, cache=cache, **rows)


def put_slots(state: DecodeState, part: DecodeState, slots: Int[Array, " W"]) -> DecodeState:
    """The state with what `take_slots` has taken out of it put back, pages included."""

    def put(leaf: Array, own: Array, axis: int = 0) -> Array:
        return leaf.at[_rows(slots, axis)].set(own, mode="promise_in_bounds", unique_indices=True)

    cache, own = state.cache, part.cache
    cache = dataclasses.replace(
        own, recurrent=put(cache.recurrent, own.recurrent, 1), conv=put(cache.conv, own.conv, 1)
    )
    rows = {name: jax.tree.map(put, getattr(state, name), getattr(part, name)) for name in _ROWS}
    return dataclasses.replace(state, cache=cache, **rows)

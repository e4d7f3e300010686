"""Pallas Triton kernel of the search for the best prefixes: all of `dflash_jax.tree.grow_tree` after its costs.

A program a slot. The lists of all depths are joined side by side, as arrays of (depth, pair); the smallest of a list
are found by a search for the threshold, bit by bit, packed together by a running count and put in order by counting who
is smaller among the few that are left. What one thread writes and another reads goes through the program's own piece of
memory, with a barrier between. The result is that of the reference to the last bit, equal costs included.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.dispatch import compiled_once

IMPOSSIBLE = (1 << 30) - 1  # as in `dflash_jax.tree`


def pairs_of(budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions (left, right) that can meet in a tree of this budget, in the order that breaks ties."""
    position = np.arange(budget)
    right, left = np.nonzero((position + 1) * (position[:, None] + 2) <= budget)
    return left.astype(np.int32), right.astype(np.int32)


def _smallest(keys, live, k: int, bits: int, axis: int):
    """Which keys (from 0, below 2**bits) of each list along `axis` are the k smallest, the first of equal ones."""

    def along(x):
        return jnp.sum(x.astype(jnp.int32), axis=axis, keepdims=True)

    def bit(index, found):
        tried = found + lax.shift_left(jnp.int32(1), bits - 1 - index)
        return jnp.where(along(live & (keys < tried)) < k, tried, found)

    shape = tuple(1 if i == axis else size for i, size in enumerate(keys.shape))
    most = lax.fori_loop(0, bits, bit, jnp.zeros(shape, jnp.int32))
    below, equal = live & (keys < most), live & (keys == most)
    return below | (equal & (jnp.cumsum(equal.astype(jnp.int32), axis=axis) <= k - along(below)))


def _kernel(
    costs_ref,  # [B, L, K]
    candidates_ref,  # [B, L, K]
    anchor_ref,  # [B]
    left_ref,  # [P]
    right_ref,  # [P]
    tokens_ref,  # [B, N]
    parents_ref,  # [B, N]
    depths_ref,  # [B, N]
    ancestors_ref,  # [B, N, N]
    valid_ref,  # [B, N]
    order_ref,  # [B, N]
    taken_ref,  # [B, W]
    lists_ref,  # [B, steps + 1, L, W]
    joins_ref,  # [B, steps, L, W]
    packed_ref,  # [B, 2, L, W]
    chosen_ref,  # [B, 2, W]
    ranks_ref,  # [B, steps + 1, W, L]
    *,
    spine: int,
    barrier,
):
    length, k = costs_ref.shape[1:]
    budget, pairs, steps = taken_ref.shape[1], left_ref.shape[0], lists_ref.shape[1] - 1
    slot = pl.program_id(0)
    kept = min(budget, pairs)
    wide, deep = pl.next_power_of_2(budget), pl.next_power_of_2(length)
    depth, place = jnp.arange(deep)[:, None], jnp.arange(wide)[None, :]
    depth_in, place_in = jnp.minimum(depth, length - 1), jnp.minimum(place, budget - 1)
    listed = (depth < length) & (place < budget)

    def apart(mask, index, size):
        """The index, and elsewhere where masked: two places of one store must not be the same."""
        return jnp.where(mask, index, size + jnp.arange(mask.shape[-1]))

    first = plgpu.load(
        costs_ref.at[slot, depth_in, jnp.minimum(place, k - 1)], mask=listed & (place < k), other=IMPOSSIBLE
    )
    plgpu.store(lists_ref.at[slot, 0, depth, place], first, mask=listed)
    barrier()

    pair = jnp.arange(pl.next_power_of_2(pairs))
    pair_in = jnp.minimum(pair, pairs - 1)
    left, right = plgpu.load(left_ref.at[pair_in])[None, :], plgpu.load(right_ref.at[pair_in])[None, :]
    for step in range(steps):
        span = 1 << step
        joined = (depth >= span) & (depth < length)
        live = joined & (pair < pairs)[None, :]
        begin = plgpu.load(lists_ref.at[slot, step, jnp.maximum(depth_in - span, 0), left])
        end = plgpu.load(lists_ref.at[slot, step, depth_in, right])
        costs = jnp.minimum(begin + end, IMPOSSIBLE)
        best = _smallest(costs, live, kept, 30, 1)
        packed = apart(best, jnp.cumsum(best.astype(jnp.int32), axis=1) - 1, budget)
        plgpu.store(packed_ref.at[slot, 0, depth, packed], costs, mask=best)
        plgpu.store(packed_ref.at[slot, 1, depth, packed], jnp.broadcast_to(pair[None, :], best.shape), mask=best)
        barrier()
        held = joined & (place < kept)
        own, which = (plgpu.load(packed_ref.at[slot, i, depth_in, place_in], mask=held, other=0) for i in (0, 1))

        def count(other, rank, own=own, joined=joined):
            cost = plgpu.load(packed_ref.at[slot, 0, depth_in, other], mask=joined, other=0)
            return rank + ((cost < own) | ((cost == own) & (other < place))).astype(jnp.int32)

        rank = apart(held, lax.fori_loop(0, kept, count, jnp.zeros(own.shape, jnp.int32)), budget)
        plgpu.store(lists_ref.at[slot, step + 1, depth, rank], own, mask=held)
        plgpu.store(joins_ref.at[slot, step, depth, rank], which, mask=held)
        # Shorter prefixes stay, and what no pair fills is impossible.
        old = plgpu.load(lists_ref.at[slot, step, depth_in, place_in])
        rest = listed & ~held
        plgpu.store(
            lists_ref.at[slot, step + 1, depth, jnp.where(rest, place, budget + place)],
            jnp.where(depth < span, old, IMPOSSIBLE), mask=rest,
        )  # fmt: skip
        barrier()

    entry = jnp.arange(pl.next_power_of_2(length * budget))
    real = entry < length * budget
    inside = jnp.minimum(entry, length * budget - 1)
    level, position = lax.div(inside, budget), lax.rem(inside, budget)
    costs = plgpu.load(lists_ref.at[slot, steps, level, position])
    possible = real & (costs < IMPOSSIBLE)
    keys = jnp.where(possible & (position == 0) & (level < spine), 0, costs + 1)
    chosen = possible & _smallest(keys, real, budget, 31, 0)
    count_of = jnp.sum(chosen.astype(jnp.int32))
    row = apart(chosen, jnp.cumsum(chosen.astype(jnp.int32)) - 1, budget)
    plgpu.store(chosen_ref.at[slot, 0, row], entry, mask=chosen)
    plgpu.store(chosen_ref.at[slot, 1, row], keys, mask=chosen)
    barrier()

    node = jnp.arange(wide)
    node_in = jnp.minimum(node, budget - 1)
    is_node = node < count_of
    entry = plgpu.load(chosen_ref.at[slot, 0, node_in], mask=is_node, other=0)
    key = plgpu.load(chosen_ref.at[slot, 1, node_in], mask=is_node, other=0)
    level, position = jnp.where(is_node, lax.div(entry, budget), -1), lax.rem(entry, budget)

    def earlier(other, rank):
        before = chosen_ref[slot, 1, other]
        smaller = (before < key) | ((before == key) & (other < node))
        return rank + (smaller & (other < count_of)).astype(jnp.int32)

    taken_as = 1 + lax.fori_loop(0, budget, earlier, jnp.zeros_like(node))
    taken = plgpu.load(lists_ref.at[slot, steps, jnp.maximum(level, 0), position])
    plgpu.store(taken_ref.at[slot, node], taken, mask=node < budget)

    # Back through the joins: at each depth the position of the segment that ends there, at last the rank.
    at = jnp.arange(deep)[None, :]
    at_in, node_row = jnp.minimum(at, length - 1), node_in[:, None]
    inside = (node < budget)[:, None] & (at < length)
    held = jnp.where(level[:, None] == at, position[:, None], -1)
    plgpu.store(ranks_ref.at[slot, steps, node[:, None], at], held, mask=inside)
    barrier()
    for step in reversed(range(steps)):
        span = 1 << step

        def split(held, depth, side_ref, step=step):
            which = plgpu.load(joins_ref.at[slot, step, depth, jnp.maximum(held, 0)], mask=held >= 0, other=0)
            return jnp.where(held >= 0, plgpu.load(side_ref.at[which]), -1)

        own = plgpu.load(ranks_ref.at[slot, step + 1, node_row, at_in])
        beyond = jnp.minimum(at + span, length - 1)
        later = plgpu.load(ranks_ref.at[slot, step + 1, node_row, beyond])
        later = jnp.where(at + span < length, later, -1)
        ends = split(jnp.where(at >= span, own, -1), at_in, right_ref)
        held = jnp.maximum(jnp.where(at >= span, ends, own), split(later, beyond, left_ref))
        plgpu.store(ranks_ref.at[slot, step, node[:, None], at], held, mask=inside)
        barrier()

    own_level = jnp.maximum(level, 0)
    rank = plgpu.load(ranks_ref.at[slot, 0, node_in, own_level], mask=is_node, other=0)
    token = plgpu.load(candidates_ref.at[slot, own_level, rank], mask=is_node, other=0)
    after_root = node < budget
    for ref, value in ((tokens_ref, token), (depths_ref, level + 1)):
        plgpu.store(ref.at[slot, node + 1], value, mask=after_root)
    plgpu.store(valid_ref.at[slot, node + 1], is_node, mask=after_root)
    plgpu.store(order_ref.at[slot, node + 1], jnp.where(is_node, taken_as, budget + 1), mask=after_root)
    tokens_ref[slot, 0] = anchor_ref[slot]
    depths_ref[slot, 0] = jnp.int32(0)
    valid_ref[slot, 0] = jnp.bool_(True)
    order_ref[slot, 0] = jnp.int32(0)

    rows = jnp.arange(pl.next_power_of_2(budget + 1))
    real = rows <= budget
    behind = jnp.clip(rows - 1, 0, budget - 1)

    def begins(at, all_of_them):
        ranks = plgpu.load(ranks_ref.at[slot, 0, behind, at], mask=real & (rows > 0), other=-1)
        below, above = ranks[:, None], ranks[None, :]
        return all_of_them & ((above < 0) | (above == below)).astype(jnp.int32)

    full = jnp.ones((rows.shape[0], rows.shape[0]), jnp.int32)
    begin = lax.fori_loop(0, length, begins, full) > 0
    valid = rows <= count_of
    ancestors = (begin & valid[:, None] & valid[None, :]) | (rows[:, None] == rows[None, :])
    both = real[:, None] & real[None, :]
    plgpu.store(ancestors_ref.at[slot, rows[:, None], rows[None, :]], ancestors, mask=both)
    above = jnp.where(ancestors & (rows[None, :] < rows[:, None]), rows[None, :], -1)
    plgpu.store(parents_ref.at[slot, rows], jnp.max(above, axis=1), mask=real)


@compiled_once("budget", "spine", "interpret")
def search(
    anchor: Int[Array, "B"],
    costs: Int[Array, "B L K"],
    candidates: Int[Array, "B L K"],
    left: Int[np.ndarray, "P"],
    right: Int[np.ndarray, "P"],
    *,
    budget: int,
    spine: int,
    interpret: bool = False,
) -> tuple[
    Int[Array, "B N"], Int[Array, "B N"], Int[Array, "B N"], Bool[Array, "B N N"], Bool[Array, "B N"],
    Int[Array, "B N"], Int[Array, "B W"],
]:  # fmt: skip
    """See `pallas_kernels.tree_search.api.search`, which checks what this kernel takes."""
    batch, length, _ = costs.shape
    steps, rows = (length - 1).bit_length(), budget + 1

    def numbers(*size, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((batch, *size), dtype)

    results = pl.pallas_call(
        functools.partial(_kernel, spine=spine, barrier=(lambda: None) if interpret else plgpu.debug_barrier),
        grid=(batch,),
        out_shape=(
            numbers(rows), numbers(rows), numbers(rows), numbers(rows, rows, dtype=jnp.bool_),
            numbers(rows, dtype=jnp.bool_), numbers(rows), numbers(budget),
            numbers(steps + 1, length, budget), numbers(max(steps, 1), length, budget), numbers(2, length, budget),
            numbers(2, budget), numbers(steps + 1, budget, length),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="tree_search",
    )(costs, candidates, anchor.astype(jnp.int32), jnp.asarray(left), jnp.asarray(right))  # fmt: skip
    return results[:7]

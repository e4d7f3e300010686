"""Pallas Triton kernel of the search for the best prefixes: all of `dflash_jax.tree.grow_tree` after its costs.

A program, of one warp, a slot. Every taken node has one candidate, its best child that is not taken yet; each step
takes the cheapest of them. That is as many steps as there are nodes beside the spine, but a step is two reductions over
a warp's registers and two loads from its cache, and they need no barrier: 0.1 to 0.2 us. What follows puts the nodes
into the order of rows. The result is that of the reference to the last bit, equal costs included.

A step waits for the one before, so it is made of as few operations as can be: costs come as integers, with a border of
impossible ones, and what orders candidates of equal cost is one number. A warp reduces 32 numbers in one instruction.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.ancestry import LENGTH, SHARED, WORD
from pallas_kernels.dispatch import compiled_once
from pallas_kernels.tree_search.costs import IMPOSSIBLE, UNITS_PER_NAT

# A candidate in one number, in the order that breaks ties: depth of its parent, the parent, and its rank.
_BITS = 10
MAX_BUDGET = (1 << _BITS) - 1
WARP = 32
# Of an ancestor mask's row: as many as a way up keeps in registers, and as the kernels of verification take.
MAX_WORDS = 4
# Numbers of a matrix that a warp holds at once.
_AT_ONCE = 2048


def _kernel(
    costs_ref,  # [B, L + 2, K + 2], with a border
    candidates_ref,  # [B, L, K]
    anchor_ref,  # [B]
    tokens_ref,  # [B, N]
    parents_ref,  # [B, N]
    depths_ref,  # [B, N]
    ancestors_ref,  # [B, N, N]
    valid_ref,  # [B, N]
    order_ref,  # [B, N]
    log_probs_ref,  # [B, N]
    depth_ref,  # [B, N]: by node, as the next one
    row_ref,  # [B, N]
    shared_ref,  # [B, N]
    *optional_refs,  # words [B, N, S], paths [B, N, P], earlier [B, N, W]
    spine: int,
    words: int,
    paths: int,
    window: int,
    barrier,
):
    length, k = candidates_ref.shape[1:]
    size = tokens_ref.shape[1]
    slot = pl.program_id(0)
    node = jnp.arange(max(pl.next_power_of_2(size), WARP))
    real = node < size
    width = min(max(_AT_ONCE // node.shape[0], 1), node.shape[0])

    # The spine's nodes as far as they are possible; the candidate of each is its second child, of the last its first.
    total = held = jnp.int32(0)
    base = jnp.where(node == 0, 0, IMPOSSIBLE)
    for level in range(spine):
        total = jnp.minimum(total + costs_ref[slot, level, 0], IMPOSSIBLE)
        held += (total < IMPOSSIBLE).astype(jnp.int32)
        base = jnp.where(node == level + 1, total, base)
    on_spine = node <= held
    path_ref = optional_refs[1 if words else 0] if paths else None
    if path_ref is not None:
        plgpu.store(path_ref.at[slot, node, 0], jnp.zeros_like(node), mask=real)
    second = plgpu.load(costs_ref.at[slot, jnp.minimum(node, length), 1])
    candidate = jnp.where(node < held, second, IMPOSSIBLE)
    candidate = jnp.where(node == held, costs_ref[slot, held, 0], candidate)
    cost = jnp.minimum(base + candidate, IMPOSSIBLE)
    place = (jnp.where(on_spine, node, 0) << (2 * _BITS)) | (node << _BITS) | (node < held).astype(jnp.int32)
    parent, rank = jnp.where(on_spine, node - 1, -1), jnp.zeros_like(node)

    def take(index, carry):
        count, base, cost, place, parent, rank = carry
        best = jnp.min(cost)
        chosen = jnp.min(jnp.where(cost == best, place, jnp.iinfo(jnp.int32).max))
        above, own, at = chosen >> (2 * _BITS), (chosen >> _BITS) & MAX_BUDGET, chosen & MAX_BUDGET
        # The next one at this depth, and the first one below.
        beside = jnp.minimum(base + costs_ref[slot, above, at + 1], IMPOSSIBLE)
        below = jnp.minimum(best + costs_ref[slot, above + 1, 0], IMPOSSIBLE)
        possible = best < IMPOSSIBLE
        old, new = (node == own) & possible, (node == index) & possible
        return (
            count + possible.astype(jnp.int32),
            jnp.where(new, best, base),
            jnp.where(new, below, jnp.where(old, beside, cost)),
            jnp.where(new, ((above + 1) << (2 * _BITS)) | (index << _BITS), place + old.astype(jnp.int32)),
            jnp.where(new, own, parent),
            jnp.where(new, at, rank),
        )

    count, base, _, place, parent, rank = lax.fori_loop(
        held + 1, size, take, (held, base, cost, place, parent, rank)
    )
    depth = place >> (2 * _BITS)
    taken = real & (node <= count)
    plgpu.store(depth_ref.at[slot, node], jnp.where(taken, depth, length + 1), mask=real)
    barrier()

    # Rows are sorted by depth, then as they were taken; what was not taken comes last.
    own_depth = jnp.where(taken, depth, length + 1)

    def before(step, row):
        other = step * width + jnp.arange(width)
        depths = plgpu.load(depth_ref.at[slot, jnp.minimum(other, size - 1)])
        earlier = (depths[None, :] < own_depth[:, None]) | (
            (depths[None, :] == own_depth[:, None]) & (other[None, :] < node[:, None])
        )
        return row + jnp.sum((earlier & (other < size)[None, :]).astype(jnp.int32), axis=1)

    row = lax.fori_loop(0, pl.cdiv(size, width), before, jnp.zeros_like(node))
    # Elsewhere where masked: two places of one store must not be the same.
    row = jnp.where(real, row, node)
    plgpu.store(row_ref.at[slot, node], row, mask=real)
    within = jnp.maximum(depth - 1, 0)
    token = plgpu.load(candidates_ref.at[slot, jnp.minimum(within, length - 1), jnp.minimum(rank, k - 1)])
    token = jnp.where(node == 0, anchor_ref[slot], jnp.where(taken, token, 0))
    plgpu.store(tokens_ref.at[slot, row], token, mask=real)
    plgpu.store(depths_ref.at[slot, row], jnp.where(taken, depth, 0), mask=real)
    plgpu.store(valid_ref.at[slot, row], taken, mask=real)
    plgpu.store(order_ref.at[slot, row], jnp.where(taken, node, size), mask=real)
    total = jnp.where(taken, base, IMPOSSIBLE).astype(jnp.float32)
    plgpu.store(log_probs_ref.at[slot, row], -total / UNITS_PER_NAT, mask=real)
    barrier()

    above = plgpu.load(row_ref.at[slot, jnp.maximum(parent, 0)])
    above = jnp.where(taken & (node > 0), above, -1)
    plgpu.store(parents_ref.at[slot, row], above, mask=real)
    # As many children as the rank of the next one. What was not taken is a path of its own.
    end, level = real & (~taken | (place & MAX_BUDGET == 0)), jnp.where(taken, depth, 0)
    path = node
    if path_ref is not None:
        path = jnp.where(end, lax.cumsum(end.astype(jnp.int32)) - 1, size + node)
        # A row's first child, and whoever is its first one, has the row as its own.
        plgpu.store(shared_ref.at[slot, row], jnp.where(rank == 0, 0, SHARED), mask=real)

    # No row is known to be an ancestor yet.
    def clear(step, carry):
        rows = step * width + jnp.arange(width)
        cell = (slot, rows[None, :], node[:, None])
        nothing = jnp.zeros((node.shape[0], width), jnp.bool_)
        plgpu.store(ancestors_ref.at[cell], nothing, mask=real[:, None] & (rows < size)[None, :])
        return carry

    lax.fori_loop(0, pl.cdiv(size, width), clear, 0)
    barrier()

    def up(at):
        return jnp.where(at >= 0, plgpu.load(parents_ref.at[slot, jnp.clip(at, 0, size - 1)]), -1)

    if window:
        at = above
        plgpu.store(optional_refs[-1].at[slot, row, 0], at, mask=real)
        for place in range(1, window):
            at = jnp.where(at >= 0, up(at), at - 1)
            plgpu.store(optional_refs[-1].at[slot, row, place], at, mask=real)

    def climb(step, carry):
        at, shared, *bits = carry
        plgpu.store(ancestors_ref.at[slot, row, jnp.maximum(at, 0)], at >= 0, mask=at >= 0)
        if path_ref is not None:
            entry = at | shared | jnp.where(step == level, (level + 1) << LENGTH, 0)
            plgpu.store(path_ref.at[slot, path, jnp.maximum(level - step, 0)], entry, mask=end & (at >= 0))
            shared |= plgpu.load(shared_ref.at[slot, jnp.clip(at, 0, size - 1)])
        # None of -1: shifted, it stays -1, which is no word's number.
        own, place = lax.shift_left(jnp.int32(1), at & (WORD - 1)), at >> (WORD.bit_length() - 1)
        bits = [x | jnp.where(place == number, own, 0) for number, x in enumerate(bits)]
        return up(at), shared, *bits

    start = (jnp.where(real, row, -1), *[jnp.zeros_like(node)] * (1 + words))
    _, _, *bits = lax.fori_loop(0, jnp.max(jnp.where(taken, depth, 0)) + 1, climb, start)
    for number, word in enumerate(bits):
        plgpu.store(optional_refs[0].at[slot, row, number], word, mask=real)


@compiled_once("budget", "spine", "window", "paths", "interpret")
def search(
    anchor: Int[Array, "B"],
    costs: Int[Array, "B L+2 K+2"],
    candidates: Int[Array, "B L K"],
    *,
    budget: int,
    spine: int,
    window: int = 0,
    paths: int = 0,
    interpret: bool = False,
) -> tuple[
    Int[Array, "B N"], Int[Array, "B N"], Int[Array, "B N"], Bool[Array, "B N N"], Bool[Array, "B N"],
    Int[Array, "B N"], Float[Array, "B N"], Int[Array, "B N W"] | None, Int[Array, "B N S"] | None,
    Int[Array, "B N P"] | None,
]:  # fmt: skip
    """See `pallas_kernels.tree_search.api.search_serves`; `window` is that of `dflash_jax.tree.ancestor_index`.

    The last results are the mask of ancestors as words of bits (`ancestry.packed`), None for more than `MAX_WORDS`; and
    for `paths` = P, greater than any depth, the paths from node 0 to each row without children, in any order: their
    rows by depth, marked `SHARED` in all but one of them, the first with the number of rows << `LENGTH`, which is 0
    after the last path.
    """
    batch, rows = costs.shape[0], budget + 1
    words = pl.cdiv(rows, WORD)
    words = words if words <= MAX_WORDS else 0
    barrier = (lambda: None) if interpret else plgpu.debug_barrier

    def numbers(*size, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((batch, *size), dtype)

    results = pl.pallas_call(
        functools.partial(_kernel, spine=spine, words=words, paths=paths, window=window, barrier=barrier),
        grid=(batch,),
        out_shape=(
            numbers(rows), numbers(rows), numbers(rows), numbers(rows, rows, dtype=jnp.bool_),
            numbers(rows, dtype=jnp.bool_), numbers(rows), numbers(rows, dtype=jnp.float32), numbers(rows),
            numbers(rows), numbers(rows), *(numbers(rows, size) for size in (words, paths, window) if size),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="tree_search",
    )(costs, candidates, anchor.astype(jnp.int32))  # fmt: skip
    optional = iter(results[10:])
    bits, ways, earlier = (next(optional) if size else None for size in (words, paths, window))
    return *results[:7], earlier, bits, ways

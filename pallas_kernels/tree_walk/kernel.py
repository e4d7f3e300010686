"""Pallas Triton kernel of everything between the target's tokens and the commit, which XLA takes a dozen launches for.

A program a slot: which rows are reached, the tokens they emit, where a stop token or a limit cuts them, the slot's new
counters, and what the round says about other budgets. The results are those of `dflash_jax.settle`, the reference.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import compiled_once


def _kernel(
    target_ref,  # [B, N]: the target's token after each row
    tokens_ref,  # [B, N]
    parents_ref,  # [B, N]
    depths_ref,  # [B, N]
    ancestors_ref,  # [B, N, N]
    valid_ref,  # [B, N]
    order_ref,  # [B, N], or None: no buckets
    log_probs_ref,  # [B, N], or None
    stop_ids_ref,  # [B, S]
    anchor_ref,  # [B]
    lengths_ref,  # [B]
    active_ref,  # [B]
    remaining_ref,  # [B]
    histogram_ref,  # [B, H]
    path_ref,  # [B, D]
    emitted_ref,  # [B, D]
    walked_ref,  # [B]: rows accepted
    count_ref,  # [B]: tokens emitted
    new_anchor_ref,  # [B]
    new_lengths_ref,  # [B]
    new_active_ref,  # [B]
    new_remaining_ref,  # [B]
    new_histogram_ref,  # [B, H]
    told_ref=None,  # [B, 1 + 2 K]
    *,
    buckets: tuple[int, ...],
    barrier,
):
    rows, depth, stops, bins = tokens_ref.shape[1], path_ref.shape[1], stop_ids_ref.shape[1], histogram_ref.shape[1]
    slot = pl.program_id(0)
    row, step = jnp.arange(pl.next_power_of_2(rows)), jnp.arange(pl.next_power_of_2(depth))
    live = row < rows
    # In bounds even where masked: an interpreter reads before it masks.
    row_in = jnp.minimum(row, rows - 1)

    def of_rows(ref, other=0):
        return plgpu.load(ref.at[slot, row_in], mask=live, other=other)

    valid = of_rows(valid_ref, False)
    wanted = plgpu.load(target_ref.at[slot, jnp.maximum(of_rows(parents_ref), 0)])
    matched = valid & ((row == 0) | (of_rows(tokens_ref) == wanted))
    seen = plgpu.load(
        ancestors_ref.at[slot, row_in[:, None], row_in[None, :]], mask=live[:, None] & live[None, :], other=False
    )
    missed = jnp.sum((seen & ~matched[None, :]).astype(jnp.int32), axis=1)
    accepted = live & (missed == 0)

    here = accepted[None, :] & (of_rows(depths_ref, -1)[None, :] == step[:, None])
    path = jnp.max(jnp.where(here, row[None, :], -1), axis=1)  # -1 below the last accepted row
    walked = jnp.sum((path >= 0).astype(jnp.int32))
    path = jnp.where(path >= 0, path, jnp.max(path))
    emitted = plgpu.load(target_ref.at[slot, path])
    plgpu.store(path_ref.at[slot, step], path, mask=step < depth)
    plgpu.store(emitted_ref.at[slot, step], emitted, mask=step < depth)
    walked_ref[slot] = walked

    stop = jnp.arange(pl.next_power_of_2(stops))
    stop_ids = plgpu.load(stop_ids_ref.at[slot, jnp.minimum(stop, stops - 1)], mask=stop < stops, other=-1)
    ends = jnp.max((emitted[:, None] == stop_ids[None, :]).astype(jnp.int32), axis=1) > 0
    first_stop = jnp.min(jnp.where(ends & (step < walked), step, depth))
    # The counters are written where they are read: every thread must have read them first.
    active, remaining = active_ref[slot], remaining_ref[slot]
    anchor, length = anchor_ref[slot], lengths_ref[slot]
    bin_ = jnp.arange(pl.next_power_of_2(bins))
    histogram = plgpu.load(histogram_ref.at[slot, jnp.minimum(bin_, bins - 1)])
    barrier()
    count = jnp.minimum(jnp.minimum(walked, first_stop + 1), remaining)
    count = jnp.where(active, count, 0)
    last = jnp.sum(jnp.where(step == count - 1, emitted, 0))
    count_ref[slot] = count
    new_anchor_ref[slot] = jnp.where(count > 0, last, anchor)
    new_lengths_ref[slot] = length + count
    new_active_ref[slot] = active & (first_stop >= count) & (remaining > count)
    new_remaining_ref[slot] = remaining - count
    histogram = histogram + ((bin_ == count) & (count > 0)).astype(jnp.int32)
    plgpu.store(new_histogram_ref.at[slot, bin_], histogram, mask=bin_ < bins)

    if told_ref is not None:
        order = of_rows(order_ref)
        probability = jnp.where(valid, jnp.exp(of_rows(log_probs_ref)), 0.0)
        taken = plgpu.load(order_ref.at[slot, path])
        one = active.astype(jnp.float32)
        told_ref[slot, 0] = one
        for place, bucket in enumerate(buckets):
            reached = jnp.sum(((step < walked) & (taken <= bucket)).astype(jnp.float32))
            told_ref[slot, 1 + place] = one * reached
            told_ref[slot, 1 + len(buckets) + place] = one * jnp.sum(jnp.where(order <= bucket, probability, 0.0))


@compiled_once("depth", "buckets", "interpret")
def tree_walk(
    target: Int[Array, "B N"],
    tokens: Int[Array, "B N"],
    parents: Int[Array, "B N"],
    depths: Int[Array, "B N"],
    ancestors: Bool[Array, "B N N"],
    valid: Bool[Array, "B N"],
    order: Int[Array, "B N"] | None,
    log_probs: Float[Array, "B N"] | None,
    stop_ids: Int[Array, "B S"],
    anchor: Int[Array, "B"],
    lengths: Int[Array, "B"],
    active: Bool[Array, "B"],
    remaining: Int[Array, "B"],
    histogram: Int[Array, "B H"],
    *,
    depth: int,
    buckets: tuple[int, ...] = (),
    interpret: bool = False,
) -> tuple[Array, ...]:
    """The walk through a verified tree and what it changes of the slots, see `dflash_jax.settle`.

    Args:
      depth: entries of a path, the anchor's included.
      buckets: budgets to say something about; needs `order` and `log_probs`.

    Returns:
      Path, emitted tokens, rows accepted, tokens emitted, and the new anchor, lengths, active, remaining and histogram;
      with buckets also the numbers of a `settle.Evidence`.
    """
    batch = tokens.shape[0]

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    number = jax.ShapeDtypeStruct((batch,), jnp.int32)
    listed = jax.ShapeDtypeStruct((batch, depth), jnp.int32)
    told = (jax.ShapeDtypeStruct((batch, 1 + 2 * len(buckets)), jnp.float32),) if buckets else ()
    if not buckets:
        order = log_probs = None
    counters = range(7, 12) if order is None else range(9, 14)  # among the operands that are arrays
    return pl.pallas_call(
        functools.partial(
            _kernel, buckets=buckets, barrier=(lambda: None) if interpret else plgpu.debug_barrier
        ),
        grid=(batch,),
        out_shape=(
            listed, listed, number, number, like(anchor), like(lengths), like(active), like(remaining),
            like(histogram), *told,
        ),
        # The slots' counters in place: a loop would copy them into its own.
        input_output_aliases={place: 4 + which for which, place in enumerate(counters)},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="tree_walk",
    )(
        target, tokens, parents, depths, ancestors, valid, order, log_probs, stop_ids, anchor, lengths, active,
        remaining, histogram,
    )  # fmt: skip

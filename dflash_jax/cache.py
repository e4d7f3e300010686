"""Paged attention KV, recurrent and convolution states, draft KV; and the commit of accepted rows.

All layers of one kind are stacked on a leading axis, so that a commit is one scatter and one batched product whatever
the depth. Slots are rows of a batch; a slot's pages are named by its block table, the same table for the target's and
the drafter's pages, because both hold one entry a token position.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import DrafterConfig, TargetConfig
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gdn_scan import commit_path


@struct.dataclass
class Cache:
    """Everything the models remember, for all slots.

    Attributes:
      kv: target keys and values, one page pool a layer: [attention layers, pages, tokens a page, 2, kv heads, dim].
      recurrent: Gated DeltaNet states, always fp32: [linear layers, slots, value heads, dk, dv].
      conv: the last K-1 raw inputs of every causal convolution: [linear layers, slots, K-1, channels].
      draft_kv: context keys and values of the drafter or of the MTP head, laid out as `kv`; None without one.
    """

    kv: Float[Array, "La P S 2 K d"]
    recurrent: Float[Array, "Lg B Hv dk dv"]
    conv: Float[Array, "Lg B W C"]
    draft_kv: Float[Array, "Ld P S 2 Kd dd"] | None = None


@struct.dataclass
class Context:
    """What one target pass reads: the committed past of the slots it serves.

    Attributes:
      pages: `Cache.kv`, or None for no attention context.
      block_tables: page numbers of each slot, in token order.
      lengths: tokens of each slot that are in the pages; row 0 of a pass sits at this position.
      recurrent, conv: states of just these slots.
    """

    pages: Float[Array, "La P S 2 K d"] | None
    block_tables: Int[Array, "B T"] | None
    lengths: Int[Array, " B"]
    recurrent: Float[Array, "Lg B Hv dk dv"]
    conv: Float[Array, "Lg B W C"]


@struct.dataclass
class RowUpdates:
    """What a target pass over N rows would add to the caches; nothing is written until it is committed.

    Attributes:
      kv: keys and values of the rows, for every attention layer.
      conv_inputs: raw convolution inputs of the rows, for every linear layer.
      final_state: state after the last valid row (causal passes), else None.
      keys, innovations, path_decay: the delta rule's per-row log (tree passes), else None.
    """

    kv: Float[Array, "La B N 2 K d"]
    conv_inputs: Float[Array, "Lg B N C"]
    final_state: Float[Array, "Lg B Hv dk dv"] | None
    keys: Float[Array, "Lg B N Hk dk"] | None
    innovations: Float[Array, "Lg B N Hv dv"] | None
    path_decay: Float[Array, "Lg B N Hv"] | None


def init_cache(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    slots: int,
    pages: int,
    page_size: int,
    dtype: jax.typing.DTypeLike,
    mtp: bool = False,
) -> Cache:
    """Empty caches for `slots` requests sharing `pages` pages of `page_size` tokens.

    With `mtp` the draft KV is that of the target's own head, one layer of the target's shapes.
    """
    linear = len(target.linear_layers)
    states = (target.linear_num_value_heads, target.linear_key_head_dim, target.linear_value_head_dim)
    window = max(target.linear_conv_kernel_dim - 1, 0)
    draft_kv = None
    if drafter is not None or mtp:
        layers, of = (drafter.num_layers, drafter) if drafter is not None else (1, target)
        draft_kv = jnp.zeros((layers, pages, page_size, 2, of.num_kv_heads, of.head_dim), dtype)
    return Cache(
        kv=jnp.zeros(
            (len(target.attention_layers), pages, page_size, 2, target.num_kv_heads, target.head_dim), dtype
        ),
        recurrent=jnp.zeros((linear, slots, *states), jnp.float32),
        conv=jnp.zeros((linear, slots, window, target.conv_channels), dtype),
        draft_kv=draft_kv,
    )


def write_pages(
    pages: Float[Array, "L P S 2 K d"],
    rows: Float[Array, "L B M 2 K d"],
    block_tables: Int[Array, "B T"],
    positions: Int[Array, "B M"],
    valid: Bool[Array, "B M"],
) -> Float[Array, "L P S 2 K d"]:
    """Writes rows at absolute token positions; rows that are not valid touch nothing."""
    size = pages.shape[2]
    entry = jnp.clip(positions // size, 0, block_tables.shape[1] - 1)
    page = jnp.take_along_axis(block_tables, entry, axis=1)
    # A row past the table's end would otherwise land on the last page of the slot.
    valid = valid & (positions < block_tables.shape[1] * size)
    page = jnp.where(valid, page, pages.shape[1])
    flat = rows.reshape(rows.shape[0], -1, *rows.shape[3:])
    return pages.at[:, page.reshape(-1), (positions % size).reshape(-1)].set(flat, mode="drop")


def shift_window(
    window: Float[Array, "L B W C"],
    inputs: Float[Array, "L B N C"],
    path: Int[Array, "B D"],
    count: Int[Array, " B"],
) -> Float[Array, "L B W C"]:
    """The last W raw inputs after the first `count` rows of `path` have been consumed."""
    width = window.shape[2]
    slot = jnp.arange(path.shape[0])[:, None]
    recent = count[:, None] - width + jnp.arange(width)  # place on the path; negative: still in the window
    row = jnp.take_along_axis(path, jnp.clip(recent, 0, path.shape[1] - 1), axis=1)
    old = jnp.clip(recent + width, 0, width - 1)
    return jnp.where((recent >= 0)[None, :, :, None], inputs[:, slot, row], window[:, slot, old])


def commit(
    cache: Cache,
    updates: RowUpdates,
    block_tables: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    path: Int[Array, "B D"],
    count: Int[Array, " B"],
    implementation: Implementation = "auto",
) -> Cache:
    """Applies the accepted path of a tree pass.

    The first `count` rows of `path`, root first, go to positions lengths, lengths + 1, …

    Slots with count 0 stay as they are. Rejected rows reach no page and no state.
    """
    slot = jnp.arange(path.shape[0])[:, None]
    order = jnp.arange(path.shape[1])
    kv, recurrent, conv = cache.kv, cache.recurrent, cache.conv
    if kv.shape[0]:
        accepted = updates.kv[:, slot, path]
        kv = write_pages(kv, accepted, block_tables, lengths[:, None] + order, order < count[:, None])
    if recurrent.shape[0]:
        assert updates.keys is not None and updates.innovations is not None and updates.path_decay is not None
        recurrent = commit_path(
            recurrent,
            updates.keys,
            updates.innovations,
            updates.path_decay,
            path,
            count,
            implementation=implementation,
        )
        conv = shift_window(conv, updates.conv_inputs, path, count)
    return dataclasses.replace(cache, kv=kv, recurrent=recurrent, conv=conv)


def commit_causal(
    cache: Cache,
    updates: RowUpdates,
    block_tables: Int[Array, "b T"],
    lengths: Int[Array, " b"],
    slots: Int[Array, " b"],
    count: Int[Array, " b"],
) -> Cache:
    """Applies the first `count` rows of a causal (prefill) pass over the slots named by `slots`."""
    rows = updates.kv.shape[2] if cache.kv.shape[0] else updates.conv_inputs.shape[2]
    order = jnp.broadcast_to(jnp.arange(rows), (slots.shape[0], rows))
    kv, recurrent, conv = cache.kv, cache.recurrent, cache.conv
    if kv.shape[0]:
        kv = write_pages(kv, updates.kv, block_tables, lengths[:, None] + order, order < count[:, None])
    if recurrent.shape[0]:
        assert updates.final_state is not None
        recurrent = recurrent.at[:, slots].set(updates.final_state, mode="drop")
        window = conv.at[:, slots].get(mode="clip")
        conv = conv.at[:, slots].set(shift_window(window, updates.conv_inputs, order, count), mode="drop")
    return dataclasses.replace(cache, kv=kv, recurrent=recurrent, conv=conv)


def reset_slots(cache: Cache, slots: Int[Array, " b"]) -> Cache:
    """Zeroes the states of the slots named (numbers past the last slot are ignored).

    Pages need no clearing: no pass reads past a slot's length.
    """
    return dataclasses.replace(
        cache,
        recurrent=cache.recurrent.at[:, slots].set(0.0, mode="drop"),
        conv=cache.conv.at[:, slots].set(0, mode="drop"),
    )

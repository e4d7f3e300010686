"""Pallas Triton kernels of tree attention: split-K flash attention over paged context and own rows, and a merge.

One program owns `block_rows` of the M = N·G query rows that share a key-value head (G heads a group, node-major),
and a share of the keys: the context's blocks come first, read through the block table, then the rows' own blocks. The
shares are cut from the keys that the slot really has, so short and long slots of one batch both use all programs.
Each program leaves a normalised partial output and its log-sum-exp; a second, small kernel weighs and adds them. With
a single share the result is written at once.

The pages come in whole, as a pointer, and the layer as an operand: no slice of the cache is ever copied, and every
layer of a model runs the same compiled kernel. A block of keys never crosses a page, so its page number is one
scalar, which is fetched one block ahead: the copy of a block need not wait for the table.

What a page holds past the slot's length may be anything. Masked loads fill in zeros, since a weight of exactly 0 does
not silence a NaN. The algorithm is Flash-Decoding (Dao et al. 2023) with the ancestor mask of SpecInfer (arXiv
2305.09781) over the rows.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import compiled_once
from pallas_kernels.tree_attention.configs import Config, split_count

# Stands for "no key seen yet" in a running maximum; finite, because inf - inf is NaN.
LOWEST = -1e30
# Three TF32 products on the tensor cores carry fp32's precision at a fraction of the cost of IEEE fp32 products,
# which leave the tensor cores. A single TF32 product would not do.
FP32_DOT = lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def _attention_kernel(
    layer_ref,  # [1]
    q_ref,  # [B, N, H, d]
    kv_ref,  # [B, N, 2, K, d]
    mask_ref,  # [B, N, N], or None: causal rows
    pages_ref,  # [L, P, S, 2, K, d], or None: no context
    tables_ref,  # [B, T]
    lengths_ref,  # [B]
    positions_ref,  # [B, N], with a window only
    out_ref,  # [B, N, H, d] with one split, else partial outputs [B, K, splits, M, d]
    lse_ref=None,  # base-2 log-sum-exp of the partial outputs [B, K, splits, M]
    *,
    scale: float,
    window: int | None,
    splits: int,
    block_rows: int,
    block_keys: int,
    min_blocks: int,
    precision: lax.PrecisionLike,
):
    _, nodes, heads, dim = q_ref.shape
    kv_heads = kv_ref.shape[3]
    group = heads // kv_heads
    tile, split, slot_head = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    slot, kv_head = lax.div(slot_head, kv_heads), lax.rem(slot_head, kv_heads)

    row = tile * block_rows + jnp.arange(block_rows)
    node, head = lax.div(row, group), kv_head * group + lax.rem(row, group)
    is_row = row < nodes * group
    column = jnp.arange(dim)[None, :]
    offset = jnp.arange(block_keys)
    q = plgpu.load(q_ref.at[slot, node[:, None], head[:, None], column], mask=is_row[:, None], other=0.0)

    # Which blocks of keys there are for this tile, context first.
    first_block = last_block = length = jnp.int32(0)
    if pages_ref is not None:
        page_size, table_size = pages_ref.shape[2], tables_ref.shape[1]
        length = jnp.minimum(lengths_ref[slot], page_size * table_size)
        last_block = lax.div(length + (block_keys - 1), block_keys)
        if window is not None:
            far = jnp.iinfo(jnp.int32).max
            position = plgpu.load(positions_ref.at[slot, node], mask=is_row, other=far)
            oldest = jnp.min(position) - (window - 1)
            first_block = jnp.minimum(lax.div(jnp.maximum(oldest, 0), block_keys), last_block)
    if mask_ref is None:
        last_node = jnp.minimum(lax.div((tile + 1) * block_rows - 1, group), nodes - 1)
        own_blocks = lax.div(last_node, block_keys) + 1
    else:
        own_blocks = jnp.int32(pl.cdiv(nodes, block_keys))
    context_blocks = last_block - first_block
    blocks = context_blocks + own_blocks
    share = jnp.maximum(lax.div(blocks + (splits - 1), splits), min_blocks)
    start = split * share
    stop = jnp.minimum(start + share, blocks)

    def step(carry, k, v, visible):
        """One block of keys: online softmax in base 2, fp32."""
        top, total, acc = carry
        logits = lax.dot_general(
            q, k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        logits = jnp.where(visible, logits * (scale * math.log2(math.e)), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - new_top[:, None])
        decay = jnp.exp2(top - new_top)
        total = total * decay + jnp.sum(weights, axis=1)
        values = lax.dot_general(
            weights.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=precision,
            preferred_element_type=jnp.float32,
        )
        return new_top, total, acc * decay[:, None] + values

    carry = (
        jnp.full((block_rows,), LOWEST, jnp.float32),
        jnp.zeros((block_rows,), jnp.float32),
        jnp.zeros((block_rows, dim), jnp.float32),
    )

    if pages_ref is not None:
        layer = layer_ref[0]

        def page_of(block):
            # Clamped because the look-ahead runs one block past the end.
            return tables_ref[slot, jnp.minimum(lax.div(block * block_keys, page_size), table_size - 1)]

        def context_step(block, state):
            carry, page = state
            next_page = page_of(block + 1)
            token = block * block_keys + offset
            in_page = (lax.rem(block * block_keys, page_size) + offset)[:, None]
            used = token < length
            k = plgpu.load(
                pages_ref.at[layer, page, in_page, 0, kv_head, column], mask=used[:, None], other=0.0
            )
            v = plgpu.load(
                pages_ref.at[layer, page, in_page, 1, kv_head, column], mask=used[:, None], other=0.0
            )
            visible = used[None, :]
            if window is not None:
                visible = visible & (position[:, None] - token[None, :] < window)
            return step(carry, k, v, visible), next_page

        begin = first_block + start
        end = first_block + jnp.minimum(stop, context_blocks)
        carry, _ = lax.fori_loop(begin, end, context_step, (carry, page_of(begin)))

    def own_step(block, carry):
        key = block * block_keys + offset
        is_key = (key < nodes)[:, None]
        k = plgpu.load(kv_ref.at[slot, key[:, None], 0, kv_head, column], mask=is_key, other=0.0)
        v = plgpu.load(kv_ref.at[slot, key[:, None], 1, kv_head, column], mask=is_key, other=0.0)
        if mask_ref is None:
            visible = (key[None, :] <= node[:, None]) & (key < nodes)[None, :]
        else:
            both = is_row[:, None] & (key < nodes)[None, :]
            visible = plgpu.load(mask_ref.at[slot, node[:, None], key[None, :]], mask=both, other=False) & both
        return step(carry, k, v, visible)

    carry = lax.fori_loop(
        jnp.maximum(start - context_blocks, 0), jnp.maximum(stop - context_blocks, 0), own_step, carry
    )
    top, total, acc = carry
    acc = acc / jnp.where(total > 0, total, 1.0)[:, None]
    if splits == 1:
        plgpu.store(
            out_ref.at[slot, node[:, None], head[:, None], column], acc.astype(out_ref.dtype), mask=is_row[:, None]
        )
    else:
        assert lse_ref is not None
        # A share that holds no key leaves its part unwritten; the merge goes by the log-sum-exp.
        lse = jnp.where(total > 0, top + jnp.log2(jnp.where(total > 0, total, 1.0)), -jnp.inf)
        plgpu.store(lse_ref.at[slot, kv_head, split, row], lse, mask=is_row)
        written = (is_row & (start < stop))[:, None]
        plgpu.store(out_ref.at[slot, kv_head, split, row[:, None], column], acc.astype(out_ref.dtype), mask=written)


def _merge_kernel(
    partial_ref,  # [B, K, splits, M, d]
    lse_ref,  # [B, K, splits, M]
    out_ref,  # [B, N, H, d]
):
    """One query row a program: the partial outputs weighed by their share of the softmax's sum."""
    _, kv_heads, splits, _, dim = partial_ref.shape
    group = out_ref.shape[2] // kv_heads
    row, kv_head, slot = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    split = jnp.arange(pl.next_power_of_2(splits))
    column = jnp.arange(dim)
    lse = plgpu.load(lse_ref.at[slot, kv_head, split, row], mask=split < splits, other=-jnp.inf)
    weight = jnp.exp2(lse - jnp.maximum(jnp.max(lse), LOWEST))
    part = plgpu.load(
        partial_ref.at[slot, kv_head, split[:, None], row, column[None, :]], mask=(weight > 0)[:, None], other=0.0
    )
    total = jnp.sum(weight)
    out = jnp.sum(weight[:, None] * part, axis=0) / jnp.where(total > 0, total, 1.0)
    head = kv_head * group + lax.rem(row, group)
    plgpu.store(out_ref.at[slot, lax.div(row, group), head, column], out.astype(out_ref.dtype))


@compiled_once("scale", "window", "config", "interpret")
def tree_attention(
    q: Float[Array, "B N H d"],
    kv: Float[Array, "B N 2 K d"],
    mask: Bool[Array, "B N N"] | None,
    pages: Float[Array, "L P S 2 K d"] | None,
    layer: int | Int[Array, ""],
    block_tables: Int[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
    *,
    scale: float,
    window: int | None = None,
    positions: Int[Array, "B N"] | None = None,
    config: Config,
    interpret: bool = False,
) -> Float[Array, "B N H d"]:
    """See `pallas_kernels.tree_attention.api.tree_attention`, which checks what these kernels take.

    Args:
      config: tile sizes and launch parameters; `block_keys` is cut to the page size.
      interpret: run in Pallas' interpreter, on any device.
    """
    batch, nodes, heads, dim = q.shape
    kv_heads = kv.shape[3]
    rows = nodes * (heads // kv_heads)
    block_keys = config.block_keys
    bound = 0
    if pages is not None:
        assert block_tables is not None and lengths is not None
        block_keys = min(block_keys, pages.shape[2])
        bound = block_tables.shape[1] * pages.shape[2]
        if window is not None:
            assert positions is not None
            bound = min(bound, window)
    else:
        block_tables = lengths = None
    if pages is None or window is None:
        positions = window = None
    tiles = pl.cdiv(rows, config.block_rows)
    blocks = pl.cdiv(bound, block_keys) + pl.cdiv(nodes, block_keys)
    splits = split_count(config, programs=tiles * batch * kv_heads, blocks=blocks)
    # The interpreter's dots run on the host, where the preset does not exist.
    precision = (lax.Precision.HIGHEST if interpret else FP32_DOT) if q.dtype == jnp.float32 else None
    kernel = functools.partial(
        _attention_kernel, scale=scale, window=window, splits=splits, block_rows=config.block_rows,
        block_keys=block_keys, min_blocks=config.min_blocks, precision=precision,
    )
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    partial = jax.ShapeDtypeStruct((batch, kv_heads, splits, rows, dim), jnp.float32)
    lse = jax.ShapeDtypeStruct((batch, kv_heads, splits, rows), jnp.float32)
    result = pl.pallas_call(
        kernel,
        out_shape=out if splits == 1 else (partial, lse),
        grid=(tiles, splits, batch * kv_heads),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="tree_attention",
    )(jnp.full((1,), layer, jnp.int32), q, kv, mask, pages, block_tables, lengths, positions)
    if splits == 1:
        return result
    return pl.pallas_call(
        _merge_kernel,
        out_shape=out,
        grid=(rows, kv_heads, batch),
        compiler_params=plgpu.CompilerParams(num_warps=8 if splits > 32 else 4, num_stages=1),
        interpret=interpret,
        name="tree_attention_merge",
    )(*result)

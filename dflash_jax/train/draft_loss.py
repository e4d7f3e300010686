"""The drafter's training loss (arXiv 2602.06036, section 4.2): random anchors, blocks, masks, decayed cross-entropy.

A block is [token[p], mask × (n − 1)] at positions p … p + n − 1. Its rows see the context features strictly before p
and their own block, never another block. Slot k predicts token[p + k]: no shift.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.drafter import Drafter
from dflash_jax.layers import rope_tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of B sequences, A anchors each, n slots.

    Attributes:
      anchors: position of slot 0. keep: False for padding anchors.
      inputs: token ids. labels: the sequence's tokens at the slots' positions (0 past its end).
      counted: slots with a label that the loss may use (slot 0 never is).
      weights: the loss weight of every slot.
    """

    anchors: Int[Array, "B A"]
    keep: Bool[Array, "B A"]
    inputs: Int[Array, "B A n"]
    labels: Int[Array, "B A n"]
    counted: Bool[Array, "B A n"]
    weights: Float[Array, "B A n"]


def loss_mask(
    prompt_lengths: Int[Array, " B"], lengths: Int[Array, " B"], width: int
) -> Bool[Array, "B T"]:
    """True for the tokens of the answers."""
    index = jnp.arange(width)
    return (index >= prompt_lengths[:, None]) & (index < lengths[:, None])


def sample_anchors(
    key: Array, mask: Bool[Array, "B T"], count: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Up to `count` distinct positions p a sequence, uniformly from those with mask[p] and mask[p + 1].

    Returns ascending positions and which of them are real (a short answer has fewer).
    """
    allowed = mask & jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    count = min(count, mask.shape[1])
    scores = jnp.where(allowed, jax.random.uniform(key, mask.shape), -1.0)
    best, anchors = jax.lax.top_k(scores, count)
    # Padding sorts last and is clamped into the sequence below.
    anchors = jnp.sort(jnp.where(best >= 0, anchors, mask.shape[1]), axis=1)
    keep = anchors < mask.shape[1]
    return jnp.where(keep, anchors, 0).astype(jnp.int32), keep


def make_blocks(
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    *,
    size: int,
    mask_token_id: int,
    gamma: float,
) -> Blocks:
    """Inputs, labels and weights of the blocks at `anchors`; weight of slot k ≥ 1 is exp(−(k − 1)/γ)."""
    batch, width = tokens.shape
    slot = jnp.arange(size)
    place = anchors[..., None] + slot
    inside = place < width
    flat = jnp.minimum(place, width - 1).reshape(batch, -1)
    take = lambda values: jnp.take_along_axis(values, flat, axis=1).reshape(place.shape)  # noqa: E731
    labels = jnp.where(inside, take(tokens), 0)
    counted = inside & take(mask) & (slot > 0) & keep[..., None]
    inputs = jnp.where(slot == 0, labels, mask_token_id)
    weights = jnp.where(counted, jnp.exp(-(slot - 1) / gamma), 0.0)
    return Blocks(anchors, keep, inputs, labels, counted, weights)


def context_mask(
    anchors: Int[Array, "B A"], size: int, width: int, window: int | None
) -> Bool[Array, "B A n T"]:
    """Which context tokens each block row sees: strictly before the anchor and, with a window, at most W − 1 back."""
    index = jnp.arange(width)
    seen = jnp.broadcast_to(index < anchors[..., None, None], (*anchors.shape, size, width))
    if window is not None:
        rows = anchors[..., None] + jnp.arange(size)
        seen = seen & (rows[..., None] - index < window)
    return seen


def draft_hidden(
    drafter: Drafter,
    taps: Float[Array, "B T F"],
    embeddings: Float[Array, "B A n D"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "B A n D"]:
    """Normed hidden states of all blocks at once; equals `Drafter.__call__` on each block alone.

    Args:
      drafter: the drafter.
      taps: the target's taps on the whole sequence (each block is masked to what precedes it).
      embeddings: the target's embeddings of the blocks' inputs.
      anchors: positions of slot 0.
    """
    config = drafter.config
    batch, count, size, hidden = embeddings.shape
    width = taps.shape[1]
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    feature = drafter.context_feature(taps)
    context_rope = rope_tables(config.rope, jnp.broadcast_to(jnp.arange(width), (batch, width)))
    positions = (anchors[..., None] + jnp.arange(size)).reshape(batch, count * size)
    block_rope = rope_tables(config.rope, positions)
    own_masks = drafter.block_masks(1, size)
    precision = jax.lax.Precision.HIGHEST if embeddings.dtype == jnp.float32 else None

    def dot(spec: str, a: Array, b: Array) -> Array:
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

    def by_head(kv: Float[Array, "B M 2 K d"]) -> tuple[Float[Array, "B H M d"], Float[Array, "B H M d"]]:
        """Keys and values, repeated for their queries: plain batched products, whatever the grouping."""
        keys, values = (jnp.repeat(kv[:, :, i].swapaxes(1, 2), heads // kv_heads, axis=1) for i in (0, 1))
        return keys, values

    blocked = (batch, heads, count, size, dim)
    x = embeddings.reshape(batch, count * size, hidden)
    for index, layer in enumerate(drafter.layers):
        attn = layer.self_attn
        normed = layer.input_layernorm(x)
        q, gate = attn.project_q(normed, *block_rope)
        q = q.swapaxes(1, 2).reshape(blocked)
        own_keys, own_values = (y.reshape(blocked) for y in by_head(attn.project_kv(normed, *block_rope)))
        keys, values = by_head(attn.project_kv(feature, *context_rope))
        seen = context_mask(anchors, size, width, config.layer_windows[index])[:, None]
        past = jnp.where(seen, dot("bhand,bhtd->bhant", q, keys) * dim**-0.5, -jnp.inf)
        own = jnp.where(own_masks[index][0], dot("bhand,bhamd->bhanm", q, own_keys) * dim**-0.5, -jnp.inf)
        # One softmax over both parts without joining them; a row always sees itself, so the peak is finite.
        peak = jax.lax.stop_gradient(jnp.maximum(past.max(-1), own.max(-1)))[..., None]
        past, own = jnp.exp(past - peak), jnp.exp(own - peak)
        total = past.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)
        mixed = dot("bhant,bhtd->bhand", past.astype(x.dtype), values)
        mixed = (mixed + dot("bhanm,bhamd->bhand", own.astype(x.dtype), own_values)) / total
        mixed = mixed.astype(x.dtype).reshape(batch, heads, count * size, dim).swapaxes(1, 2)
        x = x + attn.output(mixed, gate)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return drafter.norm(x).reshape(batch, count, size, hidden)


def _right(blocks: Blocks, predicted: Int[Array, "B A n"]) -> tuple[Bool[Array, "B A m"], Int[Array, "B A m"]]:
    """Of each of m = n − 1 drafts: whether it agrees with the sequence, and 1 if all before it do too."""
    right = ((predicted == blocks.labels) & blocks.counted)[..., 1:]
    return right, jnp.cumprod(right.astype(jnp.int32), axis=-1)


def leading_runs(blocks: Blocks, predicted: Int[Array, "B A n"]) -> Int[Array, "B A"]:
    """Drafts of each block that agree with the sequence before the first that does not (0 … n − 1)."""
    return jnp.sum(_right(blocks, predicted)[1], axis=-1)


def agreement(blocks: Blocks, predicted: Int[Array, "B A n"]) -> dict[str, Array]:
    """How well argmax drafts agree with the sequences.

    Returns:
      `accuracy` [n − 1]: share of slots k ≥ 1 predicted right; `chain_accuracy` [n − 1]: of all kept blocks, the share
      whose slots 1 … k are all right; `tau`: mean over kept blocks of 1 + (length of that leading run), what a greedy
      chain would emit a round. Slots past the end of an answer count as wrong.
    """
    right, run = _right(blocks, predicted)
    kept = jnp.maximum(jnp.sum(blocks.keep), 1)
    counted = jnp.maximum(jnp.sum(blocks.counted[..., 1:], axis=(0, 1)), 1)
    return {
        "accuracy": jnp.sum(right, axis=(0, 1)) / counted,
        "chain_accuracy": jnp.sum(run, axis=(0, 1)) / kept,
        "tau": jnp.sum((1 + jnp.sum(run, axis=-1)) * blocks.keep) / kept,
    }

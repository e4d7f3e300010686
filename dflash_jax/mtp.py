"""The checkpoint's own draft head: multi-token prediction (MTP, also NEXTN), one decoder layer beside the target.

Slot i joins the target's hidden state of token i with the embedding of token i + 1 and predicts token i + 2:

    x = fc([norm_e(embed(token i + 1)) | norm_h(hidden i)]);  u = norm(layer(x));  logits = head(u)

The embedding comes first; `hidden` is the target's after its final norm; the layer attends causally over its own KV at
rotary position i; embedding and head are the target's. A further step feeds u, after the head's norm, in the place of
`hidden`, at the next position. Source: vLLM, vllm/model_executor/models/qwen3_5_mtp.py
(`Qwen3_5MultiTokenPredictor.forward`); SGLang's qwen3_5_mtp.py agrees. transformers ignores these weights.

The head is one token behind the target: the slot of the newest token waits for the token after it. Its hidden state is
therefore kept (`DecodeState.taps`) until that token is known, at the edge of a prefill chunk as between two rounds.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.cache import write_pages
from dflash_jax.config import FULL, TargetConfig
from dflash_jax.layers import Linear, RMSNorm, rope_tables
from dflash_jax.sharding import local_slice
from dflash_jax.target import DecoderLayer, Target
from pallas_kernels.dispatch import Implementation

if TYPE_CHECKING:
    from dflash_jax.round import DecodeState, RoundSpec


class MTP(nnx.Module):
    """Parameter names are those of checkpoints without their prefix `mtp.`; `shards` as of a `Target`."""

    def __init__(
        self,
        config: TargetConfig,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        shards: int = 1,
    ):
        self.config = config
        self.shards = shards
        width = config.hidden_size
        norm = {"eps": config.rms_norm_eps, "zero_centered": config.zero_centered_norm, "dtype": dtype}
        self.fc = Linear(2 * width // shards, width, dtype=dtype, rngs=rngs, shards=shards)
        self.pre_fc_norm_embedding = RMSNorm(width, **norm)
        self.pre_fc_norm_hidden = RMSNorm(width, **norm)
        self.layers = nnx.List([DecoderLayer(config, FULL, dtype=dtype, rngs=rngs, shards=shards, apart=True)])
        self.norm = RMSNorm(width, **norm)

    def join(self, embeddings: Float[Array, "B N D"], hidden: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """The layer's input: embeddings of the tokens that follow, and the hidden states that they follow."""
        parts = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        return self.fc(local_slice(jnp.concatenate(parts, axis=-1), self.shards))

    def context_kv(self, x: Float[Array, "B M D"], positions: Int[Array, "B M"]) -> Float[Array, "1 B M 2 K d"]:
        """Keys and values of joined rows. With one layer they need no attention, so a context costs no more."""
        layer = self.layers[0]
        cos, sin = rope_tables(self.config.rope, positions)
        return layer.self_attn.project_kv(layer.input_layernorm(x), cos, sin)[None]

    def __call__(
        self,
        x: Float[Array, "B N D"],
        positions: Int[Array, "B N"],
        pages: Float[Array, "1 P S 2 K d"] | None,
        block_tables: Int[Array, "B T"] | None,
        lengths: Int[Array, " B"] | None,
        *,
        implementation: Implementation = "auto",
    ) -> tuple[Float[Array, "B N D"], Float[Array, "1 B N 2 K d"]]:
        """Normed hidden states of joined rows, causal among themselves, and the rows' own keys and values.

        Args:
          x: rows from `join`.
          positions: slot numbers, hence rotary positions.
          pages: the head's KV; slots 0 … lengths − 1 of each sequence are read.
          block_tables, lengths: as of `tree_attention`.
          implementation: kernel choice.
        """
        layer = self.layers[0]
        cos, sin = rope_tables(self.config.rope, positions)
        mixed, kv = layer.self_attn(
            layer.input_layernorm(x), cos, sin, None, pages, 0, block_tables, lengths, implementation=implementation
        )
        x, normed = layer.post_attention_layernorm.add(x, mixed, implementation)
        return self.norm.add(x, layer.mlp(normed, implementation), implementation)[1], kv[None]


def prefill_context(
    target: Target,
    mtp: MTP,
    pages: Float[Array, "1 P S 2 K d"],
    block_tables: Int[Array, "b T"],
    start: Int[Array, " b"],
    tokens: Int[Array, "b C"],
    count: Int[Array, " b"],
    before: Float[Array, "b D"],
    hidden: Float[Array, "b C D"],
) -> tuple[Float[Array, "1 P S 2 K d"], Float[Array, "b D"]]:
    """Writes the slots that one chunk of a prompt completes: start − 1 … start + count − 2.

    Args:
      start: tokens before the chunk. tokens, count: the chunk. hidden: the target's hidden states of its tokens.
      before: the target's hidden state of the token before the chunk; not used where start is 0.

    Returns:
      The pages, and the hidden state of the chunk's last token, whose slot waits for the next token.
    """
    order = jnp.arange(tokens.shape[1])
    positions = start[:, None] - 1 + order
    shifted = jnp.concatenate([before[:, None], hidden[:, :-1]], axis=1)
    fresh = mtp.context_kv(mtp.join(target.embed(tokens), shifted), positions)
    valid = (order < count[:, None]) & (positions >= 0)
    last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return write_pages(pages, fresh, block_tables, positions, valid), last


def draft_chain(
    target: Target, mtp: MTP, state: "DecodeState", spec: "RoundSpec"
) -> tuple[Float[Array, "1 P S 2 K d"], Int[Array, "B L"], Float[Array, "B L V"]]:
    """Catches up with what the target accepted last round and drafts `spec.budget` tokens, one after the other.

    The slots of the accepted tokens are written from the target's hidden states, over whatever the drafts of the round
    before had left there: that is the roll-back.

    Returns:
      The head's pages, the most probable token at each place after the anchor, and the fp32 logits it was taken from
      (of this device's slice of the vocabulary).
    """
    pages = state.cache.draft_kv
    assert pages is not None and state.taps is not None and state.next_tokens is not None
    tables = state.block_tables[:, : spec.context_pages]
    with jax.named_scope("draft_context"):
        order = jnp.arange(state.taps.shape[1])
        positions = (state.lengths - state.num_taps)[:, None] + order
        # A slot that has ended may still hold taps, and its pages may be another request's by now.
        valid = state.active[:, None] & (order < state.num_taps[:, None])
        joined = mtp.join(target.embed(state.next_tokens), state.taps)
        pages = write_pages(pages, mtp.context_kv(joined, positions), state.block_tables, positions, valid)
    newest = jnp.maximum(state.num_taps - 1, 0)[:, None, None]
    x = hidden = jnp.take_along_axis(joined, newest, axis=1)
    drafted: list[Array] = []
    logits: list[Array] = []
    for step in range(spec.budget):
        with jax.named_scope("draft_step"):
            position = state.lengths - 1 + step
            if step:
                x = mtp.join(target.embed(drafted[-1][:, None]), hidden)
            hidden, kv = mtp(x, position[:, None], pages, tables, position, implementation=spec.implementation)
            logits.append(target.logits(hidden[:, 0], spec.implementation))
            drafted.append(target.vocabulary.argmax(logits[-1]))
            if 0 < step < spec.budget - 1:  # the first slot is written already, the last one has no reader
                # No token comes after lengths + remaining: a slot has no page of its own there.
                own = state.active & (position <= state.lengths + state.remaining)
                pages = write_pages(pages, kv, state.block_tables, position[:, None], own[:, None])
    return pages, jnp.stack(drafted, axis=1), jnp.stack(logits, axis=1)

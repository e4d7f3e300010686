"""The target: a decoder stack of Gated DeltaNet and attention layers, with taps on its residual stream."""

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.attention import Attention
from dflash_jax.cache import Context, RowUpdates
from dflash_jax.config import LINEAR, TargetConfig
from dflash_jax.deltanet import DeltaNetUpdate, GatedDeltaNet
from dflash_jax.layers import Embedding, Linear, RMSNorm, SwiGLU, head_logits, rope_tables
from dflash_jax.moe import SparseMoE
from dflash_jax.sharding import Vocabulary
from pallas_kernels.dispatch import Implementation


@struct.dataclass
class Rows:
    """The rows of one pass and how they see each other.

    Attributes:
      tokens: token ids.
      positions: absolute positions (start + depth).
      valid: False for padding rows, which leave every state untouched.
      ancestors: ancestor-or-self mask of tree rows; None for causal rows (prefill, training).
      words: that mask as words of bits (`ancestry.packed`), if they are at hand.
      paths: paths to the rows without children, if they are at hand (`tree.Tree.paths`).
      conv_taps: earlier rows that the causal convolution reads (`tree.ancestor_index`); None for causal rows.
    """

    tokens: Int[Array, "B N"]
    positions: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    ancestors: Bool[Array, "B N N"] | None = None
    conv_taps: Int[Array, "B N W"] | None = None
    words: Int[Array, "B N S"] | None = None
    paths: Int[Array, "B N P"] | None = None


@struct.dataclass
class TargetOutput:
    """Attributes: hidden (after the final norm), taps (concatenated in the order asked for), updates."""

    hidden: Float[Array, "B N D"]
    taps: Float[Array, "B N F"] | None
    updates: RowUpdates


class DecoderLayer(nnx.Module):
    """norm → mixer → residual → norm → SwiGLU (or experts) → residual."""

    def __init__(
        self,
        config: TargetConfig,
        kind: str,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        shards: int = 1,
        apart: bool = False,
    ):
        """`apart`: see `Attention`."""
        norm = {"eps": config.rms_norm_eps, "zero_centered": config.zero_centered_norm, "dtype": dtype}
        # Residual branches start small, so that deep stacks train from scratch (GPT-2's 1/√(2L)).
        out_std = 0.02 / (2 * config.num_layers) ** 0.5
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        if kind == LINEAR:
            self.linear_attn = GatedDeltaNet(
                config, dtype=dtype, rngs=rngs, out_std=out_std, shards=shards
            )
        else:
            self.self_attn = Attention(
                config.hidden_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                eps=config.rms_norm_eps,
                gated=config.attn_output_gate,
                zero_centered=config.zero_centered_norm,
                dtype=dtype,
                rngs=rngs,
                out_std=out_std,
                shards=shards,
                qk_norm=config.qk_norm,
                bias=config.attention_bias,
                apart=apart,
            )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        if config.num_experts:
            self.mlp = SparseMoE(config, dtype=dtype, rngs=rngs, down_std=out_std, shards=shards)
        else:
            self.mlp = SwiGLU(
                config.hidden_size,
                config.intermediate_size,
                dtype=dtype,
                rngs=rngs,
                down_std=out_std,
                shards=shards,
                bias=config.mlp_bias,
            )


class Target(nnx.Module):
    """A Qwen3.5/3.6 hybrid, dense Qwen3 or Llama decoder; parameter names are Hugging Face's without their prefix.

    With `shards`, the module is one device's part and runs inside `sharding.shard_program`; `config` stays that of the
    whole model.
    """

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
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs, shards=shards
        )
        self.layers = nnx.List(
            DecoderLayer(config, kind, dtype=dtype, rngs=rngs, shards=shards) for kind in config.layer_types
        )
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, zero_centered=config.zero_centered_norm, dtype=dtype
        )
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size // shards, dtype=dtype, rngs=rngs)

    @property
    def vocabulary(self) -> Vocabulary:
        """Reductions over what `logits` returns."""
        return Vocabulary(self.shards)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights and activations."""
        return self.embed_tokens.weight.get_value().dtype

    def embed(self, tokens: Int[Array, "B N"]) -> Float[Array, "B N D"]:
        """Token embeddings; the drafter shares them."""
        return self.embed_tokens(tokens)

    def logits(
        self, hidden: Float[Array, "... D"], implementation: Implementation = "xla"
    ) -> Float[Array, "... V"]:
        """fp32 logits of normed hidden states, on this device's slice of the vocabulary; the drafter shares them."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return head_logits(head.weight[...], hidden, implementation)

    def empty_context(self, batch: int) -> Context:
        """The context of sequences that start now (training, scoring)."""
        c = self.config
        linear = len(c.linear_layers)
        heads = c.linear_num_value_heads // self.shards
        states = (linear, batch, heads, c.linear_key_head_dim, c.linear_value_head_dim)
        window = (linear, batch, max(c.linear_conv_kernel_dim - 1, 0), c.conv_channels // self.shards)
        return Context(
            pages=None,
            block_tables=None,
            lengths=jnp.zeros((batch,), jnp.int32),
            recurrent=jnp.zeros(states, jnp.float32),
            conv=jnp.zeros(window, self.dtype),
        )

    def __call__(
        self,
        rows: Rows,
        context: Context,
        *,
        taps: tuple[int, ...] = (),
        precise: bool = True,
        implementation: Implementation = "auto",
    ) -> TargetOutput:
        """One pass over N rows a slot; reads the committed context, writes nothing.

        Args:
          rows: the rows; causal (prefill, training) or a tree (verification, decoding).
          context: committed past.
          taps: ascending layer numbers whose residual stream (after the layer) is returned; Hugging Face's
            `hidden_states[i + 1]`.
          precise: fp32 products inside the chunk rule; False allows TF32 (training).
          implementation: kernel choice.
        """
        config = self.config
        cos, sin = rope_tables(config.rope, rows.positions)
        x = self.embed(rows.tokens)
        tapped: list[Array] = []
        kv: list[Array] = []
        linear: list[DeltaNetUpdate] = []
        normed = self.layers[0].input_layernorm(x)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(config.layer_types[index]):
                if config.layer_types[index] == LINEAR:
                    place = len(linear)
                    mixed, delta = layer.linear_attn(
                        normed,
                        rows.valid,
                        rows.ancestors if rows.words is None else rows.words,
                        rows.conv_taps,
                        context.recurrent,
                        context.conv,
                        layer=place,
                        paths=rows.paths,
                        precise=precise,
                        implementation=implementation,
                    )
                    linear.append(delta)
                else:
                    mixed, fresh = layer.self_attn(
                        normed,
                        cos,
                        sin,
                        rows.ancestors,
                        context.pages,
                        len(kv),
                        context.block_tables,
                        context.lengths,
                        implementation=implementation,
                    )
                    kv.append(fresh)
            with jax.named_scope("mlp"):
                x, normed = layer.post_attention_layernorm.add(x, mixed, implementation)
                update = layer.mlp(normed, implementation)
            after = self.layers[index + 1].input_layernorm if index + 1 < config.num_layers else self.norm
            x, normed = after.add(x, update, implementation)
            if index in taps:
                tapped.append(x)
        features = jnp.concatenate(tapped, axis=-1) if tapped else None
        return TargetOutput(normed, features, self._stack_updates(rows, kv, linear, x.dtype))

    def _stack_updates(
        self,
        rows: Rows,
        kv: list[Array],
        linear: list[DeltaNetUpdate],
        dtype: jax.typing.DTypeLike,
    ) -> RowUpdates:
        """Stacks the layers' updates as the caches are stacked (an empty stack where a model has no such layer)."""
        shape = rows.tokens.shape

        def stack(name: str) -> Array | None:
            if not linear or getattr(linear[0], name) is None:
                return None
            return jnp.stack([getattr(update, name) for update in linear])

        none = jnp.zeros((0, *shape, 2, self.config.num_kv_heads // self.shards, self.config.head_dim), dtype)
        conv_inputs = stack("conv_inputs")
        return RowUpdates(
            kv=jnp.stack(kv) if kv else none,
            conv_inputs=jnp.zeros((0, *shape, 0), dtype) if conv_inputs is None else conv_inputs,
            final_state=stack("final_state"),
            keys=stack("keys"),
            innovations=stack("innovations"),
            path_decay=stack("path_decay"),
        )

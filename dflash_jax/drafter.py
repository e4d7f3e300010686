"""The DFlash block-diffusion drafter (arXiv 2602.06036, section 4, and the published checkpoints).

Two streams share the keys' and values' weights of every layer. The context stream is the projection of the target's
taps; it is written to the draft KV once a token and goes through no query, no MLP and no layer. The block stream is
[anchor, mask, mask, …]: it attends over the context and over itself, and slot k predicts the token at anchor + k.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.attention import Attention
from dflash_jax.config import DrafterConfig
from dflash_jax.layers import Linear, RMSNorm, SwiGLU, rope_tables
from dflash_jax.sharding import local_slice
from pallas_kernels.dispatch import Implementation


class DrafterLayer(nnx.Module):
    """A plain Qwen3 block: norm → attention → residual → norm → SwiGLU → residual."""

    def __init__(
        self, config: DrafterConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs, shards: int = 1
    ):
        norm = {"eps": config.rms_norm_eps, "zero_centered": False, "dtype": dtype}
        out_std = 0.02 / (2 * config.num_layers) ** 0.5
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            eps=config.rms_norm_eps,
            gated=False,
            zero_centered=False,
            dtype=dtype,
            rngs=rngs,
            out_std=out_std,
            shards=shards,
            apart=True,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = SwiGLU(
            config.hidden_size,
            config.intermediate_size,
            dtype=dtype,
            rngs=rngs,
            down_std=out_std,
            shards=shards,
        )


class Drafter(nnx.Module):
    """Parameter names are those of the published checkpoints (no prefix, no embedding, no head).

    With `shards`, the module is one device's part, as a `Target` is.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        shards: int = 1,
    ):
        self.config = config
        self.shards = shards
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = Linear(features // shards, config.hidden_size, dtype=dtype, rngs=rngs, shards=shards)
        self.hidden_norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, zero_centered=False, dtype=dtype
        )
        self.layers = nnx.List(
            DrafterLayer(config, dtype=dtype, rngs=rngs, shards=shards) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, zero_centered=False, dtype=dtype)

    def context_feature(self, taps: Float[Array, "B M F"]) -> Float[Array, "B M D"]:
        """hidden_norm(fc(taps)): what the drafter knows about a token of the context."""
        return self.hidden_norm(self.fc(local_slice(taps, self.shards)))

    def context_kv(
        self, taps: Float[Array, "B M F"], positions: Int[Array, "B M"]
    ) -> Float[Array, "L B M 2 K d"]:
        """Draft keys and values of context tokens at their absolute positions, for every layer."""
        feature = self.context_feature(taps)
        cos, sin = rope_tables(self.config.rope, positions)
        return jnp.stack([layer.self_attn.project_kv(feature, cos, sin) for layer in self.layers])

    def block_masks(self, batch: int, rows: int) -> list[Bool[Array, "B N N"]]:
        """Which block rows each layer lets each row see: all, or those before it, within the layer's window."""
        index = jnp.arange(rows)
        apart = index[:, None] - index[None, :]
        masks = []
        for window, causal in zip(self.config.layer_windows, self.config.layer_causal, strict=True):
            mask = apart >= 0 if causal else jnp.ones((rows, rows), bool)
            if window is not None:
                mask = mask & (jnp.abs(apart) < window)
            masks.append(jnp.broadcast_to(mask, (batch, rows, rows)))
        return masks

    def __call__(
        self,
        embeddings: Float[Array, "B N D"],
        pages: Float[Array, "L P S 2 K d"],
        block_tables: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        *,
        implementation: Implementation = "auto",
    ) -> Float[Array, "B N D"]:
        """Normed hidden states of one block.

        Args:
          embeddings: the target's embeddings of [anchor, mask, …].
          pages: draft KV of the context.
          block_tables: page numbers of each slot.
          lengths: context tokens of each slot; the anchor sits at this position.
        """
        batch, rows = embeddings.shape[:2]
        positions = lengths[:, None] + jnp.arange(rows)
        cos, sin = rope_tables(self.config.rope, positions)
        masks = self.block_masks(batch, rows)
        x = embeddings
        normed = self.layers[0].input_layernorm(x)
        for index, layer in enumerate(self.layers):
            with jax.named_scope("draft_layer"):
                mixed, _ = layer.self_attn(
                    normed,
                    cos,
                    sin,
                    masks[index],
                    pages,
                    index,
                    block_tables,
                    lengths,
                    window=self.config.layer_windows[index],
                    positions=positions,
                    implementation=implementation,
                )
                x, normed = layer.post_attention_layernorm.add(x, mixed, implementation)
                after = self.layers[index + 1].input_layernorm if index + 1 < len(self.layers) else self.norm
                x, normed = after.add(x, layer.mlp(normed, implementation), implementation)
        return normed

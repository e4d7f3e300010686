"""The Gated DeltaNet mixer (arXiv 2412.06464, as in Qwen3.5/3.6).

One forward serves prefill (causal rows, chunk rule) and verification (tree rows, tree form): what differs is which
earlier inputs the convolution reads and which rows the delta rule lets see each other.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import TargetConfig
from dflash_jax.layers import Linear, project_joined
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gdn_mixer import gated_norm, gdn_front
from pallas_kernels.gdn_mixer.reference import convolve, l2norm
from pallas_kernels.gdn_scan import chunk_delta_rule, tree_delta_rule

__all__ = ["DeltaNetUpdate", "DepthwiseConv", "GatedDeltaNet", "GatedNorm", "l2norm"]


@struct.dataclass
class DeltaNetUpdate:
    """One layer's part of `cache.RowUpdates`."""

    conv_inputs: Float[Array, "B N C"]
    final_state: Float[Array, "B Hv dk dv"] | None = None
    keys: Float[Array, "B N Hk dk"] | None = None
    innovations: Float[Array, "B N Hv dv"] | None = None
    path_decay: Float[Array, "B N Hv"] | None = None


class DepthwiseConv(nnx.Module):
    """Weights of the causal depthwise convolution, [channels, 1, K] as checkpoints hold them."""

    def __init__(self, channels: int, width: int, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        bound = width**-0.5
        values = jax.random.uniform(rngs.params(), (channels, 1, width), jnp.float32, -bound, bound)
        self.weight = nnx.Param(values.astype(dtype))


class GatedNorm(nnx.Module):
    """Per-head RMSNorm of the output, times silu(z). Its weight is never zero-centred."""

    def __init__(self, features: int, *, eps: float):
        self.weight = nnx.Param(jnp.ones((features,), jnp.float32))
        self.eps = eps

    def __call__(
        self,
        x: Float[Array, "*R H d"],
        z: Float[Array, "*R Z"],
        *,
        start: int = 0,
        implementation: Implementation = "xla",
    ) -> Float[Array, "*R H d"]:
        """Norms every head and gates it by the columns of z from `start` on; fp32 inside, z's dtype outside.

        XLA unless asked: training calls this module by itself, and the kernel has no gradient.
        """
        return gated_norm(x, z, self.weight[...], eps=self.eps, start=start, implementation=implementation)


class GatedDeltaNet(nnx.Module):
    """One linear-attention mixer; parameter names are Hugging Face's `linear_attn.*`.

    With `shards`, a device holds its share of the key heads and the value heads that use them.
    """

    JOINED: ClassVar = {"in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")}

    def __init__(
        self,
        config: TargetConfig,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        out_std: float = 0.02,
        shards: int = 1,
    ):
        self.key_heads = config.linear_num_key_heads // shards
        self.value_heads = config.linear_num_value_heads // shards
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        hidden, inner = config.hidden_size, self.value_heads * self.value_dim
        channels = config.conv_channels // shards
        self.in_proj_qkv = Linear(hidden, channels, dtype=dtype, rngs=rngs)
        self.in_proj_z = Linear(hidden, inner, dtype=dtype, rngs=rngs)
        self.in_proj_b = Linear(hidden, self.value_heads, dtype=dtype, rngs=rngs)
        self.in_proj_a = Linear(hidden, self.value_heads, dtype=dtype, rngs=rngs)
        self.conv1d = DepthwiseConv(channels, config.linear_conv_kernel_dim, dtype=dtype, rngs=rngs)
        decay = jax.random.uniform(rngs.params(), (self.value_heads,), jnp.float32, 1.0, 16.0)
        step = jnp.exp(
            jax.random.uniform(rngs.params(), (self.value_heads,), jnp.float32, jnp.log(1e-3), jnp.log(0.1))
        )
        # Gates stay fp32 whatever the weights' dtype: the state multiplies them over thousands of tokens.
        self.A_log = nnx.Param(jnp.log(decay))
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)))  # softplus(dt_bias) = step
        self.norm = GatedNorm(self.value_dim, eps=config.rms_norm_eps)
        self.out_proj = Linear(inner, hidden, dtype=dtype, rngs=rngs, std=out_std, shards=shards)

    def convolve(
        self,
        inputs: Float[Array, "B N C"],
        window: Float[Array, "B W C"],
        taps: Int[Array, "B N W"] | None,
    ) -> Float[Array, "B N C"]:
        """silu of the causal depthwise convolution; `taps` are ancestor indices, None for causal rows.

        taps[b, i, j] is the row of the (j+1)-th ancestor of row i, or −m for the m-th last input of the window.
        """
        return convolve(inputs, window, taps, self.conv1d.weight[...])

    def __call__(
        self,
        x: Float[Array, "B N D"],
        valid: Bool[Array, "B N"],
        ancestors: Bool[Array, "B N N"] | Int[Array, "B N S"] | None,
        conv_taps: Int[Array, "B N W"] | None,
        state: Float[Array, "B Hv dk dv"] | Float[Array, "L B Hv dk dv"],
        window: Float[Array, "B W C"] | Float[Array, "L B W C"],
        *,
        layer: int | None = None,
        paths: Int[Array, "B N P"] | None = None,
        precise: bool = True,
        implementation: Implementation = "auto",
    ) -> tuple[Float[Array, "B N D"], DeltaNetUpdate]:
        """Mixes N rows from the committed state and window; writes nothing.

        Args:
          x: normed rows.
          valid: padding rows are False; they leave the state untouched.
          ancestors: ancestor-or-self mask of tree rows or its words (`ancestry.packed`), or None for causal rows.
          conv_taps: see `convolve`; None exactly when `ancestors` is.
          state, window: this layer's committed state and raw inputs; or those of all layers with `layer` naming this
            one, which spares kernels a copy of either.
          layer: see `state`.
          paths: see `tree_delta_rule`.
          precise: see `chunk_delta_rule`.
        """
        batch, rows = valid.shape
        projected = project_joined(self, "in_proj", x, implementation)
        if ancestors is None:
            # Padding reaches neither the convolution nor the state. Of a tree's padding no row is a descendant.
            projected = jnp.where(valid[..., None], projected, 0)
        channels = self.conv1d.weight.shape[0]
        q, k, v, strength, decay = gdn_front(
            projected, window, conv_taps, self.conv1d.weight[...], self.A_log[...], self.dt_bias[...], valid,
            key_heads=self.key_heads, key_dim=self.key_dim, ancestors=ancestors, layer=layer,
            implementation=implementation,
        )  # fmt: skip

        update = DeltaNetUpdate(conv_inputs=projected[..., :channels])
        if ancestors is None:
            own = state if layer is None else state[layer]
            out, final = chunk_delta_rule(
                q, k, v, strength, decay, own, precise=precise, implementation=implementation
            )
            update = dataclasses.replace(update, final_state=final)
        else:
            out, fresh = tree_delta_rule(
                q, k, v, strength, decay, state, ancestors, layer=layer, paths=paths, implementation=implementation
            )
            update = dataclasses.replace(update, keys=k, innovations=fresh, path_decay=decay)
        mixed = self.norm(out, projected, start=channels, implementation=implementation).reshape(batch, rows, -1)
        return self.out_proj(mixed, implementation), update

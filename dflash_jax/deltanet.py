"""The Gated DeltaNet mixer (arXiv 2412.06464, as in Qwen3.5/3.6).

One forward serves prefill (causal rows, chunk rule) and verification (tree rows, tree form): what differs is which
earlier inputs the convolution reads and which rows the delta rule lets see each other.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import TargetConfig
from dflash_jax.layers import Linear
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gdn_scan import chunk_delta_rule, tree_delta_rule


@struct.dataclass
class DeltaNetUpdate:
    """One layer's part of `cache.RowUpdates`."""

    conv_inputs: Float[Array, "B N C"]
    final_state: Float[Array, "B Hv dk dv"] | None = None
    keys: Float[Array, "B N Hk dk"] | None = None
    innovations: Float[Array, "B N Hv dv"] | None = None
    path_decay: Float[Array, "B N Hv"] | None = None


def l2norm(x: Float[Array, "... d"], eps: float = 1e-6) -> Float[Array, "... d"]:
    """x / ‖x‖ in fp32, eps inside the root and on the sum (not the mean)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


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

    def __call__(self, x: Float[Array, "... d"], z: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Norms x over its last axis and gates it; fp32 inside, z's dtype outside."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps) * self.weight[...]
        return (y * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)


class GatedDeltaNet(nnx.Module):
    """One linear-attention mixer; parameter names are Hugging Face's `linear_attn.*`."""

    def __init__(
        self, config: TargetConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs, out_std: float = 0.02
    ):
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        hidden, inner = config.hidden_size, self.value_heads * self.value_dim
        self.in_proj_qkv = Linear(hidden, config.conv_channels, dtype=dtype, rngs=rngs)
        self.in_proj_z = Linear(hidden, inner, dtype=dtype, rngs=rngs)
        self.in_proj_b = Linear(hidden, self.value_heads, dtype=dtype, rngs=rngs)
        self.in_proj_a = Linear(hidden, self.value_heads, dtype=dtype, rngs=rngs)
        self.conv1d = DepthwiseConv(
            config.conv_channels, config.linear_conv_kernel_dim, dtype=dtype, rngs=rngs
        )
        decay = jax.random.uniform(rngs.params(), (self.value_heads,), jnp.float32, 1.0, 16.0)
        step = jnp.exp(
            jax.random.uniform(rngs.params(), (self.value_heads,), jnp.float32, jnp.log(1e-3), jnp.log(0.1))
        )
        # Gates stay fp32 whatever the weights' dtype: the state multiplies them over thousands of tokens.
        self.A_log = nnx.Param(jnp.log(decay))
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)))  # softplus(dt_bias) = step
        self.norm = GatedNorm(self.value_dim, eps=config.rms_norm_eps)
        self.out_proj = Linear(inner, hidden, dtype=dtype, rngs=rngs, std=out_std)

    def convolve(
        self,
        inputs: Float[Array, "B N C"],
        window: Float[Array, "B W C"],
        taps: Int[Array, "B N W"] | None,
    ) -> Float[Array, "B N C"]:
        """silu of the causal depthwise convolution; `taps` are ancestor indices, None for causal rows.

        taps[b, i, j] is the row of the (j+1)-th ancestor of row i, or −m for the m-th last input of the window.
        """
        weight = self.conv1d.weight[...][:, 0].astype(jnp.float32)  # [C, K]; the last tap is the row itself
        rows, width = inputs.shape[1], window.shape[1]
        past = jnp.concatenate([window, inputs], axis=1)
        total = inputs.astype(jnp.float32) * weight[:, -1]
        for j in range(width):
            if taps is None:
                earlier = jax.lax.slice_in_dim(past, width - 1 - j, width - 1 - j + rows, axis=1)
            else:
                earlier = jnp.take_along_axis(past, (taps[:, :, j] + width)[..., None], axis=1)
            total = total + earlier.astype(jnp.float32) * weight[:, width - 1 - j]
        return jax.nn.silu(total).astype(inputs.dtype)

    def __call__(
        self,
        x: Float[Array, "B N D"],
        valid: Bool[Array, "B N"],
        ancestors: Bool[Array, "B N N"] | None,
        conv_taps: Int[Array, "B N W"] | None,
        state: Float[Array, "B Hv dk dv"],
        window: Float[Array, "B W C"],
        *,
        precise: bool = True,
        implementation: Implementation = "auto",
    ) -> tuple[Float[Array, "B N D"], DeltaNetUpdate]:
        """Mixes N rows from the committed state and window; writes nothing.

        Args:
          x: normed rows.
          valid: padding rows are False; they leave the state untouched.
          ancestors: ancestor-or-self mask of tree rows, or None for causal rows.
          conv_taps: see `convolve`; None exactly when `ancestors` is.
          state, window: this layer's committed state and raw inputs.
          precise: see `chunk_delta_rule`.
        """
        batch, rows = x.shape[:2]
        # Before the projections, so that padding reaches neither the convolution nor the state.
        x = jnp.where(valid[..., None], x, 0)
        inputs = self.in_proj_qkv(x)
        z = self.in_proj_z(x).reshape(batch, rows, self.value_heads, self.value_dim)
        strength = jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32))
        decay = -jnp.exp(self.A_log[...]) * jax.nn.softplus(
            self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...]
        )
        strength = jnp.where(valid[..., None], strength, 0.0)
        decay = jnp.where(valid[..., None], decay, 0.0)

        mixed = self.convolve(inputs, window, conv_taps)
        width = self.key_heads * self.key_dim
        shape = (batch, rows, self.key_heads, self.key_dim)
        q = l2norm(mixed[..., :width].reshape(shape))
        k = l2norm(mixed[..., width : 2 * width].reshape(shape))
        v = mixed[..., 2 * width :].reshape(batch, rows, self.value_heads, self.value_dim).astype(jnp.float32)

        update = DeltaNetUpdate(conv_inputs=inputs)
        if ancestors is None:
            out, final = chunk_delta_rule(
                q, k, v, strength, decay, state, precise=precise, implementation=implementation
            )
            update = dataclasses.replace(update, final_state=final)
        else:
            out, fresh, total = tree_delta_rule(
                q, k, v, strength, decay, state, ancestors, implementation=implementation
            )
            update = dataclasses.replace(update, keys=k, innovations=fresh, path_decay=total)
        mixed = self.norm(out, z).reshape(batch, rows, -1)
        return self.out_proj(mixed), update

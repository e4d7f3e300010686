"""Norms, rotary embedding, linear maps, SwiGLU, embedding and head.

Weights keep the layout of the checkpoints, [out, in], so that loading is a copy. Norms, rotary angles and softmax are
fp32; products take the weights' dtype and accumulate in fp32.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dflash_jax.config import LinearScaling, Llama3Scaling, RopeConfig, YarnConfig
from dflash_jax.sharding import ROWS, Vocabulary, psum, shard_program
from pallas_kernels.add_norm import add_norm
from pallas_kernels.add_norm.reference import rms_norm
from pallas_kernels.dispatch import Implementation
from pallas_kernels.linear import linear

# fp32 is asked for to get fp32: without this a GPU would silently round fp32 operands to TF32.
FP32 = jax.lax.Precision.HIGHEST


def _bias(module: nnx.Module) -> Float[Array, " o"] | None:
    bias: nnx.Param | None = getattr(module, "bias", None)
    return None if bias is None else bias[...]


def _plus_bias(module: nnx.Module, y: Float[Array, "... o"]) -> Float[Array, "... o"]:
    """y plus the module's `bias`, where it has one."""
    bias = _bias(module)
    return y if bias is None else y + bias


class Linear(nnx.Module):
    """y = x Wᵀ, plus a `bias` if asked for. `weight` is [out, in].

    With `shards`, every device holds the columns of its own inputs, and the products are summed over devices.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        std: float = 0.02,
        shards: int = 1,
        bias: bool = False,
    ):
        values = std * jax.random.normal(rngs.params(), (out_features, in_features), jnp.float32)
        self.weight = nnx.Param(values.astype(dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((out_features,), dtype))
        self.shards = shards

    def __call__(self, x: Float[Array, "... i"], implementation: Implementation = "xla") -> Float[Array, "... o"]:
        """Applies the map to the last axis, in x's dtype. XLA unless asked: kernels have no gradient for training."""
        if self.shards == 1:
            return linear(x, self.weight[...], _bias(self), implementation=implementation)
        # Rounded before the sum: in bf16 half the bytes travel.
        return _plus_bias(self, psum(linear(x, self.weight[...], implementation=implementation), self.shards))


class Joined(nnx.Module):
    """Several `Linear` maps of one input as one product; made from them by `join`."""

    def __init__(self, weight: Float[Array, "o i"], bias: Float[Array, " o"] | None, widths: tuple[int, ...]):
        self.weight = nnx.Param(weight)
        if bias is not None:
            self.bias = nnx.Param(bias)
        self.widths = widths

    def __call__(
        self, x: Float[Array, "... i"], implementation: Implementation = "xla", swiglu: bool = False
    ) -> Float[Array, "... o"]:
        """The maps' outputs side by side, in x's dtype, or of two maps silu(first) · second."""
        return linear(x, self.weight[...], _bias(self), swiglu=swiglu, implementation=implementation)

    def split(self, out: Float[Array, "... o"]) -> list[Float[Array, "... _"]]:
        """The output of each map."""
        return jnp.split(out, np.cumsum(self.widths[:-1]).tolist(), axis=-1)


class RMSNorm(nnx.Module):
    """x / rms(x), scaled by `weight` or, zero-centred, by 1 + `weight`; in fp32, cast back at the end."""

    def __init__(self, features: int, *, eps: float, zero_centered: bool, dtype: jax.typing.DTypeLike):
        self.weight = nnx.Param((jnp.zeros if zero_centered else jnp.ones)((features,), dtype))
        self.eps = eps
        self.zero_centered = zero_centered

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Norms the last axis, in x's dtype."""
        return rms_norm(x, self.weight[...], eps=self.eps, zero_centered=self.zero_centered)

    def add(
        self, x: Float[Array, "... d"], update: Float[Array, "... d"], implementation: Implementation
    ) -> tuple[Float[Array, "... d"], Float[Array, "... d"]]:
        """The residual sum x + update, and its norm."""
        return add_norm(
            x, update, self.weight[...], eps=self.eps, zero_centered=self.zero_centered,
            implementation=implementation,
        )  # fmt: skip


class SwiGLU(nnx.Module):
    """W_down (silu(W_gate x) · W_up x)."""

    JOINED: ClassVar = {"gate_up_proj": ("gate_proj", "up_proj")}

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        down_std: float = 0.02,
        shards: int = 1,
        bias: bool = False,
    ):
        width = intermediate // shards
        self.gate_proj = Linear(hidden, width, dtype=dtype, rngs=rngs, bias=bias)
        self.up_proj = Linear(hidden, width, dtype=dtype, rngs=rngs, bias=bias)
        self.down_proj = Linear(
            width, hidden, dtype=dtype, rngs=rngs, std=down_std, shards=shards, bias=bias
        )

    def __call__(self, x: Float[Array, "... d"], implementation: Implementation = "xla") -> Float[Array, "... d"]:
        """Mixes the last axis."""
        joined: Joined | None = getattr(self, "gate_up_proj", None)
        if joined is not None:
            return self.down_proj(joined(x, implementation, swiglu=True), implementation)
        gate, up = project(self, "gate_up_proj", x, implementation)
        return self.down_proj(jax.nn.silu(gate) * up, implementation)


def join(module: nnx.Module, mesh: Mesh | None = None) -> None:
    """Joins, in place, the maps that read the same input, here and in all modules below (see `project`).

    A layer's products become few and large, which a memory-bound device reads faster. Takes the memory of one map more
    while it runs. On a mesh each device joins its own rows.
    """
    joined = shard_program(lambda weights: jnp.concatenate(weights), mesh, (ROWS,), ROWS)
    joined = jax.jit(joined)
    for _, part in list(nnx.iter_modules(module)):
        for name, parts in getattr(part, "JOINED", {}).items():
            if not hasattr(part, parts[0]):
                continue  # joined before
            weights = [getattr(part, one).weight[...] for one in parts]
            biases = [getattr(part, one).bias[...] for one in parts if hasattr(getattr(part, one), "bias")]
            widths = tuple(w.shape[0] // (1 if mesh is None else mesh.size) for w in weights)
            setattr(part, name, Joined(joined(weights), joined(biases) if biases else None, widths))
            for one in parts:
                delattr(part, one)


def project(
    module: nnx.Module, name: str, x: Float[Array, "... i"], implementation: Implementation = "xla"
) -> list[Float[Array, "... _"]]:
    """The maps that `module.JOINED[name]` lists, applied to x: one product if they were joined, else one each."""
    joined = getattr(module, name, None)
    if joined is not None:
        return joined.split(joined(x, implementation))
    return [getattr(module, part)(x, implementation) for part in module.JOINED[name]]  # type: ignore[attr-defined]


def project_joined(
    module: nnx.Module, name: str, x: Float[Array, "... i"], implementation: Implementation = "xla"
) -> Float[Array, "... o"]:
    """The same, side by side in one array."""
    joined = getattr(module, name, None)
    if joined is not None:
        return joined(x, implementation)
    return jnp.concatenate(project(module, name, x, implementation), axis=-1)


class Embedding(nnx.Module):
    """Token table [V, D]; also the head where embeddings are tied. Every device holds a slice of the vocabulary."""

    def __init__(
        self, vocab_size: int, hidden: int, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs, shards: int = 1
    ):
        values = 0.02 * jax.random.normal(rngs.params(), (vocab_size // shards, hidden), jnp.float32)
        self.weight = nnx.Param(values.astype(dtype))
        self.shards = shards

    def __call__(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Rows of the table; ids outside it read its ends."""
        table = self.weight[...]
        if self.shards == 1:
            return table.at[tokens].get(mode="clip")
        width = table.shape[0]
        own = jnp.clip(tokens, 0, width * self.shards - 1) - Vocabulary(self.shards).start(width)
        here = (own >= 0) & (own < width)
        return psum(jnp.where(here[..., None], table.at[own].get(mode="clip"), 0), self.shards)


def head_logits(
    weight: Float[Array, "V D"], hidden: Float[Array, "... D"], implementation: Implementation = "xla"
) -> Float[Array, "... V"]:
    """fp32 logits of (already normalised) hidden states."""
    return linear(hidden, weight, dtype=jnp.float32, implementation=implementation)


def rope_frequencies(config: RopeConfig) -> tuple[Float[Array, " half"], float]:
    """Inverse frequencies (radians a position) and the factor on cos and sin (1 unless YaRN sets it)."""
    half = config.rotary_dim // 2
    exponent = jnp.arange(half, dtype=jnp.float32) * 2.0 / config.rotary_dim
    inverse = 1.0 / (config.theta**exponent)
    match config.scaling:
        case None:
            return inverse, 1.0
        case LinearScaling(factor):
            return inverse / factor, 1.0
        case Llama3Scaling() as llama3:
            return _llama3_frequencies(inverse, llama3), 1.0
        case YarnConfig() as yarn:
            return _yarn_frequencies(inverse, config, yarn)


def _llama3_frequencies(inverse: Float[Array, " half"], llama3: Llama3Scaling) -> Float[Array, " half"]:
    """Frequencies that turn fewer than `low_freq_factor` times within the original context are interpolated by
    `factor`, those that turn more than `high_freq_factor` times kept; between them the share kept is linear in the
    turns (transformers, `_compute_llama3_parameters`).
    """
    turns = llama3.original_max_position_embeddings * inverse / (2 * math.pi)
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 - keep) * inverse / llama3.factor + keep * inverse


def _yarn_frequencies(
    inverse: Float[Array, " half"], config: RopeConfig, yarn: YarnConfig
) -> tuple[Float[Array, " half"], float]:
    """arXiv 2309.00071, section 3.3: low frequencies are interpolated by `factor`, high ones kept, with a linear ramp
    between the dims that turn `beta_slow` and `beta_fast` times within the original context.
    """

    def dim_of_turns(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return config.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dim_of_turns(yarn.beta_fast), dim_of_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    ramp = (jnp.arange(inverse.shape[0], dtype=jnp.float32) - low) / max(high - low, 0.001)
    keep = 1.0 - jnp.clip(ramp, 0.0, 1.0)
    scale = yarn.attention_factor
    if scale is None:
        scale = 0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1.0 else 1.0
    return inverse / yarn.factor * (1.0 - keep) + inverse * keep, float(scale)


def rope_tables(
    config: RopeConfig, positions: Int[Array, "B N"]
) -> tuple[Float[Array, "B N half"], Float[Array, "B N half"]]:
    """cos and sin (fp32) of the rotary angles at absolute token positions."""
    inverse, scale = rope_frequencies(config)
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale

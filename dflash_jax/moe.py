"""Mixture of experts in the place of an MLP: Qwen3.5/3.6 MoE (transformers, `Qwen3_5MoeSparseMoeBlock`).

    p = softmax(W_gate x) in fp32;  w = the k largest of p, divided by their sum;  E = their experts
    y = Σᵢ wᵢ SwiGLU_{Eᵢ}(x) + sigmoid(W_shared x) · SwiGLU_shared(x)

Pairs of a row and an expert are sorted by expert and computed in tiles, one product a tile with its expert's weights:
no expert is read that no row chose, and one that many rows chose is read once for all rows of a tile.
"""

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int

from dflash_jax.config import TargetConfig
from dflash_jax.layers import FP32, Linear, SwiGLU
from dflash_jax.sharding import psum
from pallas_kernels.dispatch import Implementation
from pallas_kernels.linear.reference import matmul_precision


class Experts(nnx.Module):
    """The weights of all experts, as checkpoints fuse them: `gate_up_proj` [E, 2I, D], `down_proj` [E, D, I].

    With `shards`, every device holds its share of each expert's width I.
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        down_std: float = 0.02,
        shards: int = 1,
    ):
        width, hidden = config.moe_intermediate_size // shards, config.hidden_size

        def weights(std: float, *shape: int) -> nnx.Param:
            values = std * jax.random.normal(rngs.params(), (config.num_experts, *shape), jnp.float32)
            return nnx.Param(values.astype(dtype))

        self.gate_up_proj = weights(0.02, 2 * width, hidden)
        self.down_proj = weights(down_std, hidden, width)

    def __call__(
        self, x: Float[Array, "n D"], chosen: Int[Array, "n k"], weights: Float[Array, "n k"]
    ) -> Float[Array, "n D"]:
        """Σ over the chosen experts of weight · expert(x); on a mesh this device's part of that sum."""
        rows, k = chosen.shape
        gate_up, down = self.gate_up_proj[...], self.down_proj[...]
        tiles = tile_pairs(chosen, gate_up.shape[0])
        padded = jnp.concatenate([x, jnp.zeros_like(x[:1])])
        precision = matmul_precision(x.dtype)

        def product(values: Array, table: Array, expert: Array) -> Array:
            own = jax.lax.dynamic_index_in_dim(table, expert, keepdims=False)
            return jnp.matmul(values, own.T, precision=precision)

        def run(tile: Array, out: Array) -> Array:
            expert, pairs = tiles.expert[tile], tiles.pairs[tile]
            # The pair that does not exist reads the row of zeros.
            gate, up = jnp.split(product(padded[pairs // k], gate_up, expert), 2, axis=-1)
            return out.at[pairs].set(product(jax.nn.silu(gate) * up, down, expert))

        out = jax.lax.fori_loop(0, tiles.count, run, jnp.zeros((rows * k + 1, x.shape[1]), x.dtype))
        out = out[: rows * k].reshape(rows, k, -1).astype(jnp.float32)
        return jnp.sum(out * weights[..., None], axis=1).astype(x.dtype)


@struct.dataclass
class Tiles:
    """Pairs of a row and an expert, numbered row by row, in tiles of one expert each.

    Attributes:
      expert: of each tile. pairs: T pairs a tile; where an expert has fewer, n·k, which is no pair.
      count: how many tiles there are; the rest is padding.
    """

    expert: Int[Array, " t"]
    pairs: Int[Array, "t T"]
    count: Int[Array, ""]


def tile_pairs(chosen: Int[Array, "n k"], experts: int) -> Tiles:
    """Sorts pairs by expert and cuts each expert's into tiles of up to twice the rows that an expert has on average."""
    flat = chosen.reshape(-1)
    total = flat.size
    size = min(max(1 << (2 * total // experts).bit_length() >> 1, 1), 64)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=experts)
    own_tiles = -(-counts // size)
    ends = jnp.cumsum(own_tiles)
    place = jnp.arange(total) - (jnp.cumsum(counts) - counts)[flat[order]]
    tile = (ends - own_tiles)[flat[order]] + place // size
    most = total // size + min(experts, total)
    pairs = jnp.full((most, size), total, jnp.int32).at[tile, place % size].set(order.astype(jnp.int32))
    expert = jnp.searchsorted(ends, jnp.arange(most), side="right")
    return Tiles(jnp.minimum(expert, experts - 1).astype(jnp.int32), pairs, ends[-1].astype(jnp.int32))


class SparseMoE(nnx.Module):
    """Router, experts and the shared expert; parameter names are Hugging Face's `mlp.*`."""

    def __init__(
        self,
        config: TargetConfig,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        down_std: float = 0.02,
        shards: int = 1,
    ):
        hidden = config.hidden_size
        self.top_k, self.shards = config.num_experts_per_tok, shards
        self.gate = Linear(hidden, config.num_experts, dtype=dtype, rngs=rngs)
        self.experts = Experts(config, dtype=dtype, rngs=rngs, down_std=down_std, shards=shards)
        self.shared_expert = SwiGLU(
            hidden, config.shared_expert_intermediate_size, dtype=dtype, rngs=rngs, down_std=down_std, shards=shards
        )
        self.shared_expert_gate = Linear(hidden, 1, dtype=dtype, rngs=rngs)

    def route(self, x: Float[Array, "n D"]) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
        """The experts of each row, best first (the lower number among equals), and their weights, which sum to 1."""
        logits = jnp.matmul(x.astype(jnp.float32), self.gate.weight[...].astype(jnp.float32).T, precision=FP32)
        best, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        return chosen, best / jnp.sum(best, axis=-1, keepdims=True)

    def __call__(self, x: Float[Array, "... D"], implementation: Implementation = "xla") -> Float[Array, "... D"]:
        """Mixes the last axis."""
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(rows)
        # As transformers: weights in the activations' dtype.
        weights = weights.astype(x.dtype).astype(jnp.float32)
        routed = psum(self.experts(rows, chosen, weights), self.shards)
        share = jax.nn.sigmoid(self.shared_expert_gate(rows).astype(jnp.float32)).astype(x.dtype)
        return (routed + share * self.shared_expert(rows, implementation)).reshape(x.shape)

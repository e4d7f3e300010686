"""Tensor parallelism: one mesh axis, and one table that says how every parameter and state lies on it.

A program runs whole inside `jax.shard_map`: each device sees its own heads, its own slice of the MLPs and of the
vocabulary, and the collectives are those written here and no others. A layer sums twice (after the mixer's and after
the MLP's output projection), the embedding once, and greedy decoding never gathers the vocabulary: argmax,
log-normaliser and top-k are taken on each device's slice and then merged (Megatron-LM, arXiv 1909.08053, section 3).
Sampling and log-probabilities gather logits once a round. Everything else, the trees and all decode state without
heads, is replicated and computed alike on every device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.errors import UserError

AXIS = "tensor"
REPLICATED = PartitionSpec()
ROWS, COLUMNS = PartitionSpec(AXIS), PartitionSpec(None, AXIS)

# Parameters by the last part of their module's name (weights are [out, in], biases [out]); what is not here is
# replicated, and so is a bias that is added after the sum over columns.
_PARAMETERS: dict[str, PartitionSpec] = {
    **dict.fromkeys(("embed_tokens", "lm_head"), ROWS),  # vocabulary
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "kv_proj", "qkv_proj"), ROWS),  # heads
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj"), ROWS),  # heads
    **dict.fromkeys(("conv1d", "A_log", "dt_bias"), ROWS),  # heads
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), ROWS),  # MLP width
    **dict.fromkeys(
        ("o_proj", "out_proj", "down_proj", "fc"), COLUMNS
    ),  # what the rows above made; summed after
}

# Experts' weights, [expert, out, in], have no module of their own: each device holds a part of every expert's width.
_EXPERTS: dict[str, PartitionSpec] = {
    "gate_up_proj": PartitionSpec(None, AXIS),
    "down_proj": PartitionSpec(None, None, AXIS),
}

# Fields of the decode state that have heads: the dimension that is split.
_STATE: dict[str, int] = {"kv": 4, "draft_kv": 4, "recurrent": 2, "conv": 3}


def make_mesh(tp: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `tp` devices.

    Args:
      tp: how many.
      devices: which (described ones for a compile without a GPU); None for the first of this run.

    Raises:
      UserError: there are fewer, or some would be left over in a run of several processes, which all take part.
    """
    own = devices is None
    devices = jax.devices() if devices is None else list(devices)
    if tp < 1 or tp > len(devices):
        raise UserError(f"--tp {tp}: this run has {len(devices)} device(s) ({devices[0].device_kind})")
    if own and jax.process_count() > 1 and tp != len(devices):
        count, all_devices = jax.process_count(), len(devices)
        raise UserError(f"--tp {tp}: {count} processes have {all_devices} devices; use --tp {all_devices}")
    return Mesh(np.asarray(devices[:tp]), (AXIS,))


def check_divides(target: TargetConfig, drafter: DrafterConfig | None, tp: int) -> None:
    """Raises `UserError` naming what `tp` devices cannot share evenly."""
    counts = {
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "intermediate_size": target.intermediate_size,
        "vocab_size": target.vocab_size,
    }
    if target.num_experts:
        counts["moe_intermediate_size"] = target.moe_intermediate_size
    if target.linear_layers:
        counts["linear_num_key_heads"] = target.linear_num_key_heads
        counts["linear_num_value_heads"] = target.linear_num_value_heads
    if drafter is not None:
        counts["num_attention_heads (drafter)"] = drafter.num_heads
        counts["num_key_value_heads (drafter)"] = drafter.num_kv_heads
        counts["intermediate_size (drafter)"] = drafter.intermediate_size
    bad = [f"{name} {count}" for name, count in counts.items() if count % tp]
    if bad:
        raise UserError(f"--tp {tp} does not divide {', '.join(bad)} of this model; take a common divisor")


def parameter_spec(name: str) -> PartitionSpec:
    """How the parameter of this (dotted) name lies on the mesh."""
    parts = name.split(".")
    if parts[-2:-1] == ["experts"]:
        return _EXPERTS[parts[-1]]
    last = parts.pop() if parts[-1] in ("weight", "bias") else ""
    spec = _PARAMETERS.get(parts[-1], REPLICATED)
    return REPLICATED if last == "bias" and spec == COLUMNS else spec


def state_specs(state: Any) -> Any:
    """The pytree of partition specs of a decode state (or a cache): split where there are heads."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        if 0 in leaf.shape:  # what a model has no layers for; a compiled program calls an empty array replicated
            return REPLICATED
        name = next((str(k.name) for k in reversed(path) if hasattr(k, "name")), "")
        return PartitionSpec(*[None] * _STATE[name], AXIS) if name in _STATE else REPLICATED

    return jax.tree_util.tree_map_with_path(spec, state)


def row_order(name: str, config: TargetConfig, shards: int) -> np.ndarray | None:
    """Rows of a stored tensor (or of each expert in it) in the order of the devices that take them; None: as stored.

    `in_proj_qkv` and `conv1d` hold all queries, all keys, all values; a device needs its heads of each. An expert's
    `gate_up_proj` holds its gate, then its other half; a device needs its part of both.
    """
    if shards > 1 and name.endswith("experts.gate_up_proj"):
        parts = np.split(np.arange(2 * config.moe_intermediate_size), 2)
        return np.concatenate([np.split(part, shards)[i] for i in range(shards) for part in parts])
    if shards == 1 or not name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return None
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    parts = np.split(np.arange(2 * keys + values), [keys, 2 * keys])
    return np.concatenate([np.split(part, shards)[i] for i in range(shards) for part in parts])


def psum(x: Float[Array, "..."], shards: int) -> Float[Array, "..."]:
    """The sum over devices of their partial products."""
    return x if shards == 1 else jax.lax.psum(x, AXIS)


def local_slice(x: Float[Array, "... D"], shards: int) -> Float[Array, "... d"]:
    """This device's part of the last axis of a replicated array."""
    if shards == 1:
        return x
    width = x.shape[-1] // shards
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * width, width, axis=-1)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Reductions over a vocabulary of which each device holds a slice (`shards` = 1: all of it).

    Attributes:
      shards: devices that share it, in order.
    """

    shards: int = 1

    def start(self, width: int) -> Int[Array, ""] | int:
        """The id of this device's first token, given how many it holds."""
        return 0 if self.shards == 1 else jax.lax.axis_index(AXIS) * width

    def max(self, x: Float[Array, "... v"]) -> Float[Array, "..."]:
        """The largest entry over all tokens."""
        best = jnp.max(x, axis=-1)
        return best if self.shards == 1 else jax.lax.pmax(best, AXIS)

    def sum(self, x: Float[Array, "... v"]) -> Float[Array, "..."]:
        """The sum over all tokens."""
        return psum(jnp.sum(x, axis=-1), self.shards)

    def gather(self, x: Float[Array, "... v"]) -> Float[Array, "... V"]:
        """The entries of all tokens, on every device."""
        return x if self.shards == 1 else jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)

    def argmax(self, x: Float[Array, "... v"]) -> Int[Array, "..."]:
        """The token of the largest entry; the smallest id among equals."""
        token = jnp.argmax(x, axis=-1).astype(jnp.int32)
        if self.shards == 1:
            return token
        token = token + self.start(x.shape[-1])
        # One exchange of a pair a row. Devices are in the order of their ids, so the first maximum is the smallest.
        best = jax.lax.bitcast_convert_type(jnp.max(x, axis=-1), jnp.int32)
        best, token = jax.lax.all_gather(jnp.stack([best, token]), AXIS, axis=1)
        first = jnp.argmax(jax.lax.bitcast_convert_type(best, jnp.float32), axis=0)[None]
        return jnp.take_along_axis(token, first, axis=0)[0]

    def log_normaliser(self, logits: Float[Array, "... v"]) -> Float[Array, "..."]:
        """log Σ exp over all tokens."""
        peak = self.max(logits)
        return peak + jnp.log(self.sum(jnp.exp(logits - peak[..., None])))

    def merge_log_normaliser(self, own: Float[Array, "..."]) -> Float[Array, "..."]:
        """`log_normaliser` of all devices' tokens from that of each one's."""
        return own if self.shards == 1 else self.log_normaliser(own[..., None])

    def top_k(self, x: Float[Array, "... v"], k: int) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
        """The k largest entries, best first, and their tokens; equal ones in the order of their ids."""
        if k == 1 and self.shards == 1:
            return jnp.max(x, axis=-1, keepdims=True), self.argmax(x)[..., None]
        values, tokens = top_k_in_two_stages(x, min(k, x.shape[-1]))
        return self.merge_top_k(values, tokens, x.shape[-1], k)

    def merge_top_k(
        self, values: Float[Array, "... c"], tokens: Int[Array, "... c"], width: int, k: int
    ) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
        """`top_k` of all devices' tokens from that of each one's `width`."""
        if self.shards == 1:
            return values, tokens
        tokens = tokens + self.start(width)
        pairs = jnp.stack([jax.lax.bitcast_convert_type(values, jnp.int32), tokens])
        bits, tokens = jax.lax.all_gather(pairs, AXIS, axis=pairs.ndim - 1, tiled=True)
        values, place = jax.lax.top_k(jax.lax.bitcast_convert_type(bits, jnp.float32), k)
        return values, jnp.take_along_axis(tokens, place, axis=-1)


# Columns of a chunk of the first stage; below a few chunks for each wanted entry there is nothing to gain.
_CHUNK = 128
_MIN_CHUNKS = 4


def top_k_in_two_stages(
    x: Float[Array, "... v"], k: int
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """Exact `jax.lax.top_k` of a long axis: the k chunks with the largest maxima hold all of the k largest entries.

    One pass over the input and two sorts of a few thousand numbers, where a sort of a whole vocabulary would cost more
    than the pass that made it.
    """
    width = x.shape[-1]
    chunks = width // _CHUNK
    if width % _CHUNK or chunks < _MIN_CHUNKS * k:
        values, place = jax.lax.top_k(x, k)
        return values, place.astype(jnp.int32)
    pieces = x.reshape(*x.shape[:-1], chunks, _CHUNK)
    # A NaN counts as largest, as in `top_k`.
    _, best = jax.lax.top_k(jnp.max(pieces, axis=-1), k)
    best = jnp.sort(best, axis=-1)  # in the order of ids, so that ties are broken as in one sort
    kept = jnp.take_along_axis(pieces, best[..., None], axis=-2)
    values, place = jax.lax.top_k(kept.reshape(*x.shape[:-1], k * _CHUNK), k)
    chunk = jnp.take_along_axis(best, place // _CHUNK, axis=-1)
    return values, (chunk * _CHUNK + place % _CHUNK).astype(jnp.int32)


def parameter_specs(state: Any) -> Any:
    """The pytree of partition specs of a module's state."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        del leaf
        return parameter_spec(".".join(str(k.key) for k in path if hasattr(k, "key")))

    return jax.tree_util.tree_map_with_path(spec, state)


def shard_program(
    function: Callable[..., Any], mesh: Mesh | None, arguments: tuple[Any, ...], results: Any
) -> Callable[..., Any]:
    """`function` as each device of the mesh runs it on its part; without a mesh, as it is.

    Args:
      arguments: partition specs of its arguments (a spec may stand for a whole pytree).
      results: those of its results.
    """
    if mesh is None:
        return function
    # Results said to be replicated are: they come from replicated values and complete sums.
    return jax.shard_map(function, mesh=mesh, in_specs=arguments, out_specs=results, check_vma=False)


def named(mesh: Mesh, specs: Any) -> Any:
    """The shardings of a pytree of partition specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

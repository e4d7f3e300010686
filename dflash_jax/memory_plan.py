"""Device memory before it is taken: weights, caches and workspace of each device, from the configs alone."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import Drafter
from dflash_jax.errors import UserError
from dflash_jax.mtp import MTP
from dflash_jax.request import SamplingParams
from dflash_jax.round import init_state
from dflash_jax.sharding import state_specs
from dflash_jax.target import Target

# Context capacity doubles from here, so that requests of similar length share their compiled programs.
SMALLEST_CONTEXT = 512
GB = 1e9


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def context_capacity(tokens: int, page_size: int) -> int:
    """Tokens that a slot's pages hold where its longest request has `tokens`."""
    capacity = max(SMALLEST_CONTEXT, power_of_two(tokens))
    return -(-capacity // page_size) * page_size


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device.

    Attributes:
      devices: that share the model.
      weights: model -> bytes of its parameters.
      slots, tokens: requests decoded at once, and the capacity of each.
      caches: what decoding keeps for all slots, part -> bytes.
      workspace: estimate of what a pass needs while it runs.
      limit: what there is; None where nobody knows (a CPU).
    """

    devices: int
    weights: dict[str, int]
    slots: int
    tokens: int
    caches: dict[str, int]
    workspace: int
    limit: int | None

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.weights.values()) + sum(self.caches.values()) + self.workspace

    @property
    def fits(self) -> bool:
        """Whether there is that much."""
        return self.limit is None or self.total <= self.limit

    def __str__(self) -> str:
        rows = [(f"{name} weights", size) for name, size in self.weights.items()]
        rows += list(self.caches.items())
        rows += [("workspace (estimate)", self.workspace), ("total", self.total)]
        where = "a device" if self.devices == 1 else f"each of {self.devices} devices"
        title = f"memory of {where}, {self.slots} slot(s) of {self.tokens:,} tokens"
        if self.limit is not None:
            rows.append(("available", self.limit))
        unit, scale = ("GB", GB) if self.total >= GB else ("MB", GB / 1000)
        return "\n".join([title, *(f"  {name:22s}{size / scale:8.2f} {unit}" for name, size in rows)])

    def arithmetic(self) -> str:
        """The sum on one line."""
        parts = [f"{name} {size / GB:.2f}" for name, size in self.weights.items()]
        parts.append(
            f"caches of {self.slots} slot(s) of {self.tokens:,} tokens {sum(self.caches.values()) / GB:.2f}"
        )
        parts.append(f"workspace {self.workspace / GB:.2f}")
        total = f"{' + '.join(parts)} = {self.total / GB:.2f} GB a device"
        return total if self.limit is None else f"{total}, of which {self.limit / GB:.2f} GB are there"


@dataclasses.dataclass(frozen=True)
class MemoryPlanner:
    """Plans for one pair of models.

    Attributes:
      target, drafter: configs; None for no drafter.
      dtype: of weights and activations, by name.
      shards: devices that share the models.
      limit: bytes that one device has for them, None for no limit.
      mtp: whether the target comes with its own draft head.
      page_size: tokens a page.
      chunk: prompt tokens of one prefill pass.
      budget: nodes of the trees to be verified, besides the anchor.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    dtype: str
    shards: int = 1
    limit: int | None = None
    mtp: bool = False
    page_size: int = 64
    chunk: int = 512
    budget: int = 63

    @functools.cached_property
    def weights(self) -> dict[str, int]:
        """Model -> bytes of the parameters on one device."""
        dtype = jnp.dtype(self.dtype)
        target = nnx.eval_shape(
            lambda: Target(self.target, dtype=dtype, rngs=nnx.Rngs(0), shards=self.shards)
        )
        found = {"target": _parameter_bytes(target)}
        if self.drafter is not None:
            config = self.drafter
            drafter = nnx.eval_shape(
                lambda: Drafter(config, dtype=dtype, rngs=nnx.Rngs(0), shards=self.shards)
            )
            found["drafter"] = _parameter_bytes(drafter)
        if self.mtp:
            head = nnx.eval_shape(lambda: MTP(self.target, dtype=dtype, rngs=nnx.Rngs(0), shards=self.shards))
            found["MTP head"] = _parameter_bytes(head)
        return found

    def caches(self, slots: int, tokens: int, pages: int | None = None) -> dict[str, int]:
        """Part of the decode state -> its bytes on one device, `slots` slots of `tokens` tokens (whole pages).

        They share `pages` pages; None for as many as all of them can use.

        One state is kept at a time; a drafter's is larger than that of the target's own head.
        """
        steps = SamplingParams().mtp_steps if self.mtp and self.drafter is None else 0
        state = jax.eval_shape(
            lambda: init_state(
                self.target,
                self.drafter,
                slots=slots,
                capacity=tokens,
                page_size=self.page_size,
                dtype=jnp.dtype(self.dtype),
                mtp_steps=steps,
                pages=pages,
            )
        )
        specs = state_specs(state)

        def size(part: str) -> int:
            leaf = getattr(state.cache, part, None)
            return 0 if leaf is None else _bytes_here(leaf, getattr(specs.cache, part), self.shards)

        named = {"attention pages": size("kv"), "recurrent states": size("recurrent") + size("conv")}
        if self.drafter is not None or steps:
            named["draft pages"] = size("draft_kv")
        leaves = zip(
            jax.tree.leaves(state),
            jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)),
            strict=True,
        )
        everything = sum(_bytes_here(leaf, spec, self.shards) for leaf, spec in leaves)
        named["taps, tables"] = everything - sum(named.values())
        return named

    def workspace(self, slots: int) -> int:
        """An estimate of the temporary bytes of the larger of a prefill chunk and a round on one device.

        Rows leave what they would add to the caches for every layer, once as each layer makes it and once stacked; one
        layer's activations live beside that; and a round has fp32 logits of every row, twice while they are reduced. A
        round of some of the slots, of half of them at most, works on a copy of their states.
        """
        c, item = self.target, jnp.dtype(self.dtype).itemsize
        kv = len(c.attention_layers) * 2 * c.num_kv_heads * c.head_dim * item
        values = c.linear_num_value_heads * c.linear_value_head_dim
        keys = c.linear_num_key_heads * c.linear_key_head_dim
        conv = len(c.linear_layers) * c.conv_channels * item
        log = len(c.linear_layers) * (values + keys) * 4
        wide = max(2 * c.intermediate_size, 2 * c.num_heads * c.head_dim, c.conv_channels + values) * (
            item + 4
        )
        taps = 0 if self.drafter is None else len(self.drafter.target_layer_ids) * c.hidden_size * item
        replicated = 4 * c.hidden_size * (item + 4) + 2 * taps
        state = len(c.linear_layers) * values * c.linear_key_head_dim * 4
        prefill = (
            self.chunk * ((2 * (kv + conv) + wide) // self.shards + replicated) + 2 * state // self.shards
        )
        rows = self.budget + 1 if self.drafter is not None else 1 + self.mtp * SamplingParams().mtp_steps
        logits = 2 * 4 * c.vocab_size
        decode = rows * ((2 * (kv + conv + log) + wide + logits) // self.shards + replicated)
        return max(prefill, slots * decode, slots // 2 * (decode + state // self.shards))

    def plan(self, slots: int, tokens: int, pages: int | None = None) -> MemoryPlan:
        """What `slots` slots need, each with the capacity for a request of `tokens` tokens; `pages` as of `caches`."""
        return _plan(self, slots, context_capacity(tokens, self.page_size), pages)

    def fit(self, slots: int, tokens: int, pages: int | None = None) -> MemoryPlan:
        """The plan with as many of the slots (a power of two, as the engine makes them) as there is memory for.

        Raises:
          UserError: there is not enough for one; the line has the sum.
        """
        slots = power_of_two(slots)
        while not (plan := self.plan(slots, tokens, pages)).fits:
            if slots == 1:
                raise UserError(
                    f"not enough device memory: {plan.arithmetic()}; use a shorter --max-model-len, "
                    "more devices (--tp) or a smaller --dtype"
                )
            slots //= 2
        return plan

    def longest(self, tokens: int) -> int:
        """The longest request, up to `tokens`, for which there is memory in one slot; `UserError` where none is."""
        while tokens > SMALLEST_CONTEXT and not self.plan(1, tokens).fits:
            tokens = power_of_two(tokens) // 2
        self.fit(1, tokens)
        return tokens


@functools.cache  # an engine asks before every call
def _plan(planner: MemoryPlanner, slots: int, tokens: int, pages: int | None) -> MemoryPlan:
    caches, workspace = planner.caches(slots, tokens, pages), planner.workspace(slots)
    return MemoryPlan(planner.shards, planner.weights, slots, tokens, caches, workspace, planner.limit)


def _parameter_bytes(module: nnx.Module) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(module)))


def _bytes_here(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, shards: int) -> int:
    whole = int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize
    return whole // shards if any(axis is not None for axis in spec) else whole


def device_limit(devices: Sequence[jax.Device]) -> int | None:
    """Free bytes of the fullest of these devices as its allocator counts them, the same in every process of a run.

    None where an allocator has no limit (a CPU).
    """
    free = []
    for device in devices:
        if device.process_index == jax.process_index():
            stats = device.memory_stats() or {}
            if "bytes_limit" in stats:
                free.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    least = min(free, default=-1)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        # Megabytes: without 64-bit types an array cannot hold more. All must agree, or their programs would differ.
        everywhere = multihost_utils.process_allgather(np.asarray(least // 10**6, np.int32))
        least = int(everywhere.min()) * 10**6
    return None if least < 0 else least

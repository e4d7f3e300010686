"""What `benchmarks.kernels` times: every op at named real shapes, with its operands and its floors.

A floor is the least that any kernel must do. Bytes: every operand that is used read once, every result written once,
nothing in between. Flops: two a multiply-add, counted in passes of the bf16 matrix units (`Passes`), so that the
measured bf16 throughput is the measure of all of them. B slots are 1 throughout; b is the bytes of a model number.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.tree import ancestor_index
from pallas_kernels import gdn_mixer, gdn_scan
from pallas_kernels.ancestry import packed, paths_of
from pallas_kernels.dispatch import target_device
from pallas_kernels.gdn_mixer import kernel as mixer_kernel
from pallas_kernels.gdn_mixer import reference as mixer_reference
from pallas_kernels.gdn_mixer.configs import Config as MixerConfig
from pallas_kernels.gdn_mixer.configs import front_config
from pallas_kernels.gdn_scan import chunk_kernel, commit_kernel, step_kernel, tree_kernel
from pallas_kernels.gdn_scan.configs import ChunkConfig, CommitConfig, StepConfig, TreeConfig
from pallas_kernels.gdn_scan.shapes import (
    CONV_WIDTH,
    MODELS,
    NORM_EPS,
    PATH_LENGTH,
    PREFILL_ROWS,
    TIMED_ROWS,
    Heads,
)
from pallas_kernels.tree_attention import kernel as attention_kernel
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.configs import Config as AttentionConfig
from pallas_kernels.tree_attention.shapes import SHAPES, TIMED_LENGTHS, Shape

Operands = tuple[Any, ...]
# Layers are rotated until their data is three times an H200's L2 of 50 MB.
ROTATED_BYTES = 150e6
ACCEPTED = 8  # rows of a committed path
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Passes:
    """bf16 products that stand for one product: of two model operands, of a model's and an fp32 one, of two fp32 ones.

    See `gdn_scan.dots`: bf16x2 for models in bf16, bf16x3 for those in fp32.
    """

    model: int
    mixed: int
    full: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
      op: public name of the op.
      name: op/shape[/context].
      build: random key -> operands; is compiled.
      call: (operands, layer, implementation, config) -> results; config None takes the op's own.
      chain: (result, operand) pairs: a loop's next call gets that result as that operand. This is what orders the calls
        and keeps a compiler from moving them out of the loop, and it costs nothing.
      nudged: operands that get 0·result added where XLA could still move work that does not depend on the chain.
      pallas_nudged: the same for Pallas calls: one small array, where one launch of two stands outside the chain.
      layers: how many distinct layers the calls go round.
      moved, flops: the floors, see the module's text.
      divide: calls of the op in one `call`.
      xla: whether the XLA reference is timed.
      configs: alternatives for --sweep.
      counterpart: what PyTorch is given, see `benchmarks.torch_counterparts`; None where there is none.
    """

    op: str
    name: str
    build: Callable[[jax.Array], Operands]
    call: Callable[[Operands, Any, Any, Any], Operands]
    chain: tuple[tuple[int, int], ...]
    nudged: tuple[int, ...]
    moved: float
    flops: float
    layers: int = 1
    pallas_nudged: tuple[int, ...] = ()
    divide: int = 1
    xla: bool = True
    configs: tuple[Any, ...] = ()
    counterpart: tuple[Any, ...] | None = None

    @property
    def calls(self) -> int:
        """Pallas calls a trip: all layers, and enough of them that the loop's own cost is small beside them."""
        rounds = 1 if self.moved > 1e8 or self.flops > 1e11 or self.divide > 1 else -(-24 // self.layers)
        return self.layers * rounds


def random_tree(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Parents [1, N] and ancestor-or-self mask [1, N, N] of a random tree in topological order."""
    rng = np.random.default_rng(seed)
    parents = np.array([-1] + [int(rng.integers(max(0, i - 12), i)) for i in range(1, rows)], np.int32)
    mask = np.eye(rows, dtype=bool)
    for i in range(1, rows):
        mask[i] |= mask[parents[i]]
    return parents[None], mask[None]


def _fill(key: jax.Array, struct: jax.ShapeDtypeStruct, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(key, struct.shape, struct.dtype)).astype(struct.dtype)


def attention_case(name: str, shape: Shape, length: int, dtype: Any, layers: int | None = None) -> Case:
    """Tree attention after `length` tokens in shuffled pages; of `layers` layers, or so many that no cache holds them.

    Bytes: keys and values of the tokens seen and of the rows, 2·(min(L, window) + N)·K·d·b; queries and results,
    2·N·H·d·b. Flops: 4·H·d a pair of a row and what it sees; all N² pairs of a tree, half of causal rows.
    """
    shape = dataclasses.replace(shape, context=max(2048, length))
    seen = min(length, shape.window or length)
    width = jnp.dtype(dtype).itemsize
    token = 2 * shape.kv_heads * shape.head_dim * width
    layers = layers or int(min(48, max(2, -(-ROTATED_BYTES // (seen * token)))))
    _, ancestors = random_tree(shape.rows)
    rows = shape.rows
    pairs = seen * rows + (rows * (rows + 1) // 2 if shape.causal else rows * rows)

    def build(key: jax.Array) -> Operands:
        q, kv, _, pages, _, tables, _, _ = shape.arguments(dtype, layers)
        keys = jax.random.split(key, 4)
        return (
            _fill(keys[0], q), _fill(keys[1], kv), None if shape.causal else jnp.asarray(ancestors),
            _fill(keys[2], pages), jax.random.permutation(keys[3], tables.size).reshape(tables.shape),
            jnp.full((1,), length, jnp.int32),
            None if shape.window is None else length + jnp.arange(rows)[None],
        )  # fmt: skip

    def call(operands: Operands, layer: Any, implementation: Any, config: Any) -> Operands:
        q, kv, mask, pages, tables, lengths, positions = operands
        options: dict[str, Any] = {"scale": shape.head_dim**-0.5, "window": shape.window, "positions": positions}
        if config is None:
            call, options["implementation"] = tree_attention, implementation
        else:
            call, options["config"] = attention_kernel.tree_attention, config
        return (call(q, kv, mask, pages, layer, tables, lengths, **options),)

    tiles = {64: 4, 128: 8} if shape.query_rows > 64 else {16: 4, 32: 4, 64: 4}
    configs = tuple(
        AttentionConfig(tile, keys, programs, 2, warps, stages)
        for tile, warps in tiles.items()
        for keys, stages in ((64, 2), (32, 3), (64, 3))
        for programs in (132, 264)
    )
    return Case(
        op="tree_attention", name=f"tree_attention/{name}/{length}", build=build, call=call, chain=((0, 0),),
        nudged=(), layers=layers, moved=(seen + rows) * token + 2 * rows * shape.heads * shape.head_dim * width,
        flops=4 * shape.heads * shape.head_dim * pairs * (1 if width == 2 else 6), configs=configs,
        counterpart=("attention", shape, seen, layers),
    )  # fmt: skip


class Layer:
    """The cases of one model's Gated DeltaNet layers."""

    def __init__(self, name: str, heads: Heads, dtype: Any):
        self.name, self.heads, self.dtype = name, heads, dtype
        self.width = jnp.dtype(dtype).itemsize
        self.passes = Passes(1, 2, 3) if self.width == 2 else Passes(6, 6, 6)
        self.state_bytes = heads.value_heads * heads.dim**2 * 4

    def _rows(self, key: jax.Array, rows: int) -> Operands:
        """q, k, v, beta, g; unit keys and queries; decays so mild that path sums can stand in for strengths."""
        h, keys = self.heads, jax.random.split(key, 5)
        q, k = (jax.random.normal(x, (1, rows, h.key_heads, h.dim)) for x in keys[:2])
        q, k = (
            (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(self.dtype) for x in (q, k)
        )
        v = jax.random.normal(keys[2], (1, rows, h.value_heads, h.dim), self.dtype)
        gates = [jax.random.normal(x, (1, rows, h.value_heads)) for x in keys[3:]]
        return q, k, v, jax.nn.sigmoid(gates[0]), -0.01 * jax.nn.softplus(gates[1])

    def _states(self, key: jax.Array) -> jax.Array:
        h = self.heads
        return 0.3 * jax.random.normal(key, (h.layers, 1, h.value_heads, h.dim, h.dim))

    def _row_bytes(self, rows: int) -> int:
        """q, k and v in the model's width, beta and g in fp32."""
        h = self.heads
        return rows * ((2 * h.key_heads + h.value_heads) * h.dim * self.width + 2 * h.value_heads * 4)

    def tree(self, rows: int) -> Case:
        """`tree_delta_rule`, by paths where a round would take it so.

        Bytes: the layer's state Hv·d²·4; the rows' operands, values in fp32; mask N²; outputs and innovations
        2·N·Hv·d·4. Flops: keys and queries times state 4·N·d²·Hv (mixed); keys and queries times keys, lower halves,
        2·N²·d·Hk (model); solve and scores times innovations, lower halves, 2·N²·d·Hv (full).
        """
        h, p = self.heads, self.passes
        parents, ancestors = random_tree(rows)
        size = gdn_scan.path_rows(self.dtype, h.value_heads * h.dim, rows, PATH_LENGTH - 1)
        paths = paths_of(parents, size) if size else None

        def build(key: jax.Array) -> Operands:
            first, second = jax.random.split(key)
            q, k, v, beta, g = self._rows(first, rows)
            # Values in fp32, so that a call's innovations can be the next one's without a conversion between.
            v = v.astype(jnp.float32)
            total = jnp.einsum("bij,bjh->bih", jnp.asarray(ancestors, jnp.float32), g)
            return q, k, v, beta, total, self._states(second), jnp.asarray(ancestors)

        def call(operands: Operands, layer: Any, implementation: Any, config: Any) -> Operands:
            q, k, v, beta, total, states, mask = operands
            if config is None:
                ways = None if paths is None else jnp.asarray(paths)
                return gdn_scan.tree_delta_rule(
                    q, k, v, beta, total, states, mask, layer=layer, paths=ways, implementation=implementation
                )
            place = jnp.array([layer], jnp.int32)
            if rows == 1:
                return step_kernel.step_delta_rule(q, k, v, beta, total, states, place, config=config)
            mask = packed(mask)
            return tree_kernel.tree_delta_rule(q, k, v, beta, total, states, place, mask, config=config)

        dot = "bf16x2" if self.width == 2 else "bf16x3"
        padded = tree_kernel.padded(rows)
        configs = tuple(
            TreeConfig(tile, dv, dk, dot, warps, stages, two)
            for tile in (16, 32) if tile <= padded
            for dv, dk, warps, stages in (
                (32, 32, 4, 4), (32, 64, 4, 3), (64, 32, 4, 4), (64, 32, 8, 4), (16, 32, 4, 4),
            )
            for two in ((False, True) if padded > 16 else (False,))
        )  # fmt: skip
        if rows == 1:
            configs = tuple(StepConfig(dv, warps) for dv in (16, 32, 64, 128) for warps in (1, 2, 4, 8))
        results = rows * h.value_heads * 2 * h.dim * 4
        operands = self._row_bytes(rows) + rows * h.value_heads * h.dim * (4 - self.width)
        flops = (
            4 * rows * h.dim**2 * h.value_heads * p.mixed
            + 2 * rows**2 * h.dim * (h.key_heads * p.model + h.value_heads * p.full)
        )  # fmt: skip
        # Innovations are the next values.
        return Case(
            op="tree_delta_rule", name=f"tree_delta_rule/{self.name}/{rows}", build=build, call=call,
            chain=((1, 2),), nudged=(0, 1, 4),
            layers=h.layers, moved=self.state_bytes + operands + rows**2 + results, flops=flops,
            configs=configs,
            counterpart=("tree", h, rows, ancestors),
        )  # fmt: skip

    def chunk(self, rows: int) -> Case:
        """`chunk_delta_rule`.

        Bytes: the rows' operands, outputs N·Hv·d·4, one state in and out 2·Hv·d²·4. Flops, chunks of C = 64 rows:
        three products with the state 6·N·d²·Hv (mixed); keys and queries times keys, lower halves, 2·N·C·d·Hk (model);
        inverse and scores times rows, lower halves, 2·N·C·d·Hv (full).
        """
        h, p = self.heads, self.passes

        def build(key: jax.Array) -> Operands:
            first, second = jax.random.split(key)
            return (*self._rows(first, rows), self._states(second)[0])

        def call(operands: Operands, layer: Any, implementation: Any, config: Any) -> Operands:
            if config is None:
                out, state = gdn_scan.chunk_delta_rule(*operands, implementation=implementation)
            else:
                out, state = chunk_kernel.chunk_delta_rule(*operands, config=config)
            return state, out

        dot = "bf16x2" if self.width == 2 else "bf16x3"
        configs = tuple(
            ChunkConfig(size, dv, dk, dot, warps, stages)
            for size in (32, 64)
            for dv, dk, warps, stages in (
                (32, 64, 4, 2), (16, 64, 4, 2), (32, 64, 8, 2), (32, 64, 4, 1), (32, 32, 4, 2),
            )
        )  # fmt: skip
        flops = rows * h.dim * (
            (6 * h.dim * p.mixed + 2 * CHUNK * p.full) * h.value_heads + 2 * CHUNK * h.key_heads * p.model
        )  # fmt: skip
        moved = self._row_bytes(rows) + rows * h.value_heads * h.dim * 4 + 2 * self.state_bytes
        return Case(
            op="chunk_delta_rule", name=f"chunk_delta_rule/{self.name}/{rows}", build=build, call=call,
            chain=((0, 5),), nudged=(0, 1, 2, 3, 4), pallas_nudged=(4,), moved=moved, flops=flops, configs=configs,
            counterpart=("chunk", h, rows, CHUNK),
        )  # fmt: skip

    def commit(self, rows: int) -> Case:
        """`commit_path` of all layers; the time is a layer's share.

        Bytes: the state in and out 2·Hv·d²·4, the path's keys and innovations. Flops: 2·path·d²·Hv (mixed).
        """
        h = self.heads

        def build(key: jax.Array) -> Operands:
            keys = jax.random.split(key, 4)
            lead = (h.layers, 1, rows)
            return (
                self._states(keys[0]),
                0.1 * jax.random.normal(keys[1], (*lead, h.key_heads, h.dim), self.dtype),
                0.1 * jax.random.normal(keys[2], (*lead, h.value_heads, h.dim)),
                -jnp.abs(jax.random.normal(keys[3], (*lead, h.value_heads))),
                jnp.arange(PATH_LENGTH, dtype=jnp.int32)[None],
                jnp.full((1,), ACCEPTED, jnp.int32),
            )

        def call(operands: Operands, layer: Any, implementation: Any, config: Any) -> Operands:
            if config is None:
                return (gdn_scan.commit_path(*operands, implementation=implementation),)
            return (commit_kernel.commit_path(*operands, config=config),)

        path = ACCEPTED * h.dim * (h.key_heads * self.width + h.value_heads * 4)
        configs = tuple(
            CommitConfig(dv, "bf16x3", warps) for dv in (16, 32, 64, 128) for warps in (2, 4, 8)
        )
        return Case(
            op="commit_path", name=f"commit_path/{self.name}/{rows}", build=build, call=call, chain=((0, 0),),
            nudged=(1, 2, 3), moved=2 * self.state_bytes + path, divide=h.layers,
            flops=2 * ACCEPTED * h.dim**2 * h.value_heads * self.passes.mixed, configs=configs,
        )  # fmt: skip

    def _front_operands(self, key: jax.Array, rows: int, causal: bool) -> Operands:
        h, keys = self.heads, jax.random.split(key, 5)
        parents, ancestors = random_tree(rows)
        # Strengths in fp32, so that a call's strengths can be the next one's without a conversion between.
        return (
            jax.random.normal(keys[0], (1, rows, h.channels), self.dtype),
            jax.random.normal(keys[1], (1, CONV_WIDTH - 1, h.channels), self.dtype),
            None if causal else ancestor_index(jnp.asarray(parents), CONV_WIDTH - 1),
            jax.random.normal(keys[2], (h.channels, 1, CONV_WIDTH), self.dtype),
            jax.random.normal(keys[3], (1, rows, h.value_heads)),
            jax.random.normal(keys[4], (1, rows, h.value_heads), self.dtype),
            jnp.zeros((h.value_heads,)), jnp.zeros((h.value_heads,)), jnp.ones((1, rows), bool),
            None if causal or rows == 1 else jnp.asarray(ancestors),
        )  # fmt: skip

    def front(self, rows: int, *, causal: bool) -> Case:
        """`gdn_front`. Bytes: channels in and out 2·N·C·b, window and weights 7·C·b, gates. No matrix products."""
        h = self.heads
        options = {"key_heads": h.key_heads, "key_dim": h.dim}

        def call(operands: Operands, layer: Any, implementation: Any, config: Any) -> Operands:
            inputs, window, *others, mask = operands
            if implementation == "xla":
                return mixer_reference.gdn_front(inputs, window, *others, ancestors=mask, **options)
            launch = config or front_config(target_device().device_kind, rows)
            first, mask = jnp.zeros((1,), jnp.int32), None if mask is None else packed(mask)
            return mixer_kernel.gdn_front(
                first, inputs, window[None], *others, ancestors=mask, **options, config=launch
            )

        gates = rows * h.value_heads * (4 + self.width + 8)
        return Case(
            op="gdn_front", name=f"gdn_front/{self.name}/{rows}",
            build=lambda key: self._front_operands(key, rows, causal), call=call, chain=((3, 4),), nudged=(0, 5),
            moved=(2 * rows + 2 * CONV_WIDTH - 1) * h.channels * self.width + gates, flops=0,
            configs=tuple(MixerConfig(*c) for c in ((2, 1), (4, 2), (4, 4), (8, 2), (8, 4), (16, 4), (32, 4), (32, 8))),
        )  # fmt: skip

    def norm(self, rows: int) -> Case:
        """`gated_norm`. Bytes: x in fp32, z and the result, N·Hv·d·(4 + 2·b). No matrix products."""
        h = self.heads
        shape = (1, rows, h.value_heads, h.dim)

        def build(key: jax.Array) -> Operands:
            x, z = jax.random.split(key)
            gates = jax.random.normal(z, (1, rows, h.value_heads * h.dim), self.dtype)
            return jax.random.normal(x, shape), gates, jnp.ones((h.dim,))

        def call(operands: Operands, layer: Any, implementation: Any, config: Any) -> Operands:
            if config is None:
                normed = gdn_mixer.gated_norm(*operands, eps=NORM_EPS, implementation=implementation)
            else:
                normed = mixer_kernel.gated_norm(*operands, eps=NORM_EPS, config=config)
            return (normed.reshape(operands[1].shape),)

        return Case(
            op="gated_norm", name=f"gated_norm/{self.name}/{rows}", build=build, call=call, chain=((0, 1),),
            nudged=(0,), moved=rows * h.value_heads * h.dim * (4 + 2 * self.width), flops=0,
            configs=tuple(MixerConfig(*c) for c in ((1, 1), (2, 1), (4, 2), (8, 4), (16, 4), (32, 4), (32, 8))),
        )  # fmt: skip

    def sequence(self, rows: int) -> Case:
        """All of a layer that is not a product with weights: front, tree rule and norm of every layer, then the commit.

        One program, as in a round; the time is a layer's share. Floors: the sums of the parts'.
        """
        h = self.heads
        front, tree = self.front(rows, causal=False), self.tree(rows)
        norm, commit = self.norm(rows), self.commit(rows)
        parts = (front, tree, norm, commit)

        def build(key: jax.Array) -> Operands:
            keys = jax.random.split(key, 4)
            *_, states, mask = tree.build(keys[1])
            _, z, weight = norm.build(keys[2])
            *_, path, count = commit.build(keys[3])
            return (states, z, *front.build(keys[0]), mask, weight, path, count)

        def call(operands: Operands, layer: Any, implementation: Any, config: Any) -> Operands:
            states, z, *mixed, mask, weight, path, count = operands

            @jax.jit  # traced and lowered once for all layers
            def one(mixed: Operands, states: jax.Array, z: jax.Array, layer: Any) -> Operands:
                q, k, v, beta, total = front.call(mixed, layer, implementation, None)
                out, u = tree.call((q, k, v, beta, total, states, mask), layer, implementation, None)
                return norm.call((out, z, weight), layer, implementation, None)[0], beta, k, u, total

            kept = []
            for i in range(h.layers):
                # Strengths of the layer before: no front is the one before it, which XLA would make once for all.
                z, mixed[4], k, u, total = one(tuple(mixed), states, z, np.int32(i))
                kept.append((k, u, total))
            stacked = [jnp.stack(x) for x in zip(*kept, strict=True)]
            (states,) = commit.call((states, *stacked, path, count), 0, implementation, None)
            return states, z

        return Case(
            op="gdn_layer", name=f"gdn_layer/{self.name}/{rows}", build=build, call=call, chain=((0, 0), (1, 1)),
            nudged=(), divide=h.layers, xla=False,
            moved=sum(c.moved for c in parts), flops=sum(c.flops for c in parts),
        )  # fmt: skip


def cases(dtype: Any) -> Iterator[Case]:
    """All cases in a model's width, those of Qwen3.6-27B first."""
    for model, heads in MODELS.items():
        if model in TIMED_ROWS:
            layer, most = Layer(model, heads, dtype), TIMED_ROWS[model][-1]
            for rows in TIMED_ROWS[model]:
                yield layer.tree(rows)
            for rows in sorted({TIMED_ROWS[model][0], 16, most}):
                yield layer.front(rows, causal=False)
                yield layer.norm(rows)
            yield layer.commit(most)
            yield layer.sequence(most)
            longest = PREFILL_ROWS[model][-1]
            yield layer.chunk(longest)
            yield layer.front(longest, causal=True)
            yield layer.norm(longest)
    for name, lengths in TIMED_LENGTHS.items():
        for length in lengths:
            # The bundled pair's few layers stay in a GPU's cache in real use too.
            layers = 4 if name.startswith("bundled") else None
            yield attention_case(name, SHAPES[name], length, dtype, layers)



def smoke_cases(dtype: Any) -> Iterator[Case]:
    """One small case of every kernel: what a sanitizer, which slows a kernel a hundredfold, can run."""
    layer = Layer("bundled", MODELS["bundled"], dtype)
    yield layer.tree(16)
    yield layer.tree(32)
    yield layer.chunk(PREFILL_ROWS["bundled"][0])
    yield layer.commit(16)
    yield layer.front(16, causal=False)
    yield layer.front(PREFILL_ROWS["bundled"][0], causal=True)
    yield layer.norm(16)
    for name in ("bundled-64", "bundled-prefill"):
        yield attention_case(name, SHAPES[name], 100, dtype, layers=2)

"""Launch parameters of the delta rule's kernels: data, by device kind, width of the model's numbers and row count.

Every entry fits an A6000's 101,376 bytes of shared memory, so one that is good there is allowed everywhere. Models in
bf16 use `bf16x2` products, models in fp32 `bf16x3` ones: fp32's accuracy, on the matrix units. (IEEE fp32 products are
unrolled by Triton to one instruction a number: minutes of compilation and ten times the run time.)
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.gdn_scan.dots import DotMode


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Of `tree_kernel`.

    Attributes:
      tile: rows whose part of I + A is inverted at once.
      block_dv, block_dk: value dims a program; key dims a step of the pipelined sweep.
      dot: see `dots`.
      num_warps, num_stages: warps a program, depth of the sweep's pipeline.
      two_sweeps: take the queries' products in a sweep of their own, after the innovations: half the accumulators to
        hold, for a second trip to the cache for keys and state.
      ahead: read everything before the first product. For few rows of narrow heads, as it takes registers.
      narrow: key dims up to which a head's keys are a single step, with half as many value dims a program. Of wider
        heads nothing is `ahead`.
    """

    tile: int
    block_dv: int
    block_dk: int
    dot: DotMode
    num_warps: int = 4
    num_stages: int = 4
    two_sweeps: bool = False
    ahead: bool = False
    narrow: int = 0

    def fit(self, key_dim: int, value_dim: int) -> "TreeConfig":
        """The same for narrower heads."""
        if key_dim <= self.narrow:
            block_dv = max(min(self.block_dv, value_dim) // 2, 16)  # what a matrix unit takes
            return dataclasses.replace(self, block_dk=key_dim, block_dv=block_dv, num_stages=1)
        return dataclasses.replace(
            self, block_dk=min(self.block_dk, key_dim), block_dv=min(self.block_dv, value_dim), ahead=False
        )


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Of `step_kernel`. Attributes: block_dv (value dims a program), num_warps."""

    block_dv: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class CommitConfig:
    """Of `commit_kernel`. Attributes as `TreeConfig`'s."""

    block_dv: int
    dot: DotMode
    num_warps: int = 4
    num_stages: int = 1

    def fit(self, value_dim: int) -> "CommitConfig":
        """The same for narrower heads."""
        return dataclasses.replace(self, block_dv=min(self.block_dv, value_dim))


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Of `chunk_kernel`.

    Attributes:
      chunk: rows of a chunk.
      block_dv, block_dk: value dims a program of the walk; key dims a piece of its state.
      dot: see `dots`.
      num_warps, num_stages: of the walk.
      prepare_block_dk, prepare_warps: of the first launch.
    """

    chunk: int
    block_dv: int
    block_dk: int
    dot: DotMode
    num_warps: int = 4
    num_stages: int = 1
    prepare_block_dk: int = 32
    prepare_warps: int = 4

    def fit(self, key_dim: int, value_dim: int) -> "ChunkConfig":
        """The same for narrower heads."""
        return dataclasses.replace(
            self,
            block_dv=min(self.block_dv, value_dim),
            block_dk=min(self.block_dk, key_dim),
            prepare_block_dk=min(self.prepare_block_dk, key_dim),
        )


@dataclasses.dataclass(frozen=True)
class Table:
    """Configs of one device kind and width.

    Attributes:
      tree: by padded row count.
      paths: value dims, of all heads of all slots, up to which a tree of more rows than its longest path has is taken
        path by path.
      step: for one row.
    """

    tree: dict[int, TreeConfig]
    commit: CommitConfig
    chunk: ChunkConfig
    step: StepConfig = StepConfig(32, 4)
    paths: int = 0


# Where a program's products of row tiles outnumber its registers, some spill on Ampere: `pallas_kernels.aot` has the
# bytes and the reasons.
_BF16 = Table(
    tree={
        16: TreeConfig(16, 32, 32, "bf16x2"),
        32: TreeConfig(32, 32, 32, "bf16x2"),
        64: TreeConfig(32, 64, 32, "bf16x2", num_warps=8),
        128: TreeConfig(32, 64, 32, "bf16x2", num_warps=16, num_stages=2, two_sweeps=True),
    },
    # Three parts: with keys in bf16 the update is fp32-exact, and the kernel waits for memory anyway.
    commit=CommitConfig(64, "bf16x3"),
    chunk=ChunkConfig(64, 32, 64, "bf16x2", num_stages=2),
)
# Ampere's matrix instructions take both operands from registers, and then two of Hopper's choices spill: the chunk rule
# is free of it with narrower programs, the widest tree spills a quarter of the bytes a thread with half the warps.
_BF16_AMPERE = Table(
    tree=_BF16.tree | {128: dataclasses.replace(_BF16.tree[128], num_warps=8)},
    commit=_BF16.commit,
    chunk=dataclasses.replace(_BF16.chunk, block_dv=16),
)
_FP32 = Table(
    tree={
        16: TreeConfig(16, 32, 32, "bf16x3"),
        32: TreeConfig(16, 32, 32, "bf16x3", num_stages=3),
        64: TreeConfig(32, 32, 32, "bf16x3", num_warps=8, num_stages=2, two_sweeps=True),
        128: TreeConfig(32, 16, 16, "bf16x3", num_warps=8, num_stages=2, two_sweeps=True),
    },
    commit=CommitConfig(64, "bf16x3"),
    chunk=ChunkConfig(32, 16, 32, "bf16x3"),
)

# By a part of the device kind that the driver reports, then bytes a number. Any other device gets the A6000's.
A6000 = {2: _BF16_AMPERE, 4: _FP32}
# As swept on an H200 at the 27B widths, and up to 32 rows at the bundled pair's.
_HOPPER_TREE = TreeConfig(16, 64, 32, "bf16x2", narrow=64)
_BF16_HOPPER = Table(
    tree=_BF16.tree
    | {
        16: dataclasses.replace(_HOPPER_TREE, ahead=True),
        32: _HOPPER_TREE,
        64: dataclasses.replace(_HOPPER_TREE, tile=32, narrow=0, num_stages=3),
    },
    commit=_BF16.commit,
    chunk=dataclasses.replace(_BF16.chunk, num_stages=1),
    paths=512,
)
HOPPER = {2: _BF16_HOPPER, 4: _FP32}
TABLES: dict[str, dict[int, Table]] = {"RTX A6000": A6000, "A100": A6000, "H200": HOPPER, "H100": HOPPER}


def table_for(device_kind: str, dtype: jax.typing.DTypeLike) -> Table:
    """The table of a device kind, as `jax.Device.device_kind` names it, for keys of `dtype`."""
    tables = next((tables for name, tables in TABLES.items() if name in device_kind), A6000)
    return tables[jnp.dtype(dtype).itemsize]

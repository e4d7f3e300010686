"""Tile sizes and launch parameters of the tree attention kernels: data, by device kind, width and row count.

The limits behind the numbers. A program may take 101,376 bytes of shared memory on an A6000, 166,912 on an A100 and
232,448 on an H200: block_rows·d numbers for the queries and, a pipeline stage, 2·block_keys·d for keys and values. The
accumulator, block_rows·d of fp32, must fit the registers of the program's warps. More rows a program mean fewer reads
of the context; on Hopper 64 rows a warp group also turn on its wide matrix instruction.
"""

import dataclasses

import jax
import jax.numpy as jnp

# The merge loads all parts of one row at once: 64 parts of 256 fp32 numbers are what a few warps can hold.
MAX_SPLITS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """How one call is cut into programs.

    Attributes:
      block_rows: query rows (tree nodes × heads of a group) a program; a power of two, at least 16.
      block_keys: keys a step; a power of two, at least 16. Cut to the page size.
      programs: how many programs the device should be given at once; the context is split until there are so many.
      min_blocks: fewest steps worth a split of their own.
      num_warps: warps a program.
      num_stages: depth of the software pipeline of loads.
    """

    block_rows: int
    block_keys: int
    programs: int
    min_blocks: int
    num_warps: int
    num_stages: int


# One table a device: (bytes a number, head dim) -> (largest row count, config) in ascending order; the last is open.
Table = dict[tuple[int, int], tuple[tuple[int | None, Config], ...]]

A6000: Table = {
    (2, 64): (
        (16, Config(16, 64, 168, 2, 4, 3)),
        (32, Config(32, 64, 168, 2, 4, 3)),
        (None, Config(64, 64, 168, 2, 4, 2)),
    ),
    (2, 128): (
        (16, Config(16, 64, 168, 2, 4, 2)),
        (32, Config(32, 64, 168, 2, 4, 2)),
        (None, Config(64, 64, 168, 2, 4, 2)),
    ),
    # With four warps the 64-bit addresses of a large cache and the accumulator together spill.
    (2, 256): (
        (16, Config(16, 32, 168, 2, 4, 2)),
        (32, Config(32, 32, 84, 2, 8, 2)),
        (None, Config(64, 32, 84, 2, 8, 2)),
    ),
    # Three TF32 products hold both halves of every operand in registers, hence one stage and few keys. Width 256 spills
    # 16 bytes a thread in the best tiling there is; models of that width run in fp32 in tests only.
    (4, 64): ((16, Config(16, 32, 168, 2, 4, 2)), (None, Config(32, 16, 168, 2, 4, 1))),
    (4, 128): ((16, Config(16, 32, 168, 2, 4, 1)), (None, Config(32, 16, 168, 2, 4, 1))),
    (4, 256): ((None, Config(16, 16, 84, 2, 8, 1)),),
}

A100: Table = {
    (2, 64): A6000[2, 64],
    (2, 128): (
        (16, Config(16, 64, 216, 2, 4, 3)),
        (32, Config(32, 64, 216, 2, 4, 3)),
        (None, Config(64, 64, 216, 2, 4, 2)),
    ),
    (2, 256): (
        (16, Config(16, 32, 216, 2, 4, 3)),
        (32, Config(32, 32, 108, 2, 8, 3)),
        (None, Config(64, 32, 108, 2, 8, 3)),
    ),
    (4, 64): A6000[4, 64],
    (4, 128): A6000[4, 128],
    (4, 256): A6000[4, 256],
}

H200: Table = {
    (2, 64): (
        (16, Config(16, 64, 264, 2, 4, 3)),
        # Of so narrow heads two programs are done sooner than one of twice the rows, which read the context once.
        (128, Config(32, 64, 264, 2, 4, 3)),
        (None, Config(64, 64, 264, 2, 4, 2)),
    ),
    (2, 128): (
        (16, Config(16, 64, 264, 2, 4, 3)),
        (32, Config(32, 64, 264, 2, 4, 3)),
        (64, Config(64, 64, 264, 2, 4, 2)),
        (None, Config(128, 64, 132, 2, 8, 2)),
    ),
    (2, 256): (
        (16, Config(16, 32, 264, 2, 4, 3)),
        (64, Config(64, 64, 132, 2, 4, 2)),
        (None, Config(128, 64, 132, 2, 8, 2)),
    ),
    (4, 64): A6000[4, 64],
    (4, 128): A6000[4, 128],
    (4, 256): A6000[4, 256],
}

# By a part of the device kind that the driver reports. Any other device gets the table of the smallest shared memory.
TABLES: dict[str, Table] = {"RTX A6000": A6000, "A100": A100, "H200": H200, "H100": H200}


def table_for(device_kind: str) -> Table:
    """The table of a device kind as `jax.Device.device_kind` names it."""
    return next((table for name, table in TABLES.items() if name in device_kind), A6000)


def config_for(device_kind: str, dtype: jax.typing.DTypeLike, head_dim: int, rows: int) -> Config:
    """The config for `rows` query rows a key-value head.

    Raises:
      KeyError: no kernel takes this width or head dim.
    """
    buckets = table_for(device_kind)[jnp.dtype(dtype).itemsize, head_dim]
    return next(config for most, config in buckets if most is None or rows <= most)


def split_count(config: Config, *, programs: int, blocks: int) -> int:
    """Splits of the keys, given the programs of one split and a bound on the blocks of keys there may be."""
    wanted = -(-config.programs // programs)
    return max(1, min(wanted, blocks // config.min_blocks, MAX_SPLITS))

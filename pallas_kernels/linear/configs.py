"""Tile sizes and launch parameters of the product of few rows where no table has measured ones, by shape.

Nothing is read twice but x, which stays in the second-level cache, so what counts is how many bytes of weights are on
their way at once: programs a multiprocessor x stages x block_out x block_in, some 32 KB and more on an H200.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """How one call is cut into programs.

    Attributes:
      block_out: rows of the weights a program (of each half, with SwiGLU); a power of two, at least 16.
      block_in: columns of the weights a step; a power of two, at least 16. Cut to the width.
      splits: programs that share the columns of one block of rows, each leaving a partial sum.
      num_warps: warps a program.
      num_stages: depth of the software pipeline of loads.
      block_rows: most rows of x a program; a power of two, at least 16. Where weights come from the second-level cache
        anyway, programs of few rows read them again and are done sooner.
    """

    block_out: int
    block_in: int
    splits: int
    num_warps: int
    num_stages: int
    block_rows: int = 64


def config_for(out: int, width: int, itemsize: int) -> Config:
    """The config of a call that no table knows.

    Args:
      out: rows of the weights (of a half, with SwiGLU).
      width: columns of the weights.
      itemsize: bytes a number.
    """
    if itemsize == 4:
        return Config(16, 32, 1, 4, 2)
    return Config(16 if out <= 4096 else 32, 128 if width >= 1024 else 64, 1, 4, 4)

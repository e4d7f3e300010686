"""Launch parameters of the front and the gated norm. They only move bytes: what counts is enough programs in flight.

The numbers hold for every device kind so far; a device that wants its own gets a table here.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes: block_rows (rows a program, a power of two), num_warps."""

    block_rows: int
    num_warps: int


# (largest row count, config), ascending; the last is open. Rows of the front are tree nodes or tokens, a program has
# one head of them; rows of the norm are (node, head) pairs.
FRONT = ((8, Config(2, 1)), (32, Config(4, 2)), (256, Config(8, 4)), (None, Config(32, 4)))
NORM = ((256, Config(1, 1)), (8192, Config(8, 4)), (None, Config(32, 4)))


def _pick(table: tuple[tuple[int | None, Config], ...], rows: int) -> Config:
    return next(config for most, config in table if most is None or rows <= most)


def front_config(device_kind: str, rows: int) -> Config:
    """Config of `gdn_front` for `rows` rows a slot."""
    del device_kind
    return _pick(FRONT, rows)


def norm_config(device_kind: str, rows: int) -> Config:
    """Config of `gated_norm` for `rows` rows in all."""
    del device_kind
    return _pick(NORM, rows)

"""Scores of edges as integers, which the search adds: `dflash_jax.tree` says why. For kernels and for XLA alike.

The search takes them with a border, [B, L + 2, K + 2]: after the last rank of each depth and at the first rank below
the last depth stands an impossible cost. What else is beyond L and K may be read, but never counts.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Twice the largest cost is still an int32.
UNITS_PER_NAT = 1 << 20
IMPOSSIBLE = (1 << 30) - 1

BORDER = 2

# From here on fp32 has no fraction: a number below it that it is added to loses its own, and rounds to even.
_WHOLE = float(1 << 23)


def cost_of(scores: Float[Array, "..."]) -> Int[Array, "..."]:
    """Costs of scores in nats; NaN and whatever is not above -1024 nats become impossible."""
    scores = scores.astype(jnp.float32)
    possible = scores > -IMPOSSIBLE / UNITS_PER_NAT
    units = -jnp.minimum(jnp.where(possible, scores, 0.0), 0.0) * UNITS_PER_NAT
    units = jnp.where(units < _WHOLE, (units + _WHOLE) - _WHOLE, units)
    # Integers before the choice: fp32 would round the bound up, and two of it would leave int32.
    return jnp.where(possible, units.astype(jnp.int32), IMPOSSIBLE)


def bordered(costs: Int[Array, "B L K"]) -> Int[Array, "B L+2 K+2"]:
    """Costs as the search takes them."""
    return jnp.pad(costs, ((0, 0), (0, BORDER), (0, BORDER)), constant_values=IMPOSSIBLE)

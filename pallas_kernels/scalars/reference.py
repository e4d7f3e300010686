"""XLA reference of functions of scalars."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def scalars(
    function: Callable[..., Sequence[Sequence[Any]]], *arrays: Float[Array, " _"]
) -> tuple[Float[Array, " _"], ...]:
    """See `pallas_kernels.scalars.api.scalars`."""
    lists = [[x[i] for i in range(x.shape[0])] for x in arrays]
    return tuple(jnp.stack([jnp.asarray(y, jnp.float32) for y in result]) for result in function(*lists))

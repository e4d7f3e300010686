"""XLA reference of functions of scalars."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def scalars(function: Callable[..., Sequence[Any]], *arrays: Float[Array, " _"]) -> Float[Array, " R"]:
    """See `pallas_kernels.scalars.api.scalars`."""
    lists = [[x[i] for i in range(x.shape[0])] for x in arrays]
    return jnp.stack([jnp.asarray(y, jnp.float32) for y in function(*lists)])

"""Results that the host reads together, as one array.

A copy from a GPU takes the host as long for four bytes as for four thousand, and an array the same to make whatever it
holds. So a program puts what the host will read of a burst into one, in the host's memory (`programs._on_host`), and
the host takes it apart.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int


@struct.dataclass
class Packed:
    """A pytree of small arrays.

    Attributes:
      words: all of them, one after the other.
      outline: the pytree, with the shape and type of each array in its place.
    """

    words: Int[Array, " N"]
    outline: Any = struct.field(pytree_node=False)

    @property
    def ready(self) -> bool:
        """Whether the device has made them."""
        return self.words.is_ready()  # type: ignore[attr-defined]

    def fetch(self) -> Any:
        """Waits for them and returns the pytree, of NumPy arrays."""
        leaves, structure = jax.tree.flatten(self.outline)
        # Not `jax.device_get`, which first starts copies of many arrays side by side.
        words, start, found = np.asarray(self.words), 0, []
        for leaf in leaves:
            found.append(words[start : start + leaf.size].view(leaf.dtype).reshape(leaf.shape))
            start += leaf.size
        return jax.tree.unflatten(structure, found)


def pack(tree: Any) -> Packed:
    """A pytree of arrays, whose numbers take four bytes each, as one array; for programs."""
    words = [jax.lax.bitcast_convert_type(x, jnp.int32).reshape(-1) for x in jax.tree.leaves(tree)]
    outline = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    return Packed(jnp.concatenate(words), outline)

"""A tree's ancestors as kernels take them: as bits, compared in whichever layout they are needed, and as paths."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

# Bits of a word.
WORD = 32

# Of a row in a path (`paths_of`): whether another path has it as its own, and in the first place the path's length.
SHARED, LENGTH = 1 << 10, 11


def packed(ancestors: Bool[Array, "B N N"] | Int[Array, "B N S"]) -> Int[Array, "B N S"]:
    """S = ⌈N / 32⌉ words a row: bit j % 32 of word j // 32 says that row j is the row itself or an ancestor of it.

    What is words already stays what it is.
    """
    if ancestors.dtype != jnp.bool_:
        return ancestors
    batch, rows, _ = ancestors.shape
    words = -(-rows // WORD)
    mask = jnp.pad(ancestors, ((0, 0), (0, 0), (0, words * WORD - rows))).reshape(batch, rows, words, WORD)
    bits = jnp.where(mask, jnp.left_shift(jnp.uint32(1), jnp.arange(WORD, dtype=jnp.uint32)), 0)
    return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=3, dtype=jnp.uint32), jnp.int32)


def unpacked(ancestors: Bool[Array, "B N N"] | Int[Array, "B N S"]) -> Bool[Array, "B N N"]:
    """The mask that `packed` has made words of; a mask stays what it is."""
    if ancestors.dtype == jnp.bool_:
        return ancestors
    row = jnp.arange(ancestors.shape[1])
    return bit(ancestors[:, :, row // WORD], row)


def bit(words: Int[Array, "..."], row: Int[Array, "..."]) -> Bool[Array, "..."]:
    """Whether the word that holds its bit says that `row` is an ancestor, or the row itself."""
    return ((words >> (row % WORD)) & 1) != 0


def paths_of(parents: Int[np.ndarray, "B N"], size: int) -> Int[np.ndarray, "B N P"]:
    """The paths from node 0 to the rows without children, as the search of a device gives them, in NumPy.

    A path is its rows by depth, each marked `SHARED` in all paths but one, the first with their number << `LENGTH`.
    That is 0 after the last path. Rows without a parent that no row has for one are paths of their own.

    Args:
      parents: -1 where there is none.
      size: P, at least a path's rows.
    """
    found = np.zeros((*parents.shape, size), np.int32)
    for slot, above in enumerate(parents):
        taken: set[int] = set()
        ends = sorted(set(range(len(above))) - set(above[above >= 0].tolist()))
        for number, row in enumerate(ends):
            path = [row]
            while above[path[0]] >= 0:
                path.insert(0, int(above[path[0]]))
            found[slot, number, : len(path)] = [x | SHARED * (x in taken) for x in path]
            found[slot, number, 0] |= len(path) << LENGTH
            taken.update(path)
    return found

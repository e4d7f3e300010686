"""Ancestor masks of trees as bits: a kernel compares them where it needs them, in whichever layout that is."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Bits of a word.
WORD = 32

# Of a row in a path (`tree_search`): whether another path has it as its own, and in the first place the path's length.
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

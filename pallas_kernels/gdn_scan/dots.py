"""Matrix products of the delta rule's kernels at a named precision, and what is built from them to solve its systems.

Ampere and Hopper multiply fp32 on their matrix units only after rounding it. What each name costs and keeps:

    ieee    fp32 on the ordinary units; an order of magnitude slower. Models in fp32.
    tf32    one product, 10 bits of each operand.
    tf32x3  three products, about fp32.
    bf16    one product, 7 bits: for comparison only.
    bf16x2  operands split into two bf16 parts, three products, about 16 bits; two products where one operand is bf16
            already, which keys and queries of a bf16 model are.
    bf16x3  three parts, six products, fp32; three products where one operand is bf16.

A bf16 product runs at twice the rate of a TF32 one and its operands take half the shared memory, so for a bf16 model
`bf16x2` costs what `tf32` costs and is 64 times as exact. Products of two bf16 operands are exact whatever the name.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

DotMode = Literal["ieee", "tf32", "tf32x3", "bf16", "bf16x2", "bf16x3"]
DOT_MODES: tuple[DotMode, ...] = get_args(DotMode)

_PARTS = {"bf16": 1, "bf16x2": 2, "bf16x3": 3}
# Rows up to which the levels of a solution are code of their own: at 16 a tenth of the delta rule's time, beyond it a
# loop is faster.
_UNROLLED = 16
_UPPER_HALF = -65536  # 0xFFFF0000: sign, exponent and the bits of the mantissa that bf16 has


def _parts(x: Float[Array, "m n"], count: int) -> list[Float[Array, "m n"]]:
    """bf16 summands of x, largest first; one if x is bf16.

    All but the last are cut, not rounded: a compiler may drop a pair of conversions to bf16 and back, and with it the
    remainder, but not a bit mask.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(count - 1):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _UPPER_HALF
        cut = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(cut.astype(jnp.bfloat16))
        x = x - cut
    return [*parts, x.astype(jnp.bfloat16)]


def dot(
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    mode: DotMode,
    *,
    onto: Float[Array, "m n"] | None = None,
    contract: tuple[int, int] = (1, 0),
    largest_first: bool = False,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """fp32 product of two matrices over the dimensions `contract` of a and b, added to `onto` if there is one.

    A matrix unit adds to what it is given, so `onto` costs nothing, and a sum of products waits for no addition.

    Args:
      a, b: fp32 or bf16; every side at least 16 and a power of two.
      mode: see the module's text.
      onto: fp32.
      contract: (1, 0) for a·b, (1, 1) for a·bᵀ, (0, 0) for aᵀ·b.
      largest_first: of a split product begin with the largest parts, which are known before the others: a shorter wait
        where products wait for each other, but more registers.
      interpret: the kernel runs interpreted, where TF32 is not to be had: fp32 takes its place.
    """
    numbers = (((contract[0],), (contract[1],)), ((), ()))

    def added(total: Array | None, x: Array, y: Array, precision: jax.lax.PrecisionLike = None) -> Array:
        term = jax.lax.dot_general(x, y, numbers, precision=precision, preferred_element_type=jnp.float32)
        return term if total is None else total + term

    if a.dtype == b.dtype == jnp.bfloat16:
        return added(onto, a, b)
    if mode in _PARTS:
        left, right = _parts(a, _PARTS[mode]), _parts(b, _PARTS[mode])
        total = onto
        # Pairs whose order reaches the number of parts are below the last one's rounding.
        orders = range(_PARTS[mode])
        for order in orders if largest_first else reversed(orders):
            for i in range(order + 1):
                if i < len(left) and order - i < len(right):
                    total = added(total, left[i], right[order - i])
        assert total is not None
        return total
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    if mode == "ieee" or interpret:
        return added(onto, a, b, jax.lax.Precision.HIGHEST)
    preset = jax.lax.DotAlgorithmPreset
    return added(onto, a, b, preset.TF32_TF32_F32 if mode == "tf32" else preset.TF32_TF32_F32_X3)


def held_back(x: Float[Array, "N m"], live: Bool[Array, " N"]) -> Float[Array, "N m"]:
    """x, zero where not `live`: for rows that have been read so, and more has been read since.

    A product's operand passes through shared memory. The compiler copies it there as soon as it is known, and the copy
    waits for it: what is read after it is asked for only then. The selection stands where it is called.
    """
    return jnp.where(live[:, None], x, jnp.zeros_like(x))


def _joining(
    a: Float[Array, "N N"], row: Int[Array, "N N"], column: Int[Array, "N N"], log_width: int | Int[Array, ""]
) -> Float[Array, "N N"]:
    """The part of a below its diagonal that joins pairs of diagonal blocks of width 2^log_width."""
    block = row >> log_width
    return jnp.where((block % 2 == 1) & ((column >> log_width) == block - 1), a, 0.0)


def unit_lower_inverse(
    a: Float[Array, "N N"],
    row: Int[Array, "N N"],
    column: Int[Array, "N N"],
    mode: DotMode,
    *,
    interpret: bool = False,
) -> Float[Array, "N N"]:
    """(I + a)⁻¹ by doubling diagonal blocks as in the XLA reference; only what is below `a`'s diagonal counts.

    A kernel cannot cut a block out of a value, so a level works on whole matrices under a mask: with X the inverse of
    the diagonal blocks of width w and L the part of `a` that joins pairs of them, the next inverse is X − X·L·X. Every
    X is an inverse, whose entries stay moderate even for identical keys; the powers of `a` that a Neumann product
    needs do not, and in TF32 their cancellation would leave nothing.
    """

    def level(log_width: Int[Array, ""], x: Float[Array, "N N"]) -> Float[Array, "N N"]:
        right = dot(_joining(a, row, column, log_width), x, mode, interpret=interpret)
        return x - dot(x, right, mode, interpret=interpret)

    # Width 1: the diagonal blocks are [1], and X·L·X is L.
    first = jnp.where(row == column, 1.0, -_joining(a, row, column, 0))
    # A loop, not an unrolled chain: a fifth of the code, and a compiler that keeps one level's operands in registers.
    return jax.lax.fori_loop(1, row.shape[0].bit_length() - 1, level, first)


def unit_lower_solve(
    a: Float[Array, "N N"],
    right: Float[Array, "N m"],
    row: Int[Array, "N N"],
    column: Int[Array, "N N"],
    mode: DotMode,
    *,
    interpret: bool = False,
) -> Float[Array, "N m"]:
    """(I + a)⁻¹·right; only what is below `a`'s diagonal counts.

    Doubles diagonal blocks as `unit_lower_inverse` does, in half as many products that wait for each other. With X the
    inverse of the diagonal blocks of width w, a level holds X·a and X·right. The inverse at twice the width is
    (I − J)·X, where J is the part of X·a that joins pairs of blocks (J² = 0): both take one product with J, side by
    side. No powers here either. Of X·a only what is below the diagonal blocks is ever looked at again, and nothing
    inside of them or above gets there, so none of it is cleared.
    """
    size = row.shape[0]

    def added(j: Float[Array, "N N"], x: Float[Array, "N m"]) -> Float[Array, "N m"]:
        return dot(j, x, mode, onto=x, largest_first=True, interpret=interpret)

    def level(log_width: int | Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, x = carry
        j = _joining(-rest, row, column, log_width)
        return added(j, rest), added(j, x)

    carry, last = (a, right), size.bit_length() - 2
    if size <= _UNROLLED:
        for log_width in range(last):
            carry = level(log_width, carry)
    else:
        carry = jax.lax.fori_loop(0, last, level, carry)
    rest, x = carry
    return added(_joining(-rest, row, column, last), x)

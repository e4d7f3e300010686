"""Public entry of functions of scalars."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.scalars import kernel, reference

# What the registers of one thread hold.
MAX_NUMBERS = 256


def scalars(
    function: Callable[..., Sequence[Sequence[Any]]],
    *arrays: Float[Array, " _"],
    results: tuple[int, ...],
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, " _"], ...]:
    """`function` of the numbers in some arrays, each a list of scalars, whose results become arrays.

    XLA makes a launch of every few operations on scalars; the kernel does all of them in one.

    Args:
      function: takes a list for each array and returns lists. Hashable and alike from call to call: a module's own, or
        a `functools.partial` of one.
      arrays: one axis each, fp32.
      results: how many numbers there are in each list that it returns.
      in_place: whether the first result takes the place of the first array, which has its size: the kernel writes it
        there if the caller's program has no other use for it.
      implementation: "auto", "xla" or "pallas".

    Raises:
      UnsupportedError: "pallas" was asked for and cannot serve this call.
    """
    numbers = sum(x.shape[0] for x in arrays) + sum(results)
    reason = f"{numbers} numbers are more than {MAX_NUMBERS}" if numbers > MAX_NUMBERS else None
    if resolve("scalars", implementation, reason) == "xla":
        return reference.scalars(function, *arrays)
    return kernel.scalars(function, arrays, results, in_place=in_place)

"""Seconds of a device program that is shorter than the call that starts it: loops on the device, interleaved.

A program is a loop whose trip count is an argument. T(1 + r) − T(1) is r trips without the start of the program; what
a trip costs beside its calls (the loop's test, which the host waits for) is measured with an empty body and taken off.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

MAX_TRIPS = 2000


class Loop:
    """One compiled loop and its operands.

    Attributes:
      calls: calls a trip.
      overhead: seconds of a trip with an empty body.
      trips: so many are timed at once; set by `calibrate`.
    """

    def __init__(
        self, program: Callable[..., Any], operands: tuple[Any, ...], *, calls: int = 1, overhead: float = 0.0
    ):
        self.program, self.operands = program, operands
        self.calls, self.overhead, self.trips = calls, overhead, 1

    def _run(self, trips: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self.program(jnp.int32(trips), *self.operands))
        return time.perf_counter() - start

    def calibrate(self, seconds: float) -> None:
        """Warms up and chooses the trips that take about `seconds`."""
        self._run(1)
        trip = min(self._run(5) - self._run(1) for _ in range(2)) / 4
        self.trips = int(min(MAX_TRIPS, max(1, seconds / max(trip, 1e-6))))

    def sample(self) -> float:
        """Seconds a call, measured once."""
        return ((self._run(1 + self.trips) - self._run(1)) / self.trips - self.overhead) / self.calls


def medians(loops: Sequence[Any], *, samples: int, seconds: float) -> list[float]:
    """Median seconds a call of every loop; one sample of each in turn, so that all see the same clocks.

    Args:
      loops: objects with `calibrate` and `sample`, as `Loop`.
      samples: of each loop.
      seconds: length of one sample.
    """
    for loop in loops:
        loop.calibrate(seconds)
    taken = [[loop.sample() for loop in loops] for _ in range(samples)]
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def looped(step: Callable[..., Any]) -> Callable[..., Any]:
    """(trips, operands, carry) -> carry after `trips` calls of step(operands, trip, carry)."""

    def run(trips: jax.Array, operands: Any, carry: Any) -> Any:
        return jax.lax.fori_loop(0, trips, lambda i, c: step(operands, i, c), carry)

    return run


def measure_machine(*, large: bool, samples: int, seconds: float) -> tuple[float, float, float]:
    """(seconds of an empty trip, bytes a second of a copy, bf16 matrix operations a second) of the first device.

    The copy reads and writes one array; the products are of square matrices, two operations a multiply-add.

    Args:
      large: arrays beyond every cache and matrices that fill a GPU; else what a CPU does in milliseconds.
      samples, seconds: see `medians`.
    """
    numbers, side = (1 << 28, 8192) if large else (1 << 22, 256)
    array = jnp.zeros((numbers,), jnp.float32)
    square = jnp.full((side, side), 1 / side, jnp.bfloat16)
    bodies: list[tuple[Callable[..., Any], Any, Any]] = [
        (lambda _, i, x: 0.5 * x + 1.0, None, jnp.float32(0.0)),
        (lambda _, i, x: 0.5 * x + 1.0, None, array),
        (lambda w, i, x: x @ w, square, square),
    ]
    loops = []
    for body, operands, carry in bodies:
        program = jax.jit(looped(body)).lower(jnp.int32(1), operands, carry).compile()
        loops.append(Loop(program, (operands, carry)))
    empty, copy, product = medians(loops, samples=samples, seconds=seconds)
    empty = max(empty, 0.0)
    return empty, 2 * array.nbytes / max(copy - empty, 1e-9), 2 * side**3 / max(product - empty, 1e-9)

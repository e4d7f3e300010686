"""What `--tree-budget auto` knows on the host: how long rounds take on this device, and what texts have shown so far.

The choice itself is `steering.py`'s. Bursts choose on the device (`decoding.decode`); where rounds are handed over one
by one, as in a server, the controller chooses on the host. All that it reads is alike in every process of a run: the
curve is the first process's, and the rest follows from tokens.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dflash_jax import steering as steer
from dflash_jax.programs import Programs
from dflash_jax.round import DecodeState, RoundSpec, rounds_of
from dflash_jax.settle import Evidence
from dflash_jax.steering import ON_HOST, Steering

# Rounds of a run that is timed, and runs; on a GPU, where they take a tenth of the time, more of them.
TIMED_ROUNDS, RUNS, GPU_RUNS = 16, 3, 9
# Hidden size from which on a round waits for weights more than for launches.
WIDE = 2048


def buckets_of(block_size: int, width: int, on_cpu: bool, slots: int) -> tuple[int, ...]:
    """Budgets that `auto` chooses from, ascending: none (autoregressive), and around a block of rows.

    Each takes as many rows as a power of two where the drafter's block does.

    A CPU pays for every row: half a block's rows, a block's, twice that. A GPU reads the weights of a wide model for
    many rows as fast as for few: a block's rows, twice and four times that. A round of a narrow one is mostly launches,
    which so many rows make longer by more than they can gain; and with one slot twice a block's rows are worth their
    time wherever a block's are, so there is nothing to choose between.

    Args:
      block_size: the drafter's.
      width: hidden size of the target.
      on_cpu: whether it runs on one.
      slots: most that share a round.
    """
    block, twice = block_size - 1, 2 * block_size - 1
    if on_cpu:
        budgets = {block_size // 2 - 1, block, twice}
    elif width >= WIDE:
        budgets = {block, twice, 4 * block_size - 1}
    else:
        budgets = {twice} if slots == 1 else {block, twice}
    return tuple(sorted({0} | budgets))


@dataclasses.dataclass(frozen=True)
class LatencyCurve:
    """Times on one device, for one state shape (slots, capacity).

    Attributes:
      buckets: budgets.
      seconds: of one round of each bucket.
    """

    buckets: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raises `ValueError` unless there is one positive time a bucket and bucket 0 is the first."""
        if len(self.buckets) != len(self.seconds) or self.buckets[:1] != (0,) or min(self.seconds) <= 0:
            raise ValueError(
                f"a latency curve needs a positive time for each of {self.buckets}, got {self.seconds}"
            )


class BudgetController:
    """Chooses the bucket of rounds; one for each compiled shape, kept between requests.

    Rounds of several widths, as requests come and go, share what texts have shown.

    Attributes:
      curve: seconds of a round of the width in use; assign another one to force a choice.
    """

    def __init__(self, curve: LatencyCurve | Mapping[int, LatencyCurve]):
        """A controller of rounds of one width, or, of several, with a curve for each (slots a round -> curve)."""
        self._curves = {0: curve} if isinstance(curve, LatencyCurve) else dict(curve)
        self._width = next(iter(self._curves))
        self._numbers: np.ndarray | jax.Array = steer.first_beliefs(len(self.curve.buckets))
        self._keep = 1.0  # see `Steering`
        self._used: int | None = None  # bucket of the last round that the host chose

    @property
    def curve(self) -> LatencyCurve:
        """See the class."""
        return self._curves[self._width]

    @curve.setter
    def curve(self, curve: LatencyCurve) -> None:
        self._curves[self._width] = curve

    def use(self, width: int) -> None:
        """From now on everything is about rounds of so many slots; of one that has one curve it always is."""
        if len(self._curves) > 1:
            self._width = width

    def new_request(self, slots: int) -> None:
        """Forgets the share of the texts at hand that one of `slots` requests has."""
        self._keep *= 1 - 1 / slots

    # ---------------------------------------------------------------- bursts that choose on the device

    def steering(self) -> Steering:
        """What the next burst is handed, which takes the beliefs and must give new ones to `steered`."""
        if isinstance(self._numbers, jax.Array) and self._numbers.is_deleted():
            self._numbers = steer.first_beliefs(len(self.curve.buckets))  # a burst has failed
        keep, self._keep = self._keep, 1.0
        return steering_of(self._numbers, self.curve, keep)

    def steered(self, beliefs: jax.Array) -> None:
        """Takes in what the burst has learned: a promise of it is enough."""
        self._numbers = beliefs

    # ---------------------------------------------------------------- rounds that the host chooses

    def _beliefs(self) -> steer.Beliefs:
        found = steer.unpack(np.asarray(self._numbers).tolist())
        keep, self._keep = self._keep, 1.0
        return steer.renewed(found, keep, ON_HOST)

    def _learned(self, beliefs: steer.Beliefs) -> None:
        self._numbers = np.asarray(steer.numbers_of(beliefs), np.float32)

    def next(self) -> int:
        """Index of the bucket of the next round."""
        beliefs, index = steer.decide(
            self._beliefs(), self.curve.seconds, self.curve.buckets, self._used, ON_HOST
        )
        self._learned(beliefs)
        self._used = int(index)
        return self._used

    def observe(self, index: int, evidence: Evidence | None) -> None:
        """Takes in a round.

        Args:
          index: of its bucket.
          evidence: of all slots, on the host; None for bucket 0.
        """
        seconds, beliefs = self.curve.seconds, self._beliefs()
        if evidence is None:
            self._learned(steer.without_drafts(beliefs, 1, seconds, ON_HOST))
        elif rounds := int(np.sum(evidence.rounds)):
            reached, predicted = (np.sum(x, axis=0).tolist() for x in (evidence.reached, evidence.predicted))
            self._learned(steer.with_drafts(beliefs, index, rounds, 1, reached, predicted, seconds, ON_HOST))


def steering_of(
    beliefs: np.ndarray | jax.Array, curve: LatencyCurve, keep: float = 1.0, forced: int = -1
) -> Steering:
    """See `Steering`."""
    return Steering(
        beliefs, np.asarray(curve.seconds, np.float32), np.asarray(keep, np.float32), np.asarray(forced, np.float32)
    )  # fmt: skip


def unsteered(buckets: int, forced: int = -1) -> Steering:
    """Of a controller that knows nothing yet: for rounds of a forced bucket, or to compile for."""
    return steering_of(steer.first_beliefs(buckets), LatencyCurve((0,) * buckets, (1.0,) * buckets), forced=forced)


def measure_curve(
    programs: Programs,
    state: DecodeState,
    spec: RoundSpec,
    buffer: int,
    page_size: int,
    *,
    loop: bool = True,
    places: Sequence[int] | None = None,
) -> tuple[DecodeState, LatencyCurve]:
    """Times a round of each bucket, with every slot of it active at half of its capacity.

    Args:
      programs: where the rounds have been compiled.
      state: of slots that are all free; what the rounds leave in it, admission clears.
      spec: of the rounds, with buckets.
      buffer: of `Programs.decode`.
      page_size: tokens a page.
      loop: whether one program repeats rounds of all buckets; else each is a program, handed over round by round.
      places: slots that a round holds, see `Programs.decode`; None for all of the state.

    Returns:
      The state, and the curve: medians of several runs, each of one round and of several, whose difference is that of
      the rounds between. Of several processes all get the first one's.
    """
    slots, entries = state.block_tables.shape
    # May be fewer than all slots can use: what the rounds read does not matter.
    pages = state.cache.kv.shape[1]
    room = entries * page_size // 2
    many = max(min(TIMED_ROUNDS, room // spec.block_size, buffer // spec.block_size), 2)
    busy = {
        "block_tables": (np.arange(slots * entries, dtype=np.int32) % pages).reshape(slots, entries),
        "lengths": np.full((slots,), room, np.int32),
        "num_taps": np.zeros((slots,), np.int32),
        "active": np.ones((slots,), bool),
        "remaining": np.full((slots,), entries * page_size, np.int32),
        "stop_ids": np.full(state.stop_ids.shape, -1, np.int32),
    }

    def timed(index: int, one: RoundSpec, rounds: int) -> float:
        nonlocal state
        # Anew for each: donated buffers must not be shared.
        fields = programs.replicated({name: jnp.array(value) for name, value in busy.items()})
        state = jax.block_until_ready(dataclasses.replace(state, **fields))
        begun = time.perf_counter()
        output = None
        for limit in [rounds] if loop else [None] * rounds:
            how = unsteered(len(spec.buckets), index) if loop else None
            result = programs.decode(state, limit, spec if loop else one, buffer, slots=places, steering=how)
            assert result is not None
            state, output = result
        jax.block_until_ready((state, output))[1][0].fetch()
        return time.perf_counter() - begun

    runs = []
    on_cpu = all(device.platform == "cpu" for device in state.anchor.devices())
    for _ in range(1 + (RUNS if on_cpu else GPU_RUNS)):  # the first one warms up
        row = []
        for index, one in enumerate(rounds_of(spec)):
            few, all_of_them = timed(index, one, 1), timed(index, one, many)
            # A disturbed first measurement must not make rounds look free.
            row.append(max((all_of_them - few) / (many - 1), 0.5 * all_of_them / many))
        runs.append(row)
    seconds = np.median(np.asarray(runs[1:], np.float32), axis=0)
    if jax.process_count() > 1:
        seconds = multihost_utils.broadcast_one_to_all(seconds)
    state = dataclasses.replace(state, active=programs.replicated(jnp.zeros((slots,), bool)))
    return state, LatencyCurve(spec.buckets, tuple(map(float, seconds)))

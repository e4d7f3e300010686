"""How many nodes the next rounds verify: `--tree-budget auto`.

A controller weighs the tokens that a round of each bucket (budget) should emit against its seconds on this device, as
measured. It decides between bursts of rounds, on the host, so every bucket is a static program of its own and
a burst pays nothing for the choice. All that it reads is alike in every process of a run: the curve is the first
process's, and the rest follows from tokens. A run of one process also corrects the curve as it goes.

**Tokens.** Trees of one policy are nested, so a round of budget b shows exactly what each smaller budget would have
emitted in its place (`settle.Evidence`). Realised tokens of the last rounds are joined with what the drafter's prefix
probabilities predict for those rounds, scaled by how far such predictions have come true: the prediction reacts to a
change of text within a round or two, and the scale, kept over requests, corrects a drafter that is too sure of itself.
The mean over earlier texts counts as a few rounds more, so that the weak start of a text does not end its drafts.
A bucket larger than those that ran lately is taken to gain on the next smaller one what it has gained before.

**Exploration.** Rounds without a draft say nothing about drafts, and small trees nothing about large ones. Both are
tried now and then, for as much time as a fixed share of the decoding time pays: it is what trying can cost at most.

**Pace.** A burst with drafts ends by itself, on the device, once it has emitted fewer tokens than plain decoding would
have in its time, some rounds of grace aside. So bursts can be long from the start, and a text that turns costs little.

**Bursts.** A burst also costs what the host takes to start it and to read its results, which is nothing beside a round
of a large model and many rounds of a tiny one. It is measured with the curve, and bursts are as long as makes it small.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dflash_jax.programs import Programs
from dflash_jax.round import DecodeState, RoundSpec
from dflash_jax.settle import Evidence

# What one round weighs after the next one, for the text at hand and for what is kept over requests.
SHORT_MEMORY, LONG_MEMORY = 0.9, 0.98
# Rounds that the calibrated prediction counts as, and the mean over texts, against realised tokens.
PREDICTION_WEIGHT, USUAL_WEIGHT = 2.0, 3.0
# Tokens that the uncalibrated prediction counts as, before anything has come true.
TRUST = 4.0
# So many rounds with drafts must be seen, of any text, before drafts can be given up: a text's first ones say little.
GRACE = 8
# A tree of the next bucket, never tried, is hoped to emit so many times the tokens.
HOPE = 1.2
# Drafting must promise so many times the autoregressive rate: being wrong costs more on that side.
MARGIN = 1.05
# Share of the decoding time that trying other buckets may cost; share of the time that drafts have saved which looking
# whether new texts are worth drafts may cost besides, of so many looks at most.
EXPLORATION, REINVESTED, SAVED_LOOKS = 0.01, 0.25, 4
# Seconds that a device idles at least if the host waits for its results, and how often a new text is not worth a draft.
HOST_SECONDS, SURPRISE = 5e-4, 0.1
# Rounds a burst: first or when trying, and at most, with drafts and without, unless starting a burst costs more than
# these shares of its time: of the first one, and of the longest.
FIRST_BURST, LONGEST_BURST, LONGEST_PLAIN_BURST = 2, 16, 64
FIRST_SHARE, LONGEST_SHARE = 0.01, 0.01
# Rounds of one token each that a burst with drafts may have before it ends by itself.
PATIENCE = 3


def buckets_of(block_size: int, on_cpu: bool) -> tuple[int, ...]:
    """Budgets that `auto` chooses from, ascending: none (autoregressive), the chain, and trees of 2, 4 times its rows.

    Each takes as many rows as a power of two where the drafter's block does. A CPU pays for every row, so there the
    widest tree makes room for half a chain.
    """
    extra = block_size // 2 - 1 if on_cpu else 4 * block_size - 1
    return tuple(sorted({0, extra, block_size - 1, 2 * block_size - 1}))


@dataclasses.dataclass(frozen=True)
class LatencyCurve:
    """Times on one device, for one state shape (slots, capacity).

    Attributes:
      buckets: budgets.
      seconds: of one round of each bucket.
      start: seconds of a burst beside its rounds.
    """

    buckets: tuple[int, ...]
    seconds: tuple[float, ...]
    start: float = 0.0

    def __post_init__(self) -> None:
        """Raises `ValueError` unless there is one positive time a bucket and bucket 0 is the first."""
        if len(self.buckets) != len(self.seconds) or self.buckets[:1] != (0,) or min(self.seconds) <= 0:
            raise ValueError(
                f"a latency curve needs a positive time for each of {self.buckets}, got {self.seconds}"
            )

    def rounds_for(self, index: int, share: float) -> int:
        """Rounds of a burst of a bucket whose start takes this share of the time of its rounds."""
        return int(self.start / (share * self.seconds[index]))

    def with_start(self, most: int) -> "LatencyCurve":
        """The same with each round's part of the start of a burst, if no burst may have more rounds than `most`."""
        longest = [max(LONGEST_BURST, self.rounds_for(k, LONGEST_SHARE)) for k in range(len(self.buckets))]
        seconds = (
            s + self.start / min(most, rounds) for s, rounds in zip(self.seconds, longest, strict=True)
        )
        return dataclasses.replace(self, seconds=tuple(seconds), start=0.0)


def choose(curve: LatencyCurve, tokens: Sequence[float] | np.ndarray) -> int:
    """Index of the bucket that emits most tokens a second, 0 unless another gains by `MARGIN`; the smallest of equals.

    Args:
      curve: seconds of a round, which may have its part of a burst's start in them.
      tokens: expected tokens of a round, a bucket.
    """
    rates = np.asarray(tokens) / np.asarray(curve.seconds)
    rates[0] *= MARGIN
    return int(np.argmax(rates))


@dataclasses.dataclass
class _Sums:
    """Decayed sums over rounds, a bucket: rounds that show the bucket, tokens besides the bonus, their prediction.

    `ratio` keeps, for rounds that show the bucket, the tokens of the bucket and of the next smaller one.
    """

    rounds: np.ndarray
    reached: np.ndarray
    predicted: np.ndarray
    ratio: np.ndarray

    @classmethod
    def empty(cls, size: int) -> "_Sums":
        return cls(np.zeros(size), np.zeros(size), np.zeros(size), np.zeros((2, size)))

    def add(
        self, shown: np.ndarray, rounds: int, reached: np.ndarray, predicted: np.ndarray, keep: float
    ) -> None:
        """Takes in the rounds of one burst, of all slots; a bucket that they do not show stays as seen last."""
        fade = np.where(shown, keep**rounds, 1.0)
        extra = np.stack([reached, np.concatenate([[rounds], reached[:-1]])])
        self.rounds = self.rounds * fade + shown * rounds
        self.reached = self.reached * fade + shown * (reached - rounds)
        self.predicted = self.predicted * fade + shown * (predicted - rounds)
        self.ratio = self.ratio * fade + shown * extra

    def weaken(self, share: float) -> None:
        for name in ("rounds", "reached", "predicted", "ratio"):
            setattr(self, name, getattr(self, name) * share)


class BudgetController:
    """Chooses the bucket of the next burst of rounds; one for each compiled shape, kept between requests.

    Rounds of several widths, as requests come and go, share what texts have shown.

    Attributes:
      curve: seconds of a round of the width in use, corrected as bursts are timed; assign another one to force a
        choice.
    """

    def __init__(self, curve: LatencyCurve | Mapping[int, LatencyCurve]):
        """A controller of rounds of one width, or, of several, with a curve for each (slots a round -> curve)."""
        self._curves = {0: curve} if isinstance(curve, LatencyCurve) else dict(curve)
        self._width = next(iter(self._curves))
        self._load = 1.0  # by how much all rounds are slower now than the curve says
        size = len(self.curve.buckets)
        self._short, self._long = _Sums.empty(size), _Sums.empty(size)
        self._stale = np.ones(size, bool)  # not shown by the newest evidence
        self._fresh = True  # nothing has run for the newest request
        self._credit = 0.0  # seconds that trying may cost; a request's first trial may borrow
        self._earned = 0.0  # seconds that the first trials of requests may cost besides
        self._since_trial = 0
        self._burst = FIRST_BURST
        self._last = -1
        self._pace = (0.0, 0.0)

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

    def expected_tokens(self) -> np.ndarray:
        """Tokens that a round of each bucket should emit for the text at hand (mean over slots)."""
        tokens = np.ones(len(self.curve.buckets))
        short, long = self._short, self._long
        for k in range(1, len(tokens)):
            rounds = short.rounds[k]
            if rounds > 0 and (k == 1 or not self._stale[k]):
                calibration = (long.reached[k] + TRUST) / (long.predicted[k] + TRUST)
                predicted = calibration * short.predicted[k] / rounds
                usual = USUAL_WEIGHT * long.reached[k] / long.rounds[k]
                seen = PREDICTION_WEIGHT * predicted + short.reached[k] + usual
                value = 1 + seen / (PREDICTION_WEIGHT + rounds + USUAL_WEIGHT)
            elif k == 1:
                value = 1 + (
                    long.reached[1] / long.rounds[1] if long.rounds[1] > 0 else self.curve.buckets[1] / 2
                )
            else:
                before = (long.ratio[0, k] + TRUST * HOPE) / (long.ratio[1, k] + TRUST)
                ratio = (short.ratio[0, k] + TRUST * before) / (short.ratio[1, k] + TRUST)
                value = tokens[k - 1] * ratio
            if k == 1 and long.rounds[1] < GRACE:
                value = max(value, 1 + self.curve.buckets[1] / 2)
            tokens[k] = max(value, tokens[k - 1])  # nested trees: never fewer
        return tokens

    def new_request(self, slots: int) -> None:
        """Forgets the share of the text at hand that one of `slots` requests has."""
        self._short.weaken(1 - 1 / slots)
        self._fresh = True

    def next(self, most: int) -> tuple[int, int]:
        """Index of the bucket of the next burst, and how many rounds it should have, of `most` at most."""
        curve, usual = self.curve, self.curve.with_start(most)
        tokens = self.expected_tokens()
        best = choose(usual, tokens)
        index, rounds = self._trial(best, tokens, usual, min(FIRST_BURST, most)), FIRST_BURST
        if index is None:
            longest = max(
                LONGEST_BURST if best else LONGEST_PLAIN_BURST, curve.rounds_for(best, LONGEST_SHARE)
            )
            if best != self._last or self._fresh:
                first = 4 * FIRST_BURST if best else LONGEST_BURST  # a plain round has nothing to tell
                self._burst = max(first, min(curve.rounds_for(best, FIRST_SHARE), longest))
            index, rounds, self._last = best, self._burst, best
            self._burst = min(2 * self._burst, longest)
        rounds = min(rounds, most)
        pace = curve.seconds[index] / curve.seconds[0]
        self._pace = (pace, PATIENCE * (pace - 1)) if index and pace > 1 else (0.0, 0.0)
        if index == 0:  # nothing new on drafts, and what is known grows old
            self._short.weaken(SHORT_MEMORY**rounds)
            self._stale[:] = True
        self._fresh = False
        return index, rounds

    @property
    def pace(self) -> tuple[float, float]:
        """Of the last `next`: the tokens a round, less some tokens of grace, below which its burst ends by itself."""
        return self._pace

    def ran(self, index: int, rounds: int) -> None:
        """Takes in how many rounds of a burst there were before its texts ended."""
        curve = self.curve
        self._since_trial += rounds
        saved = self._credit + EXPLORATION * rounds * curve.seconds[index]
        self._credit = min(saved, self._look())

    def _look(self) -> float:
        """Seconds of a first burst with drafts."""
        return FIRST_BURST * self.curve.seconds[1] + self.curve.start

    def _trial(self, best: int, tokens: np.ndarray, usual: LatencyCurve, rounds: int) -> int | None:
        """A bucket to try for so many rounds instead of the best one, if there is time for it, which is then spent."""
        seconds = np.asarray(usual.seconds)
        index = best + 1
        if best == 0:  # the most promising draft
            index += int(np.argmax(tokens[1:] / seconds[1:]))
        # Where nothing drafts, a new text is worth a look.
        soon = self._fresh and best == 0
        if index >= len(tokens) or not (self._stale[index] or soon):
            return None
        spent = rounds * self.curve.seconds[index] + self.curve.start
        loss = max(spent - rounds * float(tokens[index] / tokens[best] * seconds[best]), 0.0)
        if soon and self._credit < 0 and self._earned >= loss:
            self._earned -= loss
        elif self._credit < (0.0 if soon else loss) or not (soon or self._since_trial >= LONGEST_BURST):
            return None
        else:
            self._credit -= loss
        self._since_trial = 0
        return index

    def unsure(self) -> bool:
        """Whether the text may not be worth drafts, so that it pays to see the first rounds before starting more."""
        risk = SURPRISE * 3 * FIRST_BURST * (self.curve.seconds[1] - self.curve.seconds[0])
        return risk > max(HOST_SECONDS, self.curve.start) and float(self._short.rounds[1]) < 4 * FIRST_BURST

    def timed(self, index: int, seconds: float, rounds: int) -> None:
        """Corrects the curve by the seconds that a burst of so many rounds took.

        What differs from the curve is part a load of the machine, which concerns all buckets, and part an error of this
        one; each takes its share, and as buckets alternate the errors vanish.
        """
        usual = rounds * self.curve.seconds[index] + self.curve.start
        surprise = float(np.clip(seconds / usual / self._load, 0.5, 2.0)) ** 0.2
        self._load *= surprise
        corrected = list(self.curve.seconds)
        corrected[index] *= surprise
        self.curve = dataclasses.replace(self.curve, seconds=tuple(corrected))

    def observe(self, index: int, evidence: Evidence) -> None:
        """Takes in what a burst has shown.

        Args:
          index: of the bucket that ran, not 0.
          evidence: of all slots, on the host.
        """
        rounds = int(np.sum(evidence.rounds))
        if not rounds:
            return
        reached, predicted = np.sum(evidence.reached, axis=0), np.sum(evidence.predicted, axis=0)
        seconds = self.curve.seconds
        saved = int(np.max(evidence.rounds)) * (float(reached[index]) / rounds * seconds[0] - seconds[index])
        self._earned = min(self._earned + REINVESTED * max(saved, 0.0), SAVED_LOOKS * self._look())
        shown = np.arange(len(self._stale)) <= index
        self._stale = ~shown
        self._short.add(shown, rounds, reached, predicted, SHORT_MEMORY)
        self._long.add(shown, rounds, reached, predicted, LONG_MEMORY)


def measure_curve(
    programs: Programs,
    state: DecodeState,
    specs: Sequence[RoundSpec],
    buffer: int,
    page_size: int,
    *,
    loop: bool = True,
    places: Sequence[int] | None = None,
) -> tuple[DecodeState, LatencyCurve]:
    """Times a round of each spec, with every slot of it active at half of its capacity.

    Args:
      programs: where the rounds have been compiled.
      state: of slots that are all free; what the rounds leave in it, admission clears.
      specs: a round a bucket, of budgets that start with 0.
      buffer: of `Programs.decode`.
      page_size: tokens a page.
      loop: whether the programs repeat rounds; else bursts are rounds handed over one by one, whose start is hidden
        behind the round before and counts as nothing.
      places: slots that a round holds, see `Programs.decode`; None for all of the state.

    Returns:
      The state, and the curve: medians of three runs each, of one round and of several, whose difference is that of the
      rounds between. Of several processes all get the first one's.
    """
    slots, entries = state.block_tables.shape
    pages = state.cache.kv.shape[
        1
    ]  # may be fewer than all slots can use: what the rounds read does not matter
    room = entries * page_size // 2
    on_cpu = jax.devices()[0].platform == "cpu"
    drafting = min(2 * FIRST_BURST if on_cpu else LONGEST_BURST, max(room // specs[-1].block_size, 1))
    busy = {
        "block_tables": (np.arange(slots * entries, dtype=np.int32) % pages).reshape(slots, entries),
        "lengths": np.full((slots,), room, np.int32),
        "num_taps": np.zeros((slots,), np.int32),
        "active": np.ones((slots,), bool),
        "remaining": np.full((slots,), entries * page_size, np.int32),
        "stop_ids": np.full(state.stop_ids.shape, -1, np.int32),
    }

    def timed(spec: RoundSpec, rounds: int) -> float:
        nonlocal state
        # Anew for each: donated buffers must not be shared.
        fields = programs.replicated({name: jnp.array(value) for name, value in busy.items()})
        state = jax.block_until_ready(dataclasses.replace(state, **fields))
        begun = time.perf_counter()
        output = None
        for limit in [rounds] if loop else [None] * rounds:
            result = programs.decode(state, limit, spec, buffer, slots=places)
            assert result is not None
            state, output = result
        jax.device_get(jax.block_until_ready((state, output))[1])
        return time.perf_counter() - begun

    runs = []
    for _ in range(4):  # the first one warms up
        row = []
        for spec in specs:
            # A burst without drafts begins with the context of the last one, so it has its whole length here.
            many = max(drafting if spec.budget else min(LONGEST_BURST, spec.block_size), 2)
            few, all_of_them = timed(spec, 1), timed(spec, many)
            # A disturbed first measurement must not make rounds look free.
            one = max((all_of_them - few) / (many - 1), 0.5 * all_of_them / many)
            row.append((one, max(few - one, 0.0)))
        runs.append(row)
    table = np.median(np.asarray(runs[1:], np.float32), axis=0)
    if jax.process_count() > 1:
        table = multihost_utils.broadcast_one_to_all(table)
    state = dataclasses.replace(state, active=programs.replicated(jnp.zeros((slots,), bool)))
    seconds, start = tuple(map(float, table[:, 0])), float(np.median(table[:, 1])) if loop else 0.0
    return state, LatencyCurve(tuple(spec.budget for spec in specs), seconds, start)

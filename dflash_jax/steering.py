"""Which budget the next rounds take, `--tree-budget auto`: pure functions of what rounds have shown.

They run on the device, after the rounds of a burst (`decoding.py`), where a choice costs a few operations on scalars
and nothing waits for the host; and on the host, where rounds are handed over one by one (`budget.py`). So everything
here is written in scalars, and in the few functions of `Arithmetic` that Python's floats and JAX's arrays both have.

**Tokens.** Trees of one policy are nested, so a round of budget b shows exactly what each smaller budget would have
emitted in its place (`settle.Evidence`). Realised tokens of the last rounds are joined with what the drafter's prefix
probabilities predict for those rounds, scaled by how far such predictions have come true: the prediction reacts to a
change of text within a round or two, and the scale, kept over requests, corrects a drafter that is too sure of itself.
The mean over earlier texts counts as a few rounds more, so that the weak start of a text does not end its drafts.
Each larger bucket gains on the next smaller one what it mostly has, in this text and others.

**Exploration.** Rounds without a draft say nothing about drafts, and small trees nothing about large ones. Both are
tried now and then, for as much time as a fixed share of the decoding time pays: it is what trying can cost at most.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

# What one round weighs after the next one, for the text at hand and for what is kept over requests.
SHORT_MEMORY, LONG_MEMORY = 0.95, 0.98
# Rounds that the calibrated prediction counts as, and the mean over texts, against realised tokens.
PREDICTION_WEIGHT, USUAL_WEIGHT = 4.0, 2.0
# Tokens that the uncalibrated prediction counts as, before anything has come true.
TRUST = 4.0
# So many rounds with drafts must be seen, of any text, before drafts can be given up: a text's first ones say little.
GRACE = 8
# A tree of the next bucket, never tried, is hoped to emit so many times the tokens.
HOPE = 1.2
# Tokens that what larger buckets gain in all texts counts as, against the text at hand: a few of its rounds, in which
# the larger tree happened to catch much, must not keep it.
GAIN_TRUST = 30.0
# Drafting must promise so many times the autoregressive rate: being wrong costs more on that side.
MARGIN = 1.02
# And another bucket so many times the rate of the one in use: to leave it costs a part of a small model's round.
STAY = 1.05
# Share of the decoding time that trying other buckets may cost, saved for at most so many rounds of the first one; and
# rounds that lie between two trials. With half of it a text of 200 tokens that a small model does not draft for has one
# look at drafts, and what the benchmark's texts can gain by them mostly goes unseen.
EXPLORATION, SAVED, APART = 0.01, 2, 8
# Seconds that a trial costs besides: a GPU's host looks at some conditions to leave a bucket and come back.
AWAY = 1.5e-4
# Rounds without a draft between two decisions: they have little to tell. With drafts there is a decision after each.
PLAIN_ROUNDS = 32

Scalar = Any  # a Python float or bool, or a JAX array without axes


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """What the functions here need of numbers, as `jax.numpy` has it."""

    where: Callable[[Scalar, Scalar, Scalar], Scalar]
    minimum: Callable[[Scalar, Scalar], Scalar]
    maximum: Callable[[Scalar, Scalar], Scalar]
    exp: Callable[[Scalar], Scalar]


def _where(condition: Scalar, yes: Scalar, no: Scalar) -> Scalar:
    if isinstance(yes, float) and isinstance(no, float):
        # Pallas' Triton backend takes a choice between two constants for one of booleans.
        return no + (yes - no) * condition.astype(jnp.float32)
    return jnp.where(condition, yes, no)


# Python's floats take a hundredth of the time of NumPy's scalars.
ON_HOST = Arithmetic(lambda condition, yes, no: yes if condition else no, min, max, math.exp)
ON_DEVICE = Arithmetic(_where, jnp.minimum, jnp.maximum, jnp.exp)


@dataclasses.dataclass
class Sums:
    """Decayed sums over rounds, a bucket.

    Attributes:
      rounds: that show the bucket.
      reached: their tokens besides the bonus.
      predicted: what the drafter expected of them.
      more, base: their tokens, and those of the next smaller bucket in the same rounds.
    """

    rounds: list[Scalar]
    reached: list[Scalar]
    predicted: list[Scalar]
    more: list[Scalar]
    base: list[Scalar]

    def scaled(self, share: Scalar, last: int | None = None) -> "Sums":
        """All of the sums, or those of the buckets up to the last one, times a share."""
        last = len(self.rounds) if last is None else last
        return Sums(*([x * share if k <= last else x for k, x in enumerate(row)] for row in _fields(self)))

    def add(self, index: int, rounds: Scalar, reached: list[Scalar], predicted: list[Scalar], keep: Scalar) -> "Sums":
        """With rounds of bucket `index`, which show it and the smaller ones, of so many tokens in all."""
        base = [rounds, *reached[:-1]]
        fresh = Sums(
            [rounds] * len(reached), [x - rounds for x in reached], [x - rounds for x in predicted], reached, base
        )
        rows = zip(_fields(self.scaled(keep, index)), _fields(fresh), strict=True)
        return Sums(*([*map(sum, zip(old[: index + 1], new, strict=False)), *old[index + 1 :]] for old, new in rows))


def _fields(x: Any) -> list[Any]:
    return [getattr(x, field.name) for field in dataclasses.fields(x)]


@dataclasses.dataclass
class Beliefs:
    """What is known of texts; `numbers_of` makes a list of it and `unpack` this of the list.

    Attributes:
      short: of the text at hand.
      long: of all texts.
      stale: a bucket, 1 where the newest rounds do not show it.
      credit: seconds that trying may cost.
      owed: seconds of it that the next round will cost; -1 where that is none to try something.
      since: rounds since the last trial.
      fresh: 1 before the first round of a new text.
    """

    short: Sums
    long: Sums
    stale: list[Scalar]
    credit: Scalar
    owed: Scalar
    since: Scalar
    fresh: Scalar


def first_beliefs(buckets: int) -> np.ndarray:
    """Of an engine that has seen nothing: the numbers of its `Beliefs`."""
    return np.asarray([*[0.0] * (10 * buckets), *[1.0] * buckets, 0.0, -1.0, APART, 1.0], np.float32)


def unpack(numbers: list[Scalar]) -> Beliefs:
    """Of the list that `numbers_of` makes."""
    buckets = (len(numbers) - 4) // 11
    rows = [numbers[i * buckets : (i + 1) * buckets] for i in range(11)]
    return Beliefs(Sums(*rows[:5]), Sums(*rows[5:10]), rows[10], *numbers[-4:])


def numbers_of(beliefs: Beliefs) -> list[Scalar]:
    """All that they hold, in one list."""
    rows = [*_fields(beliefs.short), *_fields(beliefs.long), beliefs.stale]
    return [*(x for row in rows for x in row), beliefs.credit, beliefs.owed, beliefs.since, beliefs.fresh]


@struct.dataclass
class Steering:
    """What a burst that chooses its own budgets is handed.

    Attributes:
      beliefs: their numbers, as the burst before has left them.
      seconds: of a round of each bucket.
      keep: what remains of the memory of the texts at hand: less than 1 where some of them are new.
      forced: index of a bucket that all rounds take; -1 for none.
    """

    beliefs: Float[Array | np.ndarray, " M"]
    seconds: Float[Array | np.ndarray, " K"]
    keep: Float[Array | np.ndarray, ""]
    forced: Float[Array | np.ndarray, ""]


def expected_tokens(b: Beliefs, budgets: Sequence[int], a: Arithmetic) -> list[Scalar]:
    """Tokens that a round of each bucket should emit for the text at hand (mean over slots)."""
    short, long = b.short, b.long
    rounds, usual = a.maximum(short.rounds[1], 1e-9), long.reached[1] / a.maximum(long.rounds[1], 1e-9)
    calibration = (long.reached[1] + TRUST) / (long.predicted[1] + TRUST)
    predicted = calibration * short.predicted[1] / rounds
    seen = PREDICTION_WEIGHT * predicted + short.reached[1] + USUAL_WEIGHT * usual
    shown = 1.0 + seen / (PREDICTION_WEIGHT + rounds + USUAL_WEIGHT)
    hoped = 1.0 + budgets[1] / 2
    before = a.where(long.rounds[1] > 1e-6, 1.0 + usual, hoped)
    first = a.where(short.rounds[1] > 1e-6, shown, before)
    tokens: list[Scalar] = [1.0, a.maximum(a.where(long.rounds[1] < GRACE, a.maximum(first, hoped), first), 1.0)]
    for k in range(2, len(budgets)):
        gain = (long.more[k] + TRUST * HOPE) / (long.base[k] + TRUST)
        gain = (short.more[k] + GAIN_TRUST * gain) / (short.base[k] + GAIN_TRUST)
        tokens.append(tokens[-1] * a.maximum(gain, 1.0))  # nested trees: never fewer
    return tokens


def _largest(values: Sequence[Scalar], a: Arithmetic) -> Scalar:
    """Index, a float as all numbers here, of the largest one; the first of equals."""
    index, most = 0.0, values[0]
    for k in range(1, len(values)):
        index, most = a.where(values[k] > most, float(k), index), a.maximum(values[k], most)
    return index


def _at(values: Sequence[Scalar], index: Scalar, a: Arithmetic) -> Scalar:
    found = values[0]
    for k in range(1, len(values)):
        found = a.where(index == float(k), values[k], found)
    return found


def choose(
    seconds: Sequence[Scalar], tokens: Sequence[Scalar], used: int | None = None, a: Arithmetic = ON_HOST
) -> Scalar:
    """Index of the bucket that emits most tokens a second, 0 unless another gains by `MARGIN`; the smallest of equals.

    Args:
      seconds: of a round, a bucket.
      tokens: expected of a round.
      used: index of the bucket in use, which stays unless another gains by `STAY`; None for none.
    """
    rates = [MARGIN * tokens[0] / seconds[0], *(t / s for t, s in zip(tokens[1:], seconds[1:], strict=True))]
    rates = [STAY * rate if k == used else rate for k, rate in enumerate(rates)]
    return _largest(rates, a)


def decide(
    b: Beliefs, seconds: Sequence[Scalar], budgets: Sequence[int], used: int | None, a: Arithmetic
) -> tuple[Beliefs, Scalar]:
    """Index of the bucket of the next rounds; if it is one to try, of the next one alone, and something is `owed`.

    `used` is the index of the bucket in use, if any.
    """
    tokens = expected_tokens(b, budgets, a)
    best = choose(seconds, tokens, used, a)
    # The next larger one, or of all drafts the most promising.
    promising = 1.0 + _largest([t / s for t, s in zip(tokens[1:], seconds[1:], strict=True)], a)
    tried = a.where(best == 0.0, promising, a.minimum(best + 1.0, len(budgets) - 1.0))
    # Where nothing drafts, a new text is worth a look, for which it may borrow.
    soon = (b.fresh > 0.5) & (best == 0.0)
    gained = _at(tokens, tried, a) / _at(tokens, best, a) * _at(seconds, best, a)
    loss = a.maximum(_at(seconds, tried, a) - gained, 0.0) + AWAY
    unknown = (tried != best) & ((_at(b.stale, tried, a) > 0.5) | soon)
    paid = a.where(soon, b.credit >= 0.0, (b.credit >= loss) & (b.since >= APART))
    trial = unknown & paid
    return dataclasses.replace(b, owed=a.where(trial, loss, -1.0)), a.where(trial, tried, best)


def _ran(b: Beliefs, rounds: Scalar, taken: Scalar, seconds: Sequence[Scalar], a: Arithmetic) -> Beliefs:
    """After so many rounds that took so many seconds."""
    credit = a.minimum(b.credit + EXPLORATION * taken, SAVED * seconds[1]) - a.maximum(b.owed, 0.0)
    since = a.where(b.owed >= 0.0, 0.0, b.since) + rounds
    return dataclasses.replace(b, credit=credit, owed=-1.0, since=since, fresh=0.0)


def _faded(memory: float, rounds: Scalar, a: Arithmetic) -> Scalar:
    return a.exp(math.log(memory) * rounds)


def without_drafts(b: Beliefs, rounds: Scalar, seconds: Sequence[Scalar], a: Arithmetic) -> Beliefs:
    """After so many rounds of bucket 0: nothing new on drafts, and what is known grows old."""
    fade = _faded(SHORT_MEMORY, rounds, a)
    b = _ran(b, rounds, rounds * seconds[0], seconds, a)
    return dataclasses.replace(b, short=b.short.scaled(fade), stale=[1.0] * len(b.stale))


def with_drafts(
    b: Beliefs, index: int, rounds: Scalar, ran: Scalar, reached: list[Scalar], predicted: list[Scalar],
    seconds: Sequence[Scalar], a: Arithmetic,
) -> Beliefs:  # fmt: skip
    """After rounds of bucket `index`.

    Args:
      index: see above.
      rounds: how many there were, those of all slots together, at least one.
      ran: how many one after the other.
      reached, predicted: `settle.Evidence`, summed over all.
    """
    b = _ran(b, ran, ran * seconds[index], seconds, a)
    return dataclasses.replace(
        b,
        short=b.short.add(index, rounds, reached, predicted, _faded(SHORT_MEMORY, rounds, a)),
        long=b.long.add(index, rounds, reached, predicted, _faded(LONG_MEMORY, rounds, a)),
        stale=[1.0 if k > index else 0.0 for k in range(len(b.stale))],
    )


def renewed(b: Beliefs, keep: Scalar, a: Arithmetic) -> Beliefs:
    """Forgets the share of the texts at hand that new ones have (1 - keep)."""
    return dataclasses.replace(b, short=b.short.scaled(keep), fresh=a.where(keep < 1.0, 1.0, b.fresh))


def step(
    beliefs: list[Scalar], seconds: list[Scalar], forced: list[Scalar], told: list[Scalar], *, index: int | None,
    budgets: tuple[int, ...],
) -> tuple[list[Scalar], list[Scalar]]:  # fmt: skip
    """What a device does after a round with drafts, or a stretch of rounds without: it learns, and decides on the next.

    Args:
      beliefs, seconds, forced: see `Steering`.
      told: after a round with drafts its `settle.Evidence`, summed over slots; of rounds without, how many there were;
        before the first round `Steering.keep`.
      index: of the bucket that ran; None before the first round.
      budgets: of the buckets.

    Returns:
      The beliefs, and the index of the next bucket.
    """
    a, b, buckets = ON_DEVICE, unpack(beliefs), len(budgets)
    if index is None:
        b = renewed(b, told[0], a)
    elif index == 0:
        b = without_drafts(b, told[0], seconds, a)
    else:
        b = with_drafts(b, index, told[0], 1.0, told[1 : 1 + buckets], told[1 + buckets :], seconds, a)
    b, chosen = decide(b, seconds, budgets, index, a)
    return numbers_of(b), [a.where(forced[0] >= 0.0, forced[0], chosen)]

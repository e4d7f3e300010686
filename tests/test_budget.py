"""The adaptive budget: what it chooses, host and device alike, and that switching changes no token."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, SamplingParams, steering
from dflash_jax.budget import BudgetController, LatencyCurve, buckets_of
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.programs import Programs
from dflash_jax.round import RoundOutput, RoundSpec
from dflash_jax.scheduler import Scheduler
from dflash_jax.settle import Evidence, tell
from dflash_jax.steering import (
    EXPLORATION,
    MARGIN,
    ON_HOST,
    PLAIN_ROUNDS,
    STAY,
    Beliefs,
    choose,
    first_beliefs,
)
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tree import Tree, Walk, build_tree, walk
from pallas_kernels.scalars import kernel, reference
from tests.models import VOCAB, random_drafter, random_target

AR = SamplingParams(max_new_tokens=40, method="ar", ignore_eos=True)
AUTO = dataclasses.replace(AR, method="ddtree", tree_budget="auto")
BUCKETS = (0, 3, 7, 15)  # of a block of 8 on a CPU


# ---------------------------------------------------------------- the choice alone


def evidence(rounds: int, reached: list[float], predicted: list[float] | None = None) -> Evidence:
    """Of one slot; per-round means."""
    return Evidence(rounds * np.asarray([[1.0, *reached, *(predicted or reached)]], np.float32))


def one_round(controller: BudgetController, law: list[float], index: int) -> None:
    """The controller sees a round of this bucket of a text of which rounds of the buckets emit `law` tokens each."""
    controller.observe(index, evidence(1, [law[min(k, index)] for k in range(len(law))]) if index else None)


def settle(controller: BudgetController, law: list[float], rounds: int = 800, plain: int = 1) -> list[int]:
    """Buckets of so many rounds if rounds really emit `law` tokens each.

    Args:
      plain: rounds between two decisions where nothing drafts: 1 where the host decides, `PLAIN_ROUNDS` in bursts.
    """
    ran: list[int] = []
    while len(ran) < rounds:
        index = controller.next()
        for _ in range(1 if index else plain):
            one_round(controller, law, index)
            ran.append(index)
    return ran


def share(ran: list[int], index: int) -> float:
    """Share of the rounds of the later half that took this bucket."""
    late = ran[len(ran) // 2 :]
    return late.count(index) / len(late)


def beliefs(controller: BudgetController) -> Beliefs:
    return steering.unpack(np.asarray(controller.steering().beliefs).tolist())


by_either = pytest.mark.parametrize("plain", [1, PLAIN_ROUNDS], ids=["host", "burst"])


def test_choose_takes_most_tokens_a_second_and_the_smaller_of_equals():
    seconds = (1.0, 2.0, 2.5, 4.0)
    assert choose(seconds, [1, 1.9, 2.4, 3.9]) == 0
    assert choose(seconds, [1, 2.4, 3.1, 3.9]) == 2
    assert choose(seconds, [1, 2.0 * MARGIN, 2.5, 4.0]) == 0  # a draft that hardly gains is not worth the risk
    assert choose(seconds, [1, 2.1 * MARGIN, 2.5, 4.0]) == 1
    assert choose(seconds, [1, 2.4, 3.0, 4.8]) == 1
    assert choose(seconds, [1, 2.0, 2.6, 8.0]) == 3


def test_the_bucket_in_use_stays_unless_another_gains():
    seconds = (1.0, 2.0, 2.5, 4.0)
    tokens = [1, 2.4, 3.0 * (1 + 0.9 * (STAY - 1)), 4.0]
    assert choose(seconds, tokens) == choose(seconds, tokens, 0) == choose(seconds, tokens, 2) == 2
    assert choose(seconds, tokens, 1) == 1 and choose(seconds, [1, 2.4, 3.0 * 1.01 * STAY, 4.0], 1) == 2
    assert choose(seconds, [1, 2.0 * MARGIN * (1 + 0.9 * (STAY - 1)), 2.4, 3.0], 0) == 0


@pytest.mark.parametrize("seconds", [(1.0, 2.0), (1.0, 2.0, 3.0, 0.0)])
def test_a_curve_needs_a_positive_time_a_bucket(seconds: tuple[float, ...]):
    with pytest.raises(ValueError, match="positive time"):
        LatencyCurve(BUCKETS, seconds)
    with pytest.raises(ValueError, match="positive time"):
        LatencyCurve((3, 7), (1.0, 2.0))


def test_buckets_are_powers_of_two_of_rows():
    for slots in (1, 8):
        assert buckets_of(16, 5120, False, slots) == (0, 15, 31, 63)
        assert buckets_of(16, 5120, True, slots) == buckets_of(16, 256, True, slots) == (0, 7, 15, 31)
        assert buckets_of(2, 256, True, slots) == (0, 1, 3)
    assert buckets_of(16, 256, False, 1) == (0, 31) and buckets_of(16, 256, False, 2) == (0, 15, 31)


CPU_LIKE, GPU_LIKE = (1.0, 3.0, 4.0, 6.0), (1.0, 1.15, 1.2, 1.3)


@by_either
@pytest.mark.parametrize(
    ("seconds", "law", "best"),
    [
        (CPU_LIKE, [1, 1.3, 1.4, 1.5], 0),  # the chain does not pay
        (CPU_LIKE, [1, 3.9, 6.0, 7.0], 2),
        (GPU_LIKE, [1, 3.9, 6.0, 7.0], 3),
        (GPU_LIKE, [1, 3.9, 6.0, 6.05], 2),  # the extra verify time does not pay
        (GPU_LIKE, [1, 1.05, 1.06, 1.07], 0),
    ],
)
def test_the_controller_finds_the_best_bucket(seconds: tuple[float, ...], law: list[float], best: int, plain: int):
    """Nearly always, and where another one is often tried, it costs next to nothing."""
    ran = settle(BudgetController(LatencyCurve(BUCKETS, seconds)), law, rounds=4000, plain=plain)
    assert share(ran, best) > 0.85
    late = ran[len(ran) // 2 :]
    taken, emitted = (sum(row[index] for index in late) for row in (seconds, law))
    assert taken / emitted < (1 + 1.5 * EXPLORATION) * min(s / t for s, t in zip(seconds, law, strict=True))


@by_either
def test_it_follows_a_change_of_text_both_ways(plain: int):
    """Also back from autoregressive rounds, which say nothing about drafts: trials find out."""
    controller = BudgetController(LatencyCurve(BUCKETS, CPU_LIKE))
    easy, hard = [1, 3.9, 6.0, 7.0], [1, 1.2, 1.2, 1.2]
    for _ in range(2):
        assert share(settle(controller, easy, 4000, plain), 2) > 0.9
        assert share(settle(controller, hard, 4000, plain), 0) > 0.9


def test_a_text_that_turns_bad_loses_its_drafts_within_a_few_rounds():
    """The choice is made for each round: how long a mistake lasts is a matter of what rounds show alone."""
    controller = BudgetController(LatencyCurve(BUCKETS, CPU_LIKE))
    settle(controller, [1, 3.9, 6.0, 7.0])
    ran = settle(controller, [1, 1.2, 1.2, 1.2], 100)
    assert 0 < ran.index(0) < 25


@by_either
def test_trying_costs_a_small_share_of_the_time(plain: int):
    """Time per token on a text that is not worth a draft, against autoregressive decoding; and something is tried."""
    controller, law = BudgetController(LatencyCurve(BUCKETS, CPU_LIKE)), [1, 1.3, 1.3, 1.3]
    settle(controller, law, plain=plain)
    ran = settle(controller, law, 8000, plain)
    seconds, tokens = (sum(row[index] for index in ran) for row in (CPU_LIKE, law))
    assert 1.0 < seconds / tokens < 1.0 + 1.2 * EXPLORATION


def test_a_bucket_that_shows_itself_is_not_tried():
    """A round of the largest shows all: there is nothing to find out, so nothing is lost."""
    controller = BudgetController(LatencyCurve(BUCKETS, GPU_LIKE))
    ran = settle(controller, [1, 3.9, 6.0, 7.0], 1000)
    assert set(ran[200:]) == {3}


@by_either
def test_new_texts_are_looked_at_on_credit_and_no_more(plain: int):
    """Short texts that are not worth a draft: a look at each costs more than may be spent, so most get none."""
    controller, law = BudgetController(LatencyCurve(BUCKETS, CPU_LIKE)), [1, 1.3, 1.3, 1.3]
    settle(controller, law, plain=plain)
    looked, seconds, tokens = 0, 0.0, 0.0
    for _ in range(100):
        controller.new_request(1)
        ran = settle(controller, law, 48, plain)
        looked += ran[0] > 0
        seconds, tokens = seconds + sum(CPU_LIKE[i] for i in ran), tokens + sum(law[i] for i in ran)
    assert 10 < looked < 60
    assert seconds / tokens < 1.0 + 1.5 * EXPLORATION


def decode(controller: BudgetController, law: list[float], tokens: int = 160) -> dict[int, int]:
    """A text whose rounds emit `law` tokens each, in bursts; rounds by index of the bucket."""
    controller.new_request(1)
    left, taken = float(tokens), dict.fromkeys(range(len(law)), 0)
    while left > 0:
        index = controller.next()
        for _ in range(1 if index else PLAIN_ROUNDS):
            if left > 0:
                left -= law[index]
                taken[index] += 1
                one_round(controller, law, index)
    return taken


SMALL = LatencyCurve(BUCKETS, (0.26, 0.52, 0.62, 0.74))


def test_it_comes_back_to_drafts_after_many_texts_without():
    controller = BudgetController(SMALL)
    for _ in range(40):
        taken = decode(controller, [1, 1.3, 1.4, 1.5])
    assert taken[0] > 140
    late = [decode(controller, [1, 6.0, 7.0, 8.0]) for _ in range(20)][10:]
    assert all(taken[0] == 0 for taken in late)


def test_where_every_other_text_is_worth_drafts_each_gets_what_it_is_worth():
    controller = BudgetController(SMALL)
    good, bad = [], []
    for _ in range(40):
        bad.append(decode(controller, [1, 1.3, 1.4, 1.5]))
        good.append(decode(controller, [1, 6.0, 7.0, 8.0]))
    assert all(taken[0] <= PLAIN_ROUNDS for taken in good[10:])
    assert all(taken[0] > 100 for taken in bad[10:])


def test_predictions_are_scaled_by_what_came_true():
    """The drafter expects 4 tokens beside the bonus, one comes true; then it expects 8, of which two do.

    Prediction 2 for 4 rounds, seen 2 in one, usual 1 for 2 rounds: 12 in 7 rounds beside the bonus.
    """
    controller = BudgetController(LatencyCurve(BUCKETS, CPU_LIKE))
    for _ in range(50):
        controller.observe(1, evidence(8, [1, 2, 2, 2], [1, 5, 5, 5]))
    controller.new_request(1)
    controller.observe(1, evidence(1, [1, 3, 3, 3], [1, 9, 9, 9]))
    tokens = steering.expected_tokens(beliefs(controller), BUCKETS, ON_HOST)
    assert tokens[0] == 1 and tokens[1] == pytest.approx(1 + 12 / 7, abs=0.1)


def test_a_larger_tree_is_never_expected_to_emit_less():
    """Nested trees cannot, whatever a few rounds of one and old ones of the other suggest."""
    controller = BudgetController(LatencyCurve(BUCKETS, CPU_LIKE))
    for _ in range(20):
        controller.observe(3, evidence(1, [1, 1.5, 1.6, 1.7]))
    for _ in range(40):
        controller.observe(1, evidence(1, [1, 3.5, 3.5, 3.5]))
    tokens = steering.expected_tokens(beliefs(controller), BUCKETS, ON_HOST)
    assert tokens == sorted(tokens) and tokens[1] > 3


def test_the_weak_start_of_a_text_does_not_end_its_drafts():
    """Neither of the first text, of which nothing is known, nor of the next one after a good text."""
    controller = BudgetController(LatencyCurve(BUCKETS, (1.0, 1.5, 2.0, 3.0)))
    for _ in range(2):
        controller.new_request(1)
        index = controller.next()
        assert index > 0
        one_round(controller, [1, 1.2, 1.2, 1.2], index)
        assert controller.next() > 0
        settle(controller, [1, 4.2, 6.0, 7.0])


def test_a_new_request_forgets_its_share_of_the_texts_at_hand_and_nothing_else():
    controller = BudgetController(LatencyCurve(BUCKETS, GPU_LIKE))
    settle(controller, [1, 3.9, 6.0, 7.0], 50)
    before = beliefs(controller)
    controller.new_request(4)
    controller.new_request(4)
    handed = controller.steering()
    assert handed.keep == pytest.approx(0.5625) and controller.steering().keep == 1.0  # once
    after = steering.renewed(steering.unpack(np.asarray(handed.beliefs).tolist()), float(handed.keep), ON_HOST)
    for row in dataclasses.fields(before.short):
        old, new = getattr(before.short, row.name), getattr(after.short, row.name)
        assert new == pytest.approx([0.5625 * x for x in old]) and (max(old) > 1 or row.name == "rounds")
    assert (after.long, after.stale, after.credit, after.since) == (
        before.long, before.stale, before.credit, before.since,
    )  # fmt: skip
    assert (before.fresh, after.fresh) == (0.0, 1.0)


def test_rounds_of_the_host_and_bursts_share_what_they_have_learned():
    """What a burst hands back is what the host goes on with, and the other way round; a request is forgotten once."""
    controller = BudgetController(LatencyCurve(BUCKETS, GPU_LIKE))
    settle(controller, [1, 3.9, 6.0, 7.0], 50)
    known = controller.steering().beliefs
    other = BudgetController(controller.curve)
    other.steered(jnp.asarray(known))
    assert beliefs(other) == beliefs(controller)
    other.new_request(1)
    other.next()
    assert max(beliefs(other).short.rounds) == 0.0 and other.steering().keep == 1.0
    assert beliefs(other).long == beliefs(controller).long


# ---------------------------------------------------------------- host and device


def on_the_host(before: np.ndarray, seconds: np.ndarray, told: np.ndarray, index: int | None) -> list[float]:
    """What `steering.step` returns, by the host's own way through the same functions."""
    b, times, buckets = steering.unpack(before.tolist()), seconds.tolist(), len(BUCKETS)
    if index is None:
        b = steering.renewed(b, float(told[0]), ON_HOST)
    elif index == 0:
        b = steering.without_drafts(b, float(told[0]), times, ON_HOST)
    else:
        rounds, *sums = told.tolist()
        b = steering.with_drafts(b, index, rounds, 1.0, sums[:buckets], sums[buckets:], times, ON_HOST)
    b, chosen = steering.decide(b, times, BUCKETS, index, ON_HOST)
    return [*steering.numbers_of(b), chosen]


@functools.cache
def device_step(interpret: bool, index: int | None) -> Callable[..., jax.Array]:
    step = functools.partial(steering.step, index=index, budgets=BUCKETS)
    size = first_beliefs(len(BUCKETS)).size

    def run(known: jax.Array, seconds: jax.Array, told: jax.Array, forced: float = -1.0) -> jax.Array:
        arrays = (known, seconds, jnp.asarray(forced, jnp.float32)[None], told)
        if interpret:
            return jnp.concatenate(kernel.scalars(step, arrays, (size, 1), interpret=True))
        return jnp.concatenate(reference.scalars(step, *arrays))

    return jax.jit(run)


@pytest.mark.parametrize("interpret", [False, True], ids=["xla", "interpreted"])
def test_the_device_learns_and_decides_as_the_host_does(interpret: bool):
    """Random texts, good and bad, one to four slots, on random curves: the same numbers and the same buckets."""
    rng = np.random.default_rng(5)
    taken, trials = set(), 0
    for _ in range(6):
        seconds = (np.cumsum(rng.uniform(0.02, 1.0, len(BUCKETS))) + 0.5).astype(np.float32)
        known, index = first_beliefs(len(BUCKETS)), None
        for round_ in range(50):
            if round_ % 17 == 0:
                law, index = np.cumsum([1.0, *rng.exponential(rng.choice([0.05, 2.0]), len(BUCKETS) - 1)]), None
            slots = float(rng.integers(1, 5))
            if index is None:
                told = np.asarray([rng.choice([0.0, 0.75, 1.0])])
            elif index == 0:
                told = np.asarray([float(rng.integers(1, PLAIN_ROUNDS + 1))])
            else:
                reached = slots * np.minimum(law, law[index])
                told = np.concatenate([[slots], reached, reached * rng.uniform(0.5, 1.5)])
            told = told.astype(np.float32)
            found = np.asarray(device_step(interpret, index)(jnp.asarray(known), jnp.asarray(seconds), told))
            want = on_the_host(known, seconds, told, index)
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
            assert found[-1] == want[-1]
            known, index = found[:-1], int(found[-1])
            trials += steering.unpack(known.tolist()).owed > 0 and round_ % 17 != 0
            taken.add(index)
    assert taken == set(range(len(BUCKETS))) and trials > 0


@pytest.mark.parametrize("interpret", [False, True], ids=["xla", "interpreted"])
def test_a_forced_bucket_is_the_choice_and_changes_nothing_else(interpret: bool):
    arrays = [np.asarray(x, np.float32) for x in (first_beliefs(len(BUCKETS)), CPU_LIKE, [1.0])]
    free, forced = (np.asarray(device_step(interpret, None)(*arrays, bucket)) for bucket in (-1.0, 3.0))
    assert free[-1] != forced[-1] == 3 and np.array_equal(free[:-1], forced[:-1])


def test_a_trial_is_paid_for_when_it_has_run():
    """A burst that ends before a trial has run hands back beliefs that have not paid for it."""
    known = first_beliefs(len(BUCKETS))
    b = steering.unpack(known.tolist())
    b = dataclasses.replace(b, long=dataclasses.replace(b.long, rounds=[0.0, 9.0, 9.0, 9.0]), credit=5.0)
    known = np.asarray(steering.numbers_of(b), np.float32)
    arrays = [np.asarray(x, np.float32) for x in (known, CPU_LIKE, [1.0])]
    found = np.asarray(device_step(False, None)(*arrays))
    decided, index = steering.unpack(found[:-1].tolist()), int(found[-1])
    assert index > 0 and decided.owed > 0 and dataclasses.replace(decided, owed=-1.0) == b
    again = np.asarray(device_step(False, None)(found[:-1], *arrays[1:]))
    np.testing.assert_array_equal(again, found)
    sums = [1.0] * len(BUCKETS)
    ran = steering.with_drafts(decided, index, 1.0, 1.0, sums, sums, list(CPU_LIKE), ON_HOST)
    most = steering.SAVED * CPU_LIKE[1]
    assert ran.credit == pytest.approx(min(5.0 + EXPLORATION * CPU_LIKE[index], most) - decided.owed)
    assert (ran.owed, ran.since, ran.fresh) == (-1.0, 1.0, 0.0)


# ---------------------------------------------------------------- in the engine


@functools.cache
def engine() -> Engine:
    target = random_target(3)
    return Engine(
        target, random_drafter(target), Tokenizer.from_folder(BUNDLED_TARGET), max_slots=4, prefill_chunk=32
    )


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in (1, 33, 90)]


@functools.cache
def expected(tokens: int = AR.max_new_tokens) -> list[list[int]]:
    params = dataclasses.replace(AR, max_new_tokens=tokens)
    return [engine().generate([prompt], params)[0].token_ids for prompt in prompts()]


def likely(one: Engine, seconds: tuple[float, ...] = (1.0,) * len(BUCKETS)) -> None:
    """Its controllers begin anew, with a curve that no machine has measured."""
    for key in one.controllers:
        one.controllers[key] = BudgetController(LatencyCurve(BUCKETS, seconds))


class Bursts:
    """Steered bursts: of a plan their buckets and rounds, (index, rounds); what they returned."""

    def __init__(self):
        self.plan: Iterator[tuple[int, int]] | None = None
        self.outputs: list[RoundOutput] = []
        self.histograms: list[np.ndarray] = []


@pytest.fixture
def bursts(monkeypatch: pytest.MonkeyPatch) -> Bursts:
    """Every bucket in turn where the test has a plan: each burst forces one."""
    found, own = Bursts(), Programs.decode

    def decode(self: Programs, state, max_rounds, spec, *rest, steering=None, compile_only=False, **options):
        planned = steering is not None and not compile_only and steering.forced < 0
        if planned and found.plan is not None:
            index, max_rounds = next(found.plan)
            steering = dataclasses.replace(steering, forced=np.asarray(index, np.float32))
        result = own(
            self, state, max_rounds, spec, *rest, steering=steering, compile_only=compile_only, **options
        )
        if planned and result is not None:
            results, beliefs = result[1]
            output, histogram = results.fetch()
            # A copy: the next burst takes them.
            found.outputs.append(dataclasses.replace(output, beliefs=np.array(beliefs)))
            found.histograms.append(histogram)
        return result

    monkeypatch.setattr(Programs, "decode", decode)
    return found


def test_tokens_are_autoregressive_while_every_burst_takes_another_bucket(bursts: Bursts):
    """So many autoregressive rounds among them that the waiting taps are written in between."""
    engine().generate(prompts(), AUTO)
    likely(engine())
    compiled = engine().programs.compile_seconds
    bursts.outputs.clear()
    bursts.histograms.clear()
    plan = [(3, 2), (0, 3), (1, 1), (0, 3), (0, 10), (2, 2), (3, 1)]
    bursts.plan = itertools.cycle(plan)
    results = engine().generate(prompts(), AUTO)
    assert engine().programs.compile_seconds == compiled  # no round compiles
    assert [r.token_ids for r in results] == expected()
    for r in results:
        assert sum(r.tree_budgets.values()) == r.rounds == sum(r.accepted_length_histogram)
        assert set(r.tree_budgets) == set(BUCKETS)
        assert r.tree_budgets[r.tree_budget] == max(r.tree_budgets.values())
    before = np.zeros_like(bursts.histograms[0])
    ran = zip(itertools.cycle(plan), bursts.outputs, bursts.histograms, strict=False)
    for (index, rounds), output, histogram in ran:
        assert output.used is not None
        # Rounds of a slot are those in which it was active, all of the bucket; none ran on after the burst's last one.
        assert output.used[: len(results), index].tolist() == (histogram - before).sum(1)[: len(results)].tolist()
        assert output.used.sum() == output.used[:, index].sum() and output.used.max() <= rounds
        before = histogram


# Every bucket comes after every other.
TURNS = (0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3)


@functools.cache
def other_engine() -> Engine:
    """Of the same models, for programs that no other test may get."""
    return Engine(engine().target, engine().drafter, engine().tokenizer, max_slots=4, prefill_chunk=32)


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose device takes the buckets of TURNS, one after the other, whatever rounds show.

    It counts its decisions in the hundreds of `since`, which no round reaches.
    """
    expected(LONG.max_new_tokens)

    def decide(b, seconds, budgets, used, a):
        number = jnp.floor(b.since / 100)
        turn = number - len(TURNS) * jnp.floor(number / len(TURNS))
        chosen = sum((turn == float(i)) * float(bucket) for i, bucket in enumerate(TURNS))
        return dataclasses.replace(b, since=100 * (number + 1)), chosen

    monkeypatch.setattr(steering, "decide", decide)
    # Few enough that a text sees all turns, more plain ones than taps can wait.
    monkeypatch.setattr(steering, "PLAIN_ROUNDS", 12)
    return other_engine()


LONG = dataclasses.replace(AUTO, max_new_tokens=130)


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_are_autoregressive_while_buckets_change_within_a_burst(turning: Engine, batch: int, bursts: Bursts):
    """In every order, each round of all slots the bucket that is due: taps, caches and drafts fit together."""
    results = turning.generate(prompts()[:batch], LONG)
    assert len(bursts.outputs) == 1
    assert [r.token_ids for r in results] == expected(LONG.max_new_tokens)[:batch]
    (output,) = bursts.outputs
    assert output.used is not None
    for row, r in enumerate(results):
        assert r.tree_budgets == dict(zip(BUCKETS, output.used[row].tolist(), strict=True))
        assert sum(r.tree_budgets.values()) == r.rounds == sum(r.accepted_length_histogram)
    # A whole turn, at least; and rounds without a draft come several at a time.
    used = output.used.max(axis=0)
    assert all(used[bucket] >= TURNS.count(bucket) for bucket in range(1, len(BUCKETS)))
    assert used[0] > 2 * TURNS.count(0)


@pytest.mark.parametrize("first", [0, 1])
def test_two_buckets_take_turns_as_more_do(first: int, monkeypatch: pytest.MonkeyPatch, bursts: Bursts):
    """As a GPU with one slot has for a narrow model; a burst begins with either."""
    expected(LONG.max_new_tokens)

    def decide(b, seconds, budgets, used, a):
        number = jnp.floor(b.since / 100)
        turn = number + first - 2 * jnp.floor((number + first) / 2)
        return dataclasses.replace(b, since=100 * (number + 1)), turn

    monkeypatch.setattr(steering, "decide", decide)
    monkeypatch.setattr(steering, "PLAIN_ROUNDS", 12)
    monkeypatch.setattr("dflash_jax.engine.buckets_of", lambda *_: (0, 7))
    one = Engine(engine().target, engine().drafter, engine().tokenizer, max_slots=4, prefill_chunk=32)
    results = one.generate(prompts()[:1], LONG)
    assert len(bursts.outputs) == 1
    assert [r.token_ids for r in results] == expected(LONG.max_new_tokens)[:1]
    assert set(results[0].tree_budgets) == {0, 7} and all(n > 2 for n in results[0].tree_budgets.values())


def test_tokens_of_plain_rounds_have_no_rank_and_none_is_reported(turning: Engine):
    """`on_ranks` hears of every token of a round that drafted, and of no other."""
    heard: list[int] = []
    turning.on_ranks = lambda number, ranks: heard.extend(ranks)
    try:
        (r,) = turning.generate(prompts()[:1], LONG)
    finally:
        turning.on_ranks = None
    assert r.token_ids == expected(LONG.max_new_tokens)[0] and r.tree_budgets[0] > 0
    # A plain round has one token, and the prompt has given the first.
    assert len(heard) == r.completion_tokens - 1 - r.tree_budgets[0] > 0
    assert min(heard) >= -1


def test_a_burst_chooses_by_its_curve_and_hands_back_what_it_learned(bursts: Bursts):
    """Drafts of a random drafter do not pay where rounds with them cost twice, once `GRACE` of them have been seen."""
    engine().generate(prompts()[:1], AUTO)
    for seconds, often in (((1.0, 2.0, 2.2, 2.5), 0), ((9.0, 2.0, 2.2, 9.0), 1)):
        likely(engine(), seconds)
        bursts.outputs.clear()
        (r,) = engine().generate(prompts()[:1], dataclasses.replace(AUTO, max_new_tokens=100))
        assert r.token_ids[:40] == expected()[0] and len(bursts.outputs) == 1
        (controller,) = [c for c in engine().controllers.values() if beliefs(c) != beliefs(BudgetController(c.curve))]
        known = beliefs(controller)
        np.testing.assert_array_equal(controller.steering().beliefs, bursts.outputs[0].beliefs)
        drafts = sum(count for budget, count in r.tree_budgets.items() if budget)
        # A stretch of rounds fades what was before it, not itself.
        assert known.long.rounds[1] == pytest.approx(sum(steering.LONG_MEMORY**i for i in range(drafts)), rel=0.05)
        assert r.tree_budget == BUCKETS[often] and drafts >= 4


def test_beliefs_survive_a_request_and_the_next_one_forgets_its_own_text_alone(bursts: Bursts):
    engine().generate(prompts()[:1], AUTO)
    likely(engine())
    bursts.plan = itertools.repeat((3, 100))
    engine().generate(prompts()[:1], AUTO)
    first = steering.unpack(bursts.outputs[-1].beliefs.tolist())  # type: ignore[union-attr]
    bursts.plan = itertools.repeat((0, 100))
    engine().generate(prompts()[:1], AUTO)
    second = steering.unpack(bursts.outputs[-1].beliefs.tolist())  # type: ignore[union-attr]
    assert min(first.long.rounds) > 1 and min(first.short.rounds) > 1
    assert second.long == first.long and set(second.short.rounds) == {0.0}
    assert (first.stale, second.stale) == ([0.0] * len(BUCKETS), [1.0] * len(BUCKETS))


def test_rounds_without_drafts_age_what_is_known_of_the_text_by_their_number(bursts: Bursts):
    """Ten of them by ten, though they run in stretches; what is known of all texts does not age."""
    engine().generate(prompts()[:1], AUTO)
    likely(engine())
    bursts.outputs.clear()
    bursts.plan = itertools.chain([(3, 2), (0, 10)], itertools.repeat((3, 100)))
    engine().generate(prompts()[:1], AUTO)
    before, after = (steering.unpack(x.beliefs.tolist()) for x in bursts.outputs[:2])  # type: ignore[union-attr]
    for row in dataclasses.fields(before.short):
        old, new = getattr(before.short, row.name), getattr(after.short, row.name)
        assert new == pytest.approx([x * steering.SHORT_MEMORY**10 for x in old], rel=1e-5)
    assert before.short.rounds[3] == pytest.approx(1 + steering.SHORT_MEMORY) and after.long == before.long
    assert bursts.outputs[1].used is not None and bursts.outputs[1].used.max() == 10


def test_a_burst_that_failed_and_took_the_beliefs_with_it_is_got_over():
    """They begin anew; that they were handed over must not fail every later burst too."""
    engine().generate(prompts()[:1], AUTO)
    likely(engine())
    engine().generate(prompts()[:1], AUTO)
    for controller in engine().controllers.values():
        numbers = controller.steering().beliefs
        if isinstance(numbers, jax.Array):
            numbers.delete()
    (r,) = engine().generate(prompts()[:1], AUTO)
    assert r.token_ids == expected()[0]


def test_a_burst_without_rounds_hands_back_what_it_was_handed(bursts: Bursts):
    """Its first decision is not paid for: the next burst decides anew, and a look at the new text is still due."""
    engine().generate(prompts()[:1], AUTO)
    likely(engine())
    bursts.plan = itertools.chain([(3, 0)], itertools.repeat((3, 100)))
    bursts.outputs.clear()
    (r,) = engine().generate(prompts()[:1], AUTO)
    assert r.token_ids == expected()[0]
    known = steering.unpack(bursts.outputs[0].beliefs.tolist())
    np.testing.assert_array_equal(
        steering.numbers_of(dataclasses.replace(known, owed=-1.0)), first_beliefs(len(BUCKETS))
    )
    assert bursts.outputs[0].used is not None and not bursts.outputs[0].used.any()


def test_autoregressive_rounds_leave_the_drafters_context_as_trees_do(bursts: Bursts):
    """Drafts after a switch are those of an engine that never switched: the same rounds come out."""
    prompt = prompts()[1]
    bursts.plan = itertools.repeat((3, 100))
    engine().generate([prompt[::-1]], AUTO)  # whatever pages keep of this prompt from tests before is gone
    likely(engine())
    bursts.plan = itertools.chain([(0, 2), (0, 11)], itertools.repeat((3, 100)))
    engine().generate([prompt], dataclasses.replace(AUTO, max_new_tokens=30))
    switched = steering.unpack(bursts.outputs[-1].beliefs.tolist())  # type: ignore[union-attr]
    # The first 13 of its tokens are part of the prompt of a request that drafts from its first round.
    likely(engine())
    bursts.plan = itertools.repeat((3, 100))
    engine().generate([prompt + expected()[1][:13]], dataclasses.replace(AUTO, max_new_tokens=17))
    straight = steering.unpack(bursts.outputs[-1].beliefs.tolist())  # type: ignore[union-attr]
    assert min(straight.long.predicted[1:]) > 1e-3
    for row in dataclasses.fields(straight.long):
        np.testing.assert_allclose(getattr(switched.long, row.name), getattr(straight.long, row.name), rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_a_round_tells_what_smaller_budgets_emit(seed: int):
    """Against trees of those budgets, built and walked for themselves."""
    rng = np.random.default_rng(seed)
    slots, length = 16, 7
    log_probs = jax.nn.log_softmax(2.0 * rng.normal(size=(slots, length, VOCAB)).astype(np.float32))
    ranked = np.argsort(-log_probs, axis=2)
    ranks = rng.choice(4, p=[0.6, 0.2, 0.1, 0.1], size=(slots, length))
    text = np.take_along_axis(ranked, ranks[:, :, None], axis=2)[:, :, 0]
    text = np.pad(text, ((0, 0), (0, 1)))  # the target's token after a row is a matter of its depth
    spec = RoundSpec(15, 8, buckets=BUCKETS)

    @functools.partial(jax.jit, static_argnums=0)
    def one(budget: int) -> tuple[Tree, Walk]:
        tree = build_tree(jnp.zeros((slots,), jnp.int32), log_probs, budget)
        return tree, walk(tree, jnp.take_along_axis(jnp.asarray(text), tree.depths, axis=1))

    active = np.arange(slots) != 5
    found = tell(jnp.asarray(active), *one(15), spec.buckets)
    assert np.array_equal(found.rounds, active)
    for k, budget in enumerate(BUCKETS[1:], 1):
        tree, walked = one(budget)
        assert np.array_equal(found.reached[:, k], walked.count * active)
        assert tree.log_probs is not None
        expected_tokens = np.where(tree.valid, np.exp(tree.log_probs), 0).sum(1)
        np.testing.assert_allclose(found.predicted[:, k], expected_tokens * active, rtol=1e-4)
        # Node by node from the marginals: the scores are those of the prefixes.
        prefix = np.zeros(tree.tokens.shape)
        for row in range(1, tree.tokens.shape[1]):
            parent = tree.parents[:, row]
            edge = log_probs[np.arange(slots), tree.depths[:, row] - 1, tree.tokens[:, row]]
            prefix[:, row] = prefix[np.arange(slots), parent] + edge
        np.testing.assert_allclose(tree.log_probs, prefix, atol=1e-4)
    assert np.array_equal(found.reached[:, 0], active) and np.array_equal(found.predicted[:, 0], active)
    assert (found.reached[:, 3] > found.reached[:, 1]).any()


def test_the_curve_is_measured_once_a_shape_and_fixed_budgets_need_none(monkeypatch: pytest.MonkeyPatch):
    """Nothing compiles for it: rounds are timed by the program that then serves, with a bucket forced."""
    fresh = Engine(engine().target, engine().drafter, engine().tokenizer, max_slots=4, prefill_chunk=32)
    fresh.programs = engine().programs
    forced = []
    decode = Programs.decode

    def noted(self: Programs, *arguments, steering=None, compile_only=False, **options):
        if not compile_only:
            forced.append(None if steering is None else int(steering.forced))
        return decode(self, *arguments, steering=steering, compile_only=compile_only, **options)

    monkeypatch.setattr(Programs, "decode", noted)
    first = fresh.generate(prompts()[:1], AUTO)[0]
    assert first.token_ids == expected()[0]
    (controller,) = fresh.controllers.values()
    assert controller.curve.buckets == BUCKETS and min(controller.curve.seconds) > 0
    assert set(forced) == {-1, *range(len(BUCKETS))} and forced.count(0) == forced.count(3) > 1
    forced.clear()
    again = fresh.generate(prompts()[:1], AUTO)[0]
    assert again.compile_seconds == 0.0 and again.token_ids == expected()[0]
    # Of a burst that is not known to be the last one a second follows on its heels.
    assert set(forced) == {-1} and len(forced) <= 2 and list(fresh.controllers.values()) == [controller]
    forced.clear()
    fixed = fresh.generate(prompts()[:1], dataclasses.replace(AUTO, tree_budget=7))[0]
    assert fixed.tree_budgets == {7: fixed.rounds} and len(fresh.controllers) == 1 and set(forced) == {None}


def test_a_measured_curve_tells_slow_buckets_from_fast_ones(monkeypatch: pytest.MonkeyPatch):
    """Seconds of a round, not of a call: every call waits, which is not counted, and each round of bucket 2 does."""
    now, decode = [0.0], Programs.decode

    def slow(self: Programs, state, max_rounds, *rest, steering=None, compile_only=False, **options):
        result = decode(self, state, max_rounds, *rest, steering=steering, compile_only=compile_only, **options)
        if result is not None and steering is not None and steering.forced >= 0:
            now[0] += 5.0 + int(max_rounds) * (3.0 if steering.forced == 2 else 1.0)
        return result

    monkeypatch.setattr(Programs, "decode", slow)
    monkeypatch.setattr("dflash_jax.budget.time.perf_counter", lambda: now[0])
    fresh = Engine(engine().target, engine().drafter, engine().tokenizer, max_slots=4, prefill_chunk=32)
    fresh.programs = engine().programs
    fresh.generate(prompts()[:1], AUTO)
    (controller,) = fresh.controllers.values()
    np.testing.assert_allclose(controller.curve.seconds, [1, 1, 3, 1])


def test_rounds_handed_over_one_by_one_teach_the_host_what_a_burst_teaches_the_device(bursts: Bursts):
    """The same rounds of one text, as `generate` decodes and as a server does: alike in tokens, buckets and beliefs."""
    turns = [3, 1, 0, 2, 2, 0, 0, 3]  # surplus rounds at the end draft, so that nobody takes them for any
    engine().generate(prompts()[1:2], AUTO)  # which measures
    likely(engine())
    bursts.plan = ((index, 1) for index in itertools.chain(turns, itertools.repeat(3)))
    (burst,) = engine().generate(prompts()[1:2], AUTO)
    device = bursts.outputs[-1].beliefs
    one = Scheduler(engine(), 1, 512, burst=1, interleave=True)
    request, done = engine().request(prompts()[1], AUTO), None
    host = BudgetController(LatencyCurve(BUCKETS, (1.0,) * len(BUCKETS)))
    host.next = itertools.chain(turns, itertools.repeat(3)).__next__  # type: ignore[method-assign]
    one.submit(request)
    while request.slot is None:
        assert not one.step()
    engine().controllers[one.curve_key(request.spec)] = host
    while one.busy:
        for _, chunk in one.step():
            done = chunk.completion or done
    likely(engine())
    one.close()
    assert done is not None and done.token_ids == burst.token_ids == expected()[1]
    assert done.tree_budgets == burst.tree_budgets and set(done.tree_budgets) == set(BUCKETS)
    assert device is not None and device[: 5 * len(BUCKETS)].max() > 1
    sums = slice(10 * len(BUCKETS))
    np.testing.assert_allclose(np.asarray(host.steering().beliefs)[sums], device[sums], rtol=1e-3, atol=1e-5)

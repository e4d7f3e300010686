"""The adaptive budget: what it chooses, that its statistics are right, and that switching changes no token."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, SamplingParams
from dflash_jax.budget import LONGEST_BURST, PATIENCE, BudgetController, LatencyCurve, buckets_of, choose
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.programs import Programs
from dflash_jax.round import RoundSpec
from dflash_jax.settle import Evidence, tell
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tree import Tree, Walk, build_tree, walk
from tests.models import VOCAB, random_drafter, random_target

AR = SamplingParams(max_new_tokens=40, method="ar", ignore_eos=True)
AUTO = dataclasses.replace(AR, method="ddtree", tree_budget="auto")
BUCKETS = (0, 3, 7, 15)  # of a block of 8 on a CPU


# ---------------------------------------------------------------- the choice alone


def evidence(rounds: int, reached: list[float], predicted: list[float] | None = None) -> Evidence:
    """Of one slot; per-round means."""
    table = [rounds * np.asarray([row], np.float32) for row in (reached, predicted or reached)]
    return Evidence(np.asarray([rounds]), *table)  # type: ignore[arg-type]


def lasting(controller: BudgetController, rounds: int, rate: float) -> int:
    """Rounds that the device runs of a burst if each emits so many tokens."""
    pace, grace = controller.pace
    return next((n for n in range(1, rounds) if n * rate < n * pace - grace), rounds)


def settle(
    controller: BudgetController, law: list[float], bursts: int = 60, most: int = 256
) -> list[tuple[int, int]]:
    """What runs, (index, rounds), if rounds of the buckets really emit `law` tokens each."""
    ran = []
    for _ in range(bursts):
        index, rounds = controller.next(most)
        assert 1 <= rounds <= most
        rounds = lasting(controller, rounds, law[index])
        ran.append((index, rounds))
        controller.ran(index, rounds)
        if index:
            seen = [law[min(k, index)] for k in range(len(law))]
            controller.observe(index, evidence(rounds, seen))
    return ran


def share(ran: list[tuple[int, int]], index: int) -> float:
    """Share of the rounds of the later half that took this bucket."""
    late = ran[len(ran) // 2 :]
    return sum(r for i, r in late if i == index) / sum(r for _, r in late)


def test_choose_takes_most_tokens_a_second_and_the_smaller_of_equals():
    curve = LatencyCurve(BUCKETS, (1.0, 2.0, 2.5, 4.0))
    assert choose(curve, [1, 1.9, 2.4, 3.9]) == 0
    assert choose(curve, [1, 2.4, 3.1, 3.9]) == 2
    assert choose(curve, [1, 2.1, 2.5, 4.0]) == 0  # a draft that hardly gains is not worth the risk
    assert choose(curve, [1, 2.4, 3.0, 4.8]) == 1
    assert choose(curve, [1, 2.0, 2.6, 8.0]) == 3


@pytest.mark.parametrize("seconds", [(1.0, 2.0), (1.0, 2.0, 3.0, 0.0)])
def test_a_curve_needs_a_positive_time_a_bucket(seconds: tuple[float, ...]):
    with pytest.raises(ValueError, match="positive time"):
        LatencyCurve(BUCKETS, seconds)
    with pytest.raises(ValueError, match="positive time"):
        LatencyCurve((3, 7), (1.0, 2.0))


def test_buckets_are_the_chain_and_powers_of_two_of_rows():
    assert buckets_of(16, on_cpu=False) == (0, 15, 31, 63)
    assert buckets_of(16, on_cpu=True) == (0, 7, 15, 31)
    assert buckets_of(2, on_cpu=True) == (0, 1, 3)


CPU_LIKE, GPU_LIKE = (1.0, 3.0, 4.0, 6.0), (1.0, 1.15, 1.2, 1.3)


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
def test_the_controller_finds_the_best_bucket(seconds: tuple[float, ...], law: list[float], best: int):
    ran = settle(BudgetController(LatencyCurve(BUCKETS, seconds)), law)
    assert share(ran, best) > 0.85


def test_it_follows_a_change_of_text_both_ways():
    """Also back from autoregressive rounds, which say nothing about drafts: trials find out."""
    controller = BudgetController(LatencyCurve(BUCKETS, CPU_LIKE))
    easy, hard = [1, 3.9, 6.0, 7.0], [1, 1.2, 1.2, 1.2]
    for _ in range(2):
        assert share(settle(controller, easy, bursts=200), 2) > 0.85
        assert share(settle(controller, hard, bursts=200), 0) > 0.85


@pytest.mark.parametrize(("bursts", "most"), [(8, 256), (200, 1)])
def test_trying_costs_a_small_share_of_the_time(bursts: int, most: int):
    """Time per token on text that is not worth a draft, many requests long, against autoregressive decoding.

    Also where every burst is one round, as in a server.
    """
    controller, law = BudgetController(LatencyCurve(BUCKETS, CPU_LIKE)), [1, 1.3, 1.3, 1.3]
    settle(controller, law)
    seconds = tokens = 0.0
    for _ in range(20):
        controller.new_request(1)
        for index, rounds in settle(controller, law, bursts, most):
            seconds += rounds * CPU_LIKE[index]
            tokens += rounds * law[index]
    assert 1.0 < seconds / tokens < 1.04  # above 1: something was tried


def decode(controller: BudgetController, law: list[float], tokens: int = 160) -> dict[int, int]:
    """A text whose rounds emit `law` tokens each; rounds by index of the bucket."""
    controller.new_request(1)
    left, taken = float(tokens), dict.fromkeys(range(len(law)), 0)
    while left > 0:
        index, rounds = controller.next(256)
        rounds = min(lasting(controller, rounds, law[index]), int(np.ceil(left / law[index])))
        left -= rounds * law[index]
        taken[index] += rounds
        if index:
            controller.observe(index, evidence(rounds, [law[min(k, index)] for k in range(len(law))]))
        controller.ran(index, rounds)
    return taken


SLOW_START = LatencyCurve(BUCKETS, (0.26, 0.52, 0.62, 0.74), start=1.5)  # a start costs six rounds


def test_it_comes_back_to_drafts_after_many_texts_without():
    controller = BudgetController(SLOW_START)
    for _ in range(40):
        taken = decode(controller, [1, 1.3, 1.4, 1.5])
    assert taken[0] > 100
    late = [decode(controller, [1, 6.0, 7.0, 8.0]) for _ in range(20)][10:]
    assert all(taken[0] == 0 for taken in late)


def test_what_drafts_save_pays_for_looking_at_new_texts():
    """Where every other text is worth drafts, nearly each of those gets them, and the others give them up."""
    controller = BudgetController(SLOW_START)
    good, bad = [], []
    for _ in range(40):
        bad.append(decode(controller, [1, 1.3, 1.4, 1.5]))
        good.append(decode(controller, [1, 6.0, 7.0, 8.0]))
    drafted = [taken for taken in good[10:] if taken[0] < 20]
    assert len(drafted) > 0.8 * len(good[10:])
    assert all(taken[0] > 80 for taken in bad[10:])


def test_predictions_are_scaled_by_what_came_true():
    """The drafter expects 4 tokens beside the bonus, one comes true; then it expects 8, of which two do.

    Prediction 2 for 2 rounds, seen 2 in one, usual 1 for 3 rounds: 1.5 beside the bonus.
    """
    controller = BudgetController(LatencyCurve(BUCKETS, CPU_LIKE))
    for _ in range(50):
        controller.observe(1, evidence(8, [1, 2, 2, 2], [1, 5, 5, 5]))
    controller.new_request(1)
    controller.observe(1, evidence(1, [1, 3, 3, 3], [1, 9, 9, 9]))
    assert controller.expected_tokens()[1] == pytest.approx(2.5, abs=0.15)


def test_the_weak_start_of_a_text_does_not_end_its_drafts():
    """Neither of the first text, of which nothing is known, nor of the next one after a good text."""
    controller = BudgetController(LatencyCurve(BUCKETS, (1.0, 1.5, 2.0, 3.0)))
    for _ in range(2):
        controller.new_request(1)
        index, rounds = controller.next(256)
        controller.observe(index, evidence(lasting(controller, rounds, 1.2), [1, 1.2, 1.2, 1.2]))
        assert controller.next(256)[0] > 0
        settle(controller, [1, 4.2, 6.0, 7.0])


def test_bursts_grow_while_the_choice_stays():
    controller = BudgetController(LatencyCurve(BUCKETS, GPU_LIKE))
    lengths = [rounds for _, rounds in settle(controller, [1, 3.9, 6.0, 7.0], bursts=12)]
    assert lengths[0] < LONGEST_BURST == lengths[-1]


TINY = LatencyCurve(BUCKETS, (1.0, 2.2, 2.7, 3.1), start=20.0)  # a burst starts in the time of 20 plain rounds


@pytest.mark.parametrize(("law", "floor"), [([1, 1.3, 1.4, 1.5], 0.96), ([1, 3.9, 6.0, 6.2], 0.97)])
def test_bursts_are_long_where_starting_one_is_expensive(law: list[float], floor: float):
    """Many texts of 200 tokens each, against the best fixed bucket in one burst a text."""
    controller = BudgetController(TINY)
    seconds = []
    for _ in range(60):
        controller.new_request(1)
        left, spent = 200.0, 0.0
        while left > 0:
            index, rounds = controller.next(256)
            # The device stops at the end of the text.
            rounds = min(lasting(controller, rounds, law[index]), int(np.ceil(left / law[index])))
            spent += TINY.start + rounds * TINY.seconds[index]
            left -= rounds * law[index]
            controller.ran(index, rounds)
            if index:
                controller.observe(index, evidence(rounds, [law[min(k, index)] for k in range(len(law))]))
        seconds.append(spent)
    best = min(TINY.start + np.ceil(200 / t) * s for t, s in zip(law, TINY.seconds, strict=True))
    assert best / np.mean(seconds[20:]) > floor
    assert TINY.with_start(1).seconds[0] == 21.0 and TINY.rounds_for(0, 0.2) == 100 < TINY.rounds_for(0, 0.05)


def test_a_wrong_curve_is_corrected_and_a_busy_machine_is_not_taken_for_one():
    controller = BudgetController(LatencyCurve(BUCKETS, CPU_LIKE))
    for step in range(400):  # bucket 2 really takes twice what was measured, on a machine that is now 3 times slower
        index = step // 4 % 4
        controller.timed(index, 8 * 3 * CPU_LIKE[index] * (2 if index == 2 else 1), 8)
    seconds = np.asarray(controller.curve.seconds) / controller.curve.seconds[0]
    np.testing.assert_allclose(seconds, [1, 3, 8, 6], rtol=0.1)
    assert share(settle(controller, [1, 3.9, 6.0, 5.9]), 1) > 0.85


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
def expected() -> list[list[int]]:
    return [engine().generate([prompt], AR)[0].token_ids for prompt in prompts()]


class Forced(BudgetController):
    """Takes every bucket in turn; so many autoregressive rounds that the waiting taps are written in between."""

    def __init__(self):
        super().__init__(LatencyCurve(BUCKETS, (1.0,) * len(BUCKETS)))
        self.plan = itertools.cycle([(3, 2), (0, 3), (1, 1), (0, 3), (0, 10), (2, 2), (3, 1)])
        self.seen: list[tuple[int, Evidence]] = []
        self.times: list[tuple[int, float]] = []

    def next(self, most: int) -> tuple[int, int]:
        return next(self.plan)

    def unsure(self) -> bool:
        return False

    def timed(self, index: int, seconds: float, rounds: int) -> None:
        self.times.append((index, seconds))

    def observe(self, index: int, evidence: Evidence) -> None:
        self.seen.append((index, evidence))
        super().observe(index, evidence)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Forced:
    class Always(dict):
        def __contains__(self, key: object) -> bool:
            return True

        def __missing__(self, key: object) -> Forced:
            return controller

    controller = Forced()
    monkeypatch.setattr(engine(), "controllers", Always())
    return controller


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_are_autoregressive_while_buckets_change(forced: Forced, batch: int):
    engine().generate(prompts()[:batch], AUTO)
    compiled = engine().programs.compile_seconds
    results = engine().generate(prompts()[:batch], AUTO)
    assert engine().programs.compile_seconds == compiled  # no round compiles
    assert [r.token_ids for r in results] == expected()[:batch]
    for r in results:
        assert sum(r.tree_budgets.values()) == r.rounds == sum(r.accepted_length_histogram)
        assert set(r.tree_budgets) == set(BUCKETS)
        assert r.tree_budgets[r.tree_budget] == max(r.tree_budgets.values())


def test_a_burst_that_falls_behind_ends_by_itself(forced: Forced, monkeypatch: pytest.MonkeyPatch):
    """Three tokens a round are due from the fourth round on, which random models do not reach; one always is."""
    forced.plan = itertools.cycle([(1, 16)])
    rounds = []
    monkeypatch.setattr(forced, "ran", lambda index, count: rounds.append(count))
    for pace, longest in (((3.0, 6.0), 4), ((1.0, 0.0), 16)):
        rounds.clear()
        monkeypatch.setattr(Forced, "pace", pace)
        assert [r.token_ids for r in engine().generate(prompts()[:1], AUTO)] == expected()[:1]
        assert max(rounds) == longest


def test_the_pace_is_that_of_plain_decoding():
    controller = BudgetController(LatencyCurve(BUCKETS, (1.0, 2.5, 3.0, 4.0)))
    settle(controller, [1, 6.0, 6.1, 6.2])
    assert controller.next(256)[0] == 1 and controller.pace == (2.5, PATIENCE * 1.5)
    settle(controller, [1, 1.1, 1.1, 1.1])
    assert controller.next(256)[0] == 0 and controller.pace == (0.0, 0.0)
    cheap = BudgetController(LatencyCurve(BUCKETS, (1.0, 0.9, 3.0, 4.0)))  # whatever it emits, a draft pays
    assert cheap.next(256)[0] == 1 and cheap.pace == (0.0, 0.0)


def test_autoregressive_rounds_leave_the_drafters_context_as_trees_do(forced: Forced):
    """Drafts after a switch are those of an engine that never switched: the same rounds come out."""
    forced.plan = itertools.chain([(0, 2), (0, 11)], itertools.repeat((3, 100)))
    prompt = prompts()[1]
    engine().generate([prompt], dataclasses.replace(AUTO, max_new_tokens=30))
    switched = forced.seen[0][1]
    # The first 13 of its tokens are part of the prompt of a request that drafts from its first round.
    forced.seen.clear()
    forced.plan = itertools.repeat((3, 100))
    engine().generate([prompt + expected()[1][:13]], dataclasses.replace(AUTO, max_new_tokens=17))
    straight = forced.seen[0][1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), switched, straight)


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
    fresh = Engine(engine().target, engine().drafter, engine().tokenizer, max_slots=4, prefill_chunk=32)
    fresh.programs = engine().programs
    calls = []
    decode = Programs.decode
    monkeypatch.setattr(Programs, "decode", lambda self, *a, **k: calls.append(a) or decode(self, *a, **k))
    first = fresh.generate(prompts()[:1], AUTO)[0]
    assert first.token_ids == expected()[0]
    (controller,) = fresh.controllers.values()
    assert controller.curve.buckets == BUCKETS and min(controller.curve.seconds) > 0
    timed = len(calls)
    again = fresh.generate(prompts()[:1], AUTO)[0]
    assert again.compile_seconds == 0.0 and again.token_ids == expected()[0]
    assert len(calls) - timed < timed and list(fresh.controllers.values()) == [controller]
    fixed = fresh.generate(prompts()[:1], dataclasses.replace(AUTO, tree_budget=7))[0]
    assert fixed.tree_budgets == {7: fixed.rounds} and len(fresh.controllers) == 1

"""Functions of scalars as one launch: the kernel, its reference and plain Python say the same."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import steering
from pallas_kernels.dispatch import UnsupportedError, recording
from pallas_kernels.scalars import kernel, reference, scalars
from pallas_kernels.scalars.api import MAX_NUMBERS
from pallas_kernels.scalars.shapes import BUDGETS, cases

IMPLEMENTATIONS = [
    reference.scalars,
    lambda function, *arrays, results: kernel.scalars(function, arrays, results, interpret=True),
    pytest.param(
        lambda function, *arrays, results: kernel.scalars(function, arrays, results), marks=pytest.mark.gpu
    ),
]
by_each = pytest.mark.parametrize("run", IMPLEMENTATIONS, ids=["xla", "interpreted", "compiled"])


def mixed(few: list, many: list, *, scale: float) -> tuple[list, list]:
    """Of everything that functions use: arithmetic, choices, a constant, a number handed on, a truth value."""
    total = sum(many)
    exp = jnp.exp if isinstance(total, jax.Array) else math.exp
    larger = few[0] > few[1]
    return [few[0] * scale + total, few[1] / (1.0 + total * total)], [exp(-few[0]), larger, 3.0, many[-1]]


def call(run: Callable, function: Callable, *arrays: jax.Array, results: tuple[int, ...]) -> np.ndarray:
    """Inside a program, as rounds call it; the results one after the other."""
    options = {} if run is reference.scalars else {"results": results}
    found = jax.jit(lambda *arrays: run(function, *arrays, **options))(*arrays)
    assert [(x.dtype, x.shape) for x in found] == [(jnp.float32, (size,)) for size in results]
    return np.concatenate(found)


@by_each
@pytest.mark.parametrize("sizes", [(2, 1), (2, 7), (5, 40)])
def test_results_are_those_of_plain_python_in_their_order(run: Callable, sizes: tuple[int, int]):
    rng = np.random.default_rng(sum(sizes))
    function = functools.partial(mixed, scale=0.5)
    for _ in range(4):
        arrays = [rng.normal(size=n).astype(np.float32) for n in sizes]
        found = call(run, function, *map(jnp.asarray, arrays), results=(2, 4))
        want = [number for row in function(*(x.tolist() for x in arrays)) for number in row]
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@by_each
@pytest.mark.parametrize("index", [None, 0, len(BUDGETS) - 1])
def test_the_step_between_two_rounds_is_what_the_reference_says(run: Callable, index: int | None):
    """The function that decoding calls, at the most numbers that it has; beliefs of many texts, or of none."""
    rng = np.random.default_rng(0)
    k, known = len(BUDGETS), steering.first_beliefs(len(BUDGETS))
    step = functools.partial(steering.step, index=index, budgets=BUDGETS)
    told = 1 + 2 * k if index else 1
    for trial in range(6):
        last = [1, trial % 3 - 1, 9, trial % 2]
        beliefs = known if not trial else np.concatenate([rng.uniform(0, 20, known.size - 4), last])
        news = rng.uniform(1, 4, told) if index is not None else [trial % 2]
        values = [beliefs, rng.uniform(0.5, 3, k), [trial % 3 - 1], news]
        arrays = [jnp.asarray(x, jnp.float32) for x in values]
        found = call(run, step, *arrays, results=(known.size, 1))
        lists = step(*([x[i] for i in range(x.size)] for x in arrays))
        want = np.asarray([float(x) for row in lists for x in row])
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "interpret", [True, pytest.param(False, marks=pytest.mark.gpu)], ids=["interpreted", "compiled"]
)
def test_a_result_in_the_place_of_its_argument_is_the_same(interpret: bool):
    """Every number is read before the first is written, and whoever still needs the argument keeps it."""

    def turned(numbers: list, others: list) -> tuple[list, list]:
        return numbers[::-1], [numbers[0] + others[0]]

    def twice(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        run = functools.partial(kernel.scalars, turned, results=(40, 1), in_place=True, interpret=interpret)
        there, total = run((x, y))
        back, _ = run((there, y))
        return back, total, x

    x = jnp.asarray(np.random.default_rng(2).normal(size=40), jnp.float32)
    back, total, kept = jax.jit(twice)(x, x[:1])
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(kept, x)
    assert total[0] == 2 * x[0]


def test_too_many_numbers_are_refused_by_name_and_left_to_xla():
    """Whoever asks for the kernel is told why not; `auto` goes on without it. Results count as arguments do."""
    x = jnp.arange(float(MAX_NUMBERS))

    def first(numbers: list) -> tuple[list]:
        return (numbers[:1],)

    with pytest.raises(UnsupportedError, match=f"'scalars'.*{MAX_NUMBERS + 1} numbers are more than {MAX_NUMBERS}"):
        scalars(first, x, results=(1,), implementation="pallas")
    assert [found.tolist() for found in scalars(first, x, results=(1,))] == [[0.0]]
    with recording() as choices:
        scalars(first, x, results=(1,))
    assert choices == {"scalars": {"xla"}}


def test_as_many_numbers_as_fit_are_not_refused_for_their_number(monkeypatch: pytest.MonkeyPatch):
    handed = []
    monkeypatch.setattr("pallas_kernels.dispatch.unsupported_device", lambda device: None)
    monkeypatch.setattr(kernel, "scalars", lambda *arguments, in_place: handed.append(arguments))

    def first(numbers: list, others: list) -> tuple[list]:
        return ([numbers[0], others[0]],)

    x, y = jnp.zeros((MAX_NUMBERS - 4,)), jnp.ones((2,))
    scalars(first, x, y, results=(2,))
    ((function, arrays, results),) = handed
    assert function is first and arrays[0] is x and arrays[1] is y and results == (2,)


def test_every_named_case_traces_and_has_its_own_name():
    names = [name for name, function, arguments in cases("any") if jax.eval_shape(function, *arguments)]
    assert names == ["scalars/start", "scalars/bucket0", f"scalars/bucket{len(BUDGETS) - 1}"]

"""Products with weights, and SwiGLU with them: every implementation against fp64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear as op
from pallas_kernels.dispatch import UnsupportedError, recording
from pallas_kernels.linear import kernel, table
from pallas_kernels.linear.configs import Config
from pallas_kernels.linear.shapes import DTYPES, PRODUCTS, ROWS, cases
from pallas_kernels.linear.table import Product

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
IMPLEMENTATIONS = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
# Rows, columns, rows of the weights: one row, no whole block of anything, several blocks, more rows than a program has.
SHAPES = [(1, 64, 48), (10, 96, 40), (16, 128, 64), (33, 80, 32), (70, 64, 32)]


def run(implementation: str, *arrays: Any, splits: int = 1, **options: Any) -> jax.Array:
    """The op, or its kernel interpreted with small blocks."""
    if implementation == "interpret":
        return kernel.linear(*arrays, **options, config=Config(16, 32, splits, 4, 2), interpret=True)
    return op.linear(*arrays, **options, implementation=implementation)


def expected(x: Any, weight: Any, bias: Any, swiglu: bool) -> np.ndarray:
    x, weight, bias = (None if a is None else np.asarray(a, np.float64) for a in (x, weight, bias))
    y = x @ weight.T + (0 if bias is None else bias)
    if not swiglu:
        return y
    gate, up = np.split(y, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("swiglu", [False, True])
def test_against_fp64(implementation: str, dtype: Any, swiglu: bool):
    rng = np.random.default_rng(0)
    for rows, columns, out in SHAPES:
        for with_bias in (False, True):
            x = jnp.asarray(rng.normal(size=(2, rows, columns))[: 1 + (rows == 1)], dtype)
            weight = jnp.asarray(0.1 * rng.normal(size=(out * (1 + swiglu), columns)), dtype)
            bias = jnp.asarray(rng.normal(size=weight.shape[0]), dtype) if with_bias else None
            y = run(implementation, x, weight, bias, dtype=dtype, swiglu=swiglu)
            assert y.dtype == dtype and y.shape == (*x.shape[:-1], out)
            want = expected(x, weight, bias, swiglu)
            error = np.linalg.norm(np.asarray(y, np.float64) - want) / np.linalg.norm(want)
            assert error <= TOLERANCE[dtype], (rows, columns, out, with_bias)


@pytest.mark.parametrize("splits", [2, 3])
def test_splits_add_up(splits: int):
    """A number of blocks that they do not divide as well."""
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.normal(size=(rows, 160)), jnp.float32) for rows in (5, 48))
    y = run("interpret", x, weight, None, dtype=jnp.float32, splits=splits)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T, rtol=1e-5, atol=1e-5)


def test_programs_of_few_rows_give_the_bits_of_those_of_many():
    rng = np.random.default_rng(3)
    x, weight = (jnp.asarray(rng.normal(size=(rows, 96)), jnp.bfloat16) for rows in (45, 64))
    for swiglu in (False, True):
        one, other = (
            kernel.linear(x, weight, None, swiglu=swiglu, dtype=jnp.bfloat16, config=config, interpret=True)
            for config in (Config(16, 32, 1, 4, 2), Config(16, 32, 1, 4, 2, block_rows=16))
        )
        assert one.shape == (45, 64 // (1 + swiglu)) and jnp.array_equal(one, other)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_in_fp32_of_a_model_in_bf16(implementation: str):
    rng = np.random.default_rng(2)
    x, weight = (jnp.asarray(rng.normal(size=(rows, 64)), jnp.bfloat16) for rows in (3, 256))
    y = run(implementation, x, weight, None, dtype=jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_what_is_not_measured_to_be_faster_is_left_to_xla_unless_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(table, "_table", lambda kind: {Product(16, 32, 64): Config(16, 64, 1, 4, 4)})
    few, many = jnp.ones((16, 64), jnp.bfloat16), jnp.ones((65, 64), jnp.bfloat16)
    weight = jnp.ones((32, 64), jnp.bfloat16)

    def served(implementation: Any, x: jax.Array, weight: jax.Array) -> set[str]:
        with recording() as choices:
            op.linear(x, weight, implementation=implementation)
        return choices["linear"]

    assert served("auto", few, weight) == {"pallas"}
    assert served("auto", few, weight[:16]) == {"xla"}
    assert served("auto", many, weight) == {"xla"}
    assert served("auto", few.astype(jnp.float32), weight.astype(jnp.float32)) == {"xla"}
    assert served("pallas", many, weight) == {"pallas"}


def test_a_dtype_without_a_kernel_is_refused_by_name():
    x, weight = jnp.ones((1, 64), jnp.float16), jnp.ones((8, 64), jnp.float16)
    with pytest.raises(UnsupportedError, match="dtypes float16 and float16"):
        op.linear(x, weight, implementation="pallas")
    assert op.linear(x, weight).shape == (1, 8)  # "auto" takes XLA


def test_every_named_case_traces_and_has_its_own_name():
    names = [name for name, function, arguments in cases("NVIDIA H200") if jax.eval_shape(function, *arguments)]
    assert len(names) == len(set(names)) == sum(map(len, PRODUCTS.values())) * len(DTYPES) * len(ROWS)

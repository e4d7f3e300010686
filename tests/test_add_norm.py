"""The residual sum and its norm: every implementation against fp64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_norm as op
from pallas_kernels.add_norm import kernel
from pallas_kernels.add_norm.shapes import MODELS, ROWS, cases
from pallas_kernels.dispatch import UnsupportedError

TOLERANCE = {jnp.float32: 1e-6, jnp.bfloat16: 1e-2}
IMPLEMENTATIONS = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


def run(implementation: str, *arrays: jax.Array, zero_centered: bool) -> tuple[jax.Array, jax.Array]:
    options: dict[str, Any] = {"eps": 1e-6, "zero_centered": zero_centered}
    if implementation == "interpret":
        return kernel.add_norm(*arrays, **options, interpret=True)
    return op.add_norm(*arrays, **options, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("width", [64, 96])
def test_sum_and_norm(implementation: str, dtype: Any, zero_centered: bool, width: int):
    """A width that is no power of two as well, and a row whose sum is zero."""
    rng = np.random.default_rng(0)
    x, update = (jnp.asarray(rng.normal(size=(2, 3, width)), dtype) for _ in range(2))
    update = update.at[1, 2].set(-x[1, 2])
    weight = jnp.asarray(rng.normal(size=width), dtype)
    total, normed = run(implementation, x, update, weight, zero_centered=zero_centered)
    assert total.dtype == normed.dtype == dtype
    assert np.array_equal(total, x + update)
    y, scale = np.asarray(total, np.float64), np.asarray(weight, np.float64) + zero_centered
    expected = y / np.sqrt(np.mean(y * y, -1, keepdims=True) + 1e-6) * scale
    assert np.linalg.norm(np.asarray(normed, np.float64) - expected) <= TOLERANCE[dtype] * np.linalg.norm(expected)
    assert not np.asarray(normed[1, 2]).any()


def test_a_width_without_a_kernel_is_refused_by_name():
    x, weight = jnp.ones((1, 20_000)), jnp.ones(20_000)
    with pytest.raises(UnsupportedError, match="width 20000"):
        op.add_norm(x, x, weight, eps=1e-6, zero_centered=True, implementation="pallas")
    assert op.add_norm(x, x, weight, eps=1e-6, zero_centered=True)[0].shape == x.shape  # "auto" takes XLA


def test_every_named_case_traces_and_has_its_own_name():
    names = [name for name, function, arguments in cases("any") if jax.eval_shape(function, *arguments)]
    assert len(names) == len(set(names)) == 2 * len(MODELS) * len(ROWS)


def test_layers_alike_share_one_lowered_kernel():
    def layers(x: jax.Array, weight: jax.Array) -> jax.Array:
        for _ in range(3):
            x, _ = kernel.add_norm(x, x, weight, eps=1e-6, zero_centered=True, interpret=True)
        return x

    text = jax.jit(layers).lower(jnp.ones((4, 64)), jnp.ones(64)).as_text()
    assert text.count("func.func private @add_norm(") == 1 and text.count("call @add_norm(") == 3

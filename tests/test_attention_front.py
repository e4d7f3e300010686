"""What stands between an attention layer's projections and its attention: every implementation against fp64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention_front as op
from pallas_kernels.attention_front import kernel
from pallas_kernels.attention_front.shapes import MODELS, ROWS, cases
from pallas_kernels.dispatch import UnsupportedError

TOLERANCE = {jnp.float32: 1e-6, jnp.bfloat16: 1e-2}
IMPLEMENTATIONS = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
# Slots, rows, query heads, key-value heads, head dim, half of the turning dims: all turn, few turn, no powers of two.
SHAPES = [(1, 3, 4, 2, 64, 32), (2, 5, 3, 1, 64, 8), (1, 2, 2, 2, 256, 32), (1, 1, 2, 1, 96, 48), (1, 2, 2, 1, 96, 12)]


def run(implementation: str, *arrays: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    if implementation == "interpret":
        return kernel.attention_front(*arrays, **options, interpret=True)
    return op.attention_front(*arrays, **options, implementation=implementation)


def turned(x: np.ndarray, gain: Any, cos: np.ndarray, sin: np.ndarray, zero_centered: bool) -> np.ndarray:
    """One head after the other."""
    out = np.empty_like(x)
    half = cos.shape[-1]
    for place in np.ndindex(x.shape[:3]):
        head, c, s = x[place], cos[place[:2]], sin[place[:2]]
        if gain is not None:
            head = head / np.sqrt(np.mean(head * head) + 1e-6) * (np.asarray(gain, np.float64) + zero_centered)
        first, second = head[:half], head[half : 2 * half]
        out[place] = np.concatenate([first * c - second * s, second * c + first * s, head[2 * half :]])
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("normed", "zero_centered"), [(False, False), (True, False), (True, True)])
def test_against_fp64(implementation: str, dtype: Any, gated: bool, normed: bool, zero_centered: bool):
    rng = np.random.default_rng(0)
    for slots, rows, heads, kv_heads, dim, half in SHAPES:
        q = jnp.asarray(rng.normal(size=(slots, rows, heads * dim * (1 + gated))), dtype)
        kv = jnp.asarray(rng.normal(size=(slots, rows, 2 * kv_heads * dim)), dtype)
        gains = [jnp.asarray(rng.normal(size=dim), dtype) if normed else None for _ in range(2)]
        angles = rng.uniform(-3, 3, size=(slots, rows, half))
        cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
        options = {
            "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "gated": gated, "eps": 1e-6,
            "zero_centered": zero_centered,
        }  # fmt: skip
        queries, pages = run(implementation, q, kv, *gains, cos, sin, **options)
        side_by_side = run(
            implementation, jnp.concatenate([q, kv], axis=-1), None, *gains, cos, sin, **options
        )
        assert np.array_equal(queries, side_by_side[0]) and np.array_equal(pages, side_by_side[1])
        wide = np.asarray(q, np.float64).reshape(slots, rows, heads, -1)[..., :dim]
        keys, values = np.asarray(kv, np.float64).reshape(slots, rows, 2, kv_heads, dim).transpose(2, 0, 1, 3, 4)
        assert queries.dtype == pages.dtype == dtype
        assert np.array_equal(np.asarray(pages[:, :, 1], np.float64), values)
        for found, x, gain in ((queries, wide, gains[0]), (pages[:, :, 0], keys, gains[1])):
            want = turned(x, gain, np.cos(angles), np.sin(angles), zero_centered)
            error = np.linalg.norm(np.asarray(found, np.float64) - want) / np.linalg.norm(want)
            assert error <= TOLERANCE[dtype], (slots, rows, heads, kv_heads, dim, half)


def test_a_dtype_without_a_kernel_is_refused_by_name():
    q, angle = jnp.ones((1, 2, 64), jnp.float16), jnp.ones((1, 2, 16))
    options: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 32, "gated": False}
    options |= {"eps": 1e-6, "zero_centered": False}
    with pytest.raises(UnsupportedError, match="dtype float16"):
        op.attention_front(q, q, None, None, angle, angle, **options, implementation="pallas")
    assert op.attention_front(q, q, None, None, angle, angle, **options)[0].shape == (1, 2, 2, 32)


def test_every_named_case_traces_and_has_its_own_name():
    names = [name for name, function, arguments in cases("any") if jax.eval_shape(function, *arguments)]
    assert len(names) == len(set(names)) == 2 * len(MODELS) * len(ROWS)

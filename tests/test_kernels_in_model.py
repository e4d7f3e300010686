"""The kernels inside whole models on a GPU: the target at published widths, and the bundled pair's text."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dflash_jax
from benchmarks.shapes import configs
from dflash_jax import SamplingParams
from dflash_jax.cache import commit_causal, init_cache
from dflash_jax.random_weights import random_target
from dflash_jax.round import RoundSpec, verify
from dflash_jax.target import Rows
from dflash_jax.tree import build_tree

pytestmark = pytest.mark.gpu
PROMPT, PAGE, TABLE = 100, 64, 4


@dataclasses.dataclass(frozen=True)
class Slots:
    """What `verify` reads of a decode state."""

    cache: object
    block_tables: jax.Array
    lengths: jax.Array


def test_eight_layers_at_27b_widths_are_as_exact_as_xla_in_bf16():
    config, _ = configs("qwen3.6-27b", 8)
    graph, weights = nnx.split(random_target(config, jnp.bfloat16))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (1, PROMPT)))
    table = jnp.asarray([[2, 0, 3, 1]], jnp.int32)
    log_probs = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(1, 15, 512)), jnp.float32))
    tree = build_tree(tokens[:, 0], log_probs, 63)

    # Runs once: searching for the fastest products, in fp32 above all, would take most of the time.
    @functools.partial(
        jax.jit, static_argnames=("implementation", "dtype"), compiler_options={"xla_gpu_autotune_level": "0"}
    )
    def run(weights: nnx.State, tokens: jax.Array, implementation: Any, dtype: Any):
        model = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), weights))
        cache = init_cache(config, None, slots=1, pages=TABLE, page_size=PAGE, dtype=dtype)
        zero = jnp.zeros((1,), jnp.int32)
        rows = Rows(tokens, jnp.arange(PROMPT)[None], jnp.ones((1, PROMPT), bool))
        out = model(rows, model.empty_context(1), implementation=implementation)
        cache = commit_causal(cache, out.updates, table, zero, zero, zero + PROMPT)
        spec = RoundSpec(63, 16, implementation=implementation)
        verified = verify(model, Slots(cache, table, zero + PROMPT), tree, (), spec)
        return model.logits(out.hidden), model.logits(verified.hidden), cache.recurrent

    exact = run(weights, tokens, "xla", jnp.float32)
    xla, pallas = (run(weights, tokens, name, jnp.bfloat16) for name in ("xla", "pallas"))
    for name, own, others, truth in zip(("prefill", "tree", "state"), pallas, xla, exact, strict=True):
        truth = np.asarray(truth, np.float64)
        error, usual = (np.linalg.norm(np.asarray(x) - truth) / np.linalg.norm(truth) for x in (own, others))
        print(f"{name}: {error:.4f} from fp32, XLA {usual:.4f}")
        # Roundings of the residual stream add up over eight layers: what bf16 costs is XLA's own distance from fp32.
        assert error <= 1.2 * usual <= 0.1, name


def test_the_bundled_pairs_fp32_tokens_are_those_of_xla():
    prompts = ["Tell me about owls", "Once upon a time there was a girl"]
    tokens = {}
    for kernels in ("xla", "pallas"):
        engine = dflash_jax.load(dtype="float32", kernels=kernels)
        for method in ("ar", "dflash", "ddtree"):
            params = SamplingParams(max_new_tokens=100, method=method)
            done = engine.generate(prompts, params)
            ran = dict(done[0].kernels)
            # Products may be XLA's as well: those of a drafter's keys and values of the context always are.
            assert ran.pop("linear") in {kernels, f"{kernels}+xla"}
            assert set(ran.values()) == {kernels}
            tokens[kernels, method] = [c.token_ids for c in done]
    assert len(set(map(str, tokens.values()))) == 1

"""The kernels inside whole models on a GPU: the target at published widths, and the bundled pair's text."""

import dataclasses

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


def test_eight_layers_at_27b_widths_agree_with_xla_in_bf16():
    config, _ = configs("qwen3.6-27b", 8)
    graph, weights = nnx.split(random_target(config, jnp.bfloat16))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (1, PROMPT)))
    table = jnp.asarray([[2, 0, 3, 1]], jnp.int32)
    log_probs = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(1, 15, 512)), jnp.float32))
    tree = build_tree(tokens[:, 0], log_probs, 63)
    spec = RoundSpec(63, 16)

    @jax.jit
    def run(weights: nnx.State, tokens: jax.Array):
        model, outputs = nnx.merge(graph, weights), []
        for implementation in ("xla", "pallas"):
            cache = init_cache(config, None, slots=1, pages=TABLE, page_size=PAGE, dtype=jnp.bfloat16)
            zero = jnp.zeros((1,), jnp.int32)
            rows = Rows(tokens, jnp.arange(PROMPT)[None], jnp.ones((1, PROMPT), bool))
            out = model(rows, model.empty_context(1), implementation=implementation)
            cache = commit_causal(cache, out.updates, table, zero, zero, zero + PROMPT)
            checked = dataclasses.replace(spec, implementation=implementation)
            verified = verify(model, Slots(cache, table, zero + PROMPT), tree, (), checked)
            outputs.append((model.logits(out.hidden), model.logits(verified.hidden), cache.recurrent))
        return outputs

    xla, pallas = run(weights, tokens)
    for name, a, b in zip(("prefill", "tree", "state"), pallas, xla, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all(), name
        # Eight layers of bf16 residual stream: two XLA programs of other row counts part by as much.
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b), name


def test_the_bundled_pairs_fp32_tokens_are_those_of_xla():
    prompts = ["Tell me about owls", "Once upon a time there was a girl"]
    tokens = {}
    for kernels in ("xla", "pallas"):
        engine = dflash_jax.load(dtype="float32", kernels=kernels)
        for method in ("ar", "dflash", "ddtree"):
            params = SamplingParams(max_new_tokens=100, method=method)
            done = engine.generate(prompts, params)
            assert set(done[0].kernels.values()) == {kernels}
            tokens[kernels, method] = [c.token_ids for c in done]
    assert len(set(map(str, tokens.values()))) == 1

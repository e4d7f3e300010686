"""Two real GPUs: the tokens of one."""

import pytest

import dflash_jax
from dflash_jax import SamplingParams

pytestmark = pytest.mark.multigpu
PROMPTS = ["Tell me about owls", "Once upon a time there was a girl", "def f(x):", "What is rain?", "A"]


@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree"])
def test_the_bundled_pairs_fp32_tokens_are_those_of_one_gpu(method: str):
    params = SamplingParams(max_new_tokens=100, method=method)
    tokens = [
        [c.token_ids for c in dflash_jax.load(tp=tp, dtype="float32").generate(PROMPTS[:batch], params)]
        for tp, batch in ((1, 5), (2, 5), (2, 1))
    ]
    assert tokens[1] == tokens[0] and tokens[2] == tokens[0][:1]

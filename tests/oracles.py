"""Plain versions of what the product does on the device, in fp64 NumPy."""

import numpy as np

from dflash_jax import SamplingParams


def next_token_law(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], text: list[int]
) -> np.ndarray:
    """The distribution of the token after `prompt` and the generated `text`: the documented steps, with a sort."""
    x = logits.astype(np.float64)
    for token in {*prompt, *text}:
        x[token] *= params.repetition_penalty if x[token] <= 0 else 1 / params.repetition_penalty
    for token in set(text):
        x[token] -= params.frequency_penalty * text.count(token) + params.presence_penalty
    for token, bias in params.logit_bias:
        x[token] += bias
    if params.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    x = x / params.temperature
    kept = x
    if params.top_k:
        kept = np.where(x >= np.sort(x)[::-1][min(params.top_k, len(x)) - 1], x, -np.inf)
    if params.top_p < 1:
        ranked = np.sort(kept)[::-1]
        mass = np.cumsum(np.exp(ranked - ranked[0]))
        kept = np.where(kept >= ranked[np.argmax(mass >= params.top_p * mass[-1])], kept, -np.inf)
    if params.min_p:
        kept = np.where(x >= x.max() + np.log(params.min_p), kept, -np.inf)
    weights = np.exp(kept - kept.max())
    return weights / weights.sum()

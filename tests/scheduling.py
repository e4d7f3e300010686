"""Requests through a scheduler, for tests."""

import numpy as np

from dflash_jax import Completion, SamplingParams
from dflash_jax.flights import Request
from dflash_jax.scheduler import Scheduler
from tests.models import VOCAB


def text(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def serve(one: Scheduler, asked: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    """All at once; everything is checked after each step."""
    requests = [one.engine.request(*pair) for pair in asked]
    done: dict[Request, Completion] = {}
    for request in requests:
        one.submit(request)
    while one.busy:
        done |= {request: chunk.completion for request, chunk in one.step() if chunk.completion is not None}
        one.check()
    return [done[request] for request in requests]

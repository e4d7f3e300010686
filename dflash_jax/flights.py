"""What a scheduler keeps of a request on its way, and of results that the device still works on."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.acceptance import reject_and_resample, sample
from dflash_jax.budget import BudgetController
from dflash_jax.packing import Packed
from dflash_jax.prefix_cache import Prefix
from dflash_jax.request import SamplingParams, TokenLogprob
from dflash_jax.round import RoundOutput, RoundSpec
from dflash_jax.sampling import TokenLogprobs
from dflash_jax.stopping import StopChecker
from dflash_jax.tree import SpineFirst


@dataclasses.dataclass(eq=False)
class Request:
    """One request on its way through a scheduler; made by `Engine.request`.

    Attributes:
      prompt: token ids.
      params: as the user gave them.
      checker: finds the end of the text.
      limit: most tokens to generate.
      number: what `Engine.on_ranks` is told to say whose ranks they are.
      spec: how it drafts; set when it is submitted.
      slot: while it has one.
      pages: that it holds.
      emitted: the tokens that have come back.
      reads: what the device must read before it decodes: the prompt, and after a preemption what was emitted too.
      prefilled: how many of these the device has been given.
      keys: of their prefixes, where such are kept (`PrefixCache.keys`).
      prefix: the part of these that was there already; None if there was none.
      cached: how many tokens of the prompt were, when the request was first admitted.
      started, first_token, newest: when it was admitted, and when its first and its newest tokens came back.
    """

    prompt: list[int]
    params: SamplingParams
    checker: StopChecker
    limit: int
    number: int = 0
    spec: RoundSpec = dataclasses.field(default_factory=lambda: RoundSpec(0))
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    emitted: list[int] = dataclasses.field(default_factory=list)
    reads: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0
    keys: list[bytes] = dataclasses.field(default_factory=list)
    prefix: Prefix | None = None
    cached: int = 0
    histogram: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1,), int))
    slot_histogram: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1,), int))
    budgets: dict[int, int] = dataclasses.field(default_factory=dict)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    compiled_before: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    newest: float = 0.0

    @property
    def tokens(self) -> int:
        """Most tokens that it can come to hold: prompt and text."""
        return len(self.prompt) + self.limit

    @property
    def known(self) -> int:
        """Tokens of it that the host knows: prompt and text so far."""
        return len(self.prompt) + len(self.emitted)

    @property
    def decoding(self) -> bool:
        """Whether the device has all that it must read."""
        return self.slot is not None and self.prefilled == len(self.reads)

    def begin(self, slot: int, pages: list[int], prefix: Prefix | None) -> None:
        """Gives it a slot, in which it reads all but the prefix, of a histogram that counts from 0."""
        self.slot, self.pages, self.prefix = slot, pages, prefix
        self.prefilled = 0 if prefix is None else prefix.tokens
        if not self.reads:  # it has not been here before
            self.cached = self.prefilled
        self.reads, self.slot_histogram = self.prompt + self.emitted, np.zeros((1,), int)

    def count_rounds(self, budgets: Mapping[int, int] | int, histogram: np.ndarray) -> int:
        """Takes in the slot's histogram after a burst of one budget, or of so many rounds of each; returns all."""
        rounds = int(histogram.sum() - self.slot_histogram.sum())
        for budget, count in ({budgets: rounds} if isinstance(budgets, int) else budgets).items():
            if count:
                self.budgets[budget] = self.budgets.get(budget, 0) + count
        # States of different kinds have histograms of different lengths.
        total = np.zeros((max(len(self.histogram), len(histogram)),), int)
        for part, sign in ((self.histogram, 1), (histogram, 1), (self.slot_histogram, -1)):
            total[: len(part)] += sign * part
        self.histogram, self.slot_histogram = total, histogram
        return rounds


@dataclasses.dataclass
class Flight:
    """Results that the device still works on: slot -> the request that they are for, by the row they come in.

    Attributes:
      owners: row of the results -> request.
      results: a `RoundOutput`, and the histogram of its rows or, for the first token after a prompt, None.
      spec: the rounds.
      width: slots that they hold.
      most: tokens that a slot can have emitted in them.
      controller: of the budget, where that is adaptive; `bucket` is the index of the one that it chose on the host.
    """

    owners: list[tuple[int, Request]]
    results: Packed
    spec: RoundSpec
    width: int = 1
    most: int = 1
    controller: BudgetController | None = None
    bucket: int = 0

    @property
    def ready(self) -> bool:
        """Whether the results are there."""
        return self.results.ready

    def arrive(self) -> tuple["Flight", Any, float]:
        """Waits for the results; returns this, them and when they came."""
        return self, self.results.fetch(), time.perf_counter()


@functools.lru_cache(maxsize=256)
def prefill_spec(spec: RoundSpec) -> RoundSpec:
    """What prefill reads of a spec: whether there is a drafter, not how it drafts. All trees share its program."""
    rule = sample if spec.rule is reject_and_resample else spec.rule  # without a draft they are the same
    return dataclasses.replace(
        spec, budget=min(spec.budget, 1), block_size=1, policy=SpineFirst(), rule=rule, sampled_draft=False,
        ranks=False, buckets=(),
    )  # fmt: skip


def token_logprobs(output: RoundOutput, row: int, count: int, alternatives: int | None) -> list[TokenLogprob]:
    """A row's part of fetched results; empty if not asked for."""
    if alternatives is None:
        return []
    assert isinstance(output.logprobs, TokenLogprobs)
    ids = output.tokens[row, :count].tolist()
    chosen, top, tokens = (x[row, :count].tolist() for x in dataclasses.astuple(output.logprobs))
    pairs = (tuple(zip(t, v, strict=True))[:alternatives] for t, v in zip(tokens, top, strict=True))
    return [TokenLogprob(*one) for one in zip(ids, chosen, pairs, strict=True)]

"""The engine: slots, prefill, decoding in bursts, streaming and stop rules. The public class of the library."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax.acceptance import greedy, reject_and_resample, sample
from dflash_jax.budget import BudgetController, buckets_of, measure_curve
from dflash_jax.drafter import Drafter
from dflash_jax.errors import UserError
from dflash_jax.memory_plan import MemoryPlanner, context_capacity, power_of_two
from dflash_jax.mtp import MTP
from dflash_jax.pages import PagePool
from dflash_jax.programs import Programs
from dflash_jax.request import Chunk, Completion, SamplingParams, TokenLogprob
from dflash_jax.round import DecodeState, RoundOutput, RoundSpec
from dflash_jax.sampling import SamplingNeeds, TokenLogprobs, init_sampling, slot_settings
from dflash_jax.stopping import StopChecker, StopUpdate
from dflash_jax.target import Target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tree import SpineFirst, TreePolicy
from pallas_kernels.dispatch import Implementation

Prompt = str | Sequence[int]

# Tokens a slot that one burst of rounds can hand to the host.
BURST_TOKENS = 256
# Rounds of a burst whose time says how long a round takes, and not how long a call takes.
SHORTEST_TIMED = 4


@dataclasses.dataclass
class _Running:
    """A request in a slot (or waiting for one)."""

    index: int
    prompt: list[int]
    params: SamplingParams
    checker: StopChecker
    limit: int
    pages: list[int] = dataclasses.field(default_factory=list)
    histogram: np.ndarray | None = None
    budgets: dict[int, int] = dataclasses.field(default_factory=dict)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def count_rounds(self, budget: int, histogram: np.ndarray) -> int:
        """Takes in the slot's histogram after a burst of this budget; returns its rounds."""
        rounds = int(histogram.sum()) - (0 if self.histogram is None else int(self.histogram.sum()))
        self.budgets[budget] = self.budgets.get(budget, 0) + rounds
        self.histogram = histogram
        return rounds


def _prefill_spec(spec: RoundSpec) -> RoundSpec:
    """What prefill reads of a spec: whether there is a drafter, not how it drafts. All trees share its program."""
    rule = sample if spec.rule is reject_and_resample else spec.rule  # without a draft they are the same
    return dataclasses.replace(
        spec, budget=min(spec.budget, 1), block_size=1, policy=SpineFirst(), rule=rule, sampled_draft=False,
        ranks=False, buckets=(),
    )  # fmt: skip


def _rounds_of(spec: RoundSpec) -> list[RoundSpec]:
    """The rounds that requests of this spec may use, by bucket; the spec alone where the budget is fixed."""
    return [dataclasses.replace(spec, budget=b) for b in spec.buckets] or [spec]


def _sampling_spec(spec: RoundSpec, needs: SamplingNeeds | None, group: Sequence[SamplingParams]) -> RoundSpec:
    """The round of requests that share a draft: one program serves whatever any of them needs."""
    rule = greedy if needs is None else reject_and_resample if spec.sampled_draft else sample
    return dataclasses.replace(
        spec,
        rule=rule,
        sampled_draft=spec.sampled_draft and needs is not None,
        logprobs=any(p.logprobs is not None for p in group),
    )


def _token_logprobs(output: RoundOutput, slot: int, count: int, alternatives: int | None) -> list[TokenLogprob]:
    """A slot's part of fetched results; empty if not asked for."""
    if alternatives is None:
        return []
    assert isinstance(output.logprobs, TokenLogprobs)
    ids = output.tokens[slot, :count].tolist()
    chosen, top, tokens = (x[slot, :count].tolist() for x in dataclasses.astuple(output.logprobs))
    pairs = (tuple(zip(t, v, strict=True))[:alternatives] for t, v in zip(tokens, top, strict=True))
    return [TokenLogprob(*one) for one in zip(ids, chosen, pairs, strict=True)]


class Engine:
    """Decodes prompts with one target and, optionally, one drafter and the target's own MTP head.

    Build it with `dflash_jax.load`.

    Attributes:
      target, drafter, mtp: the models.
      tokenizer: of the target's folder.
      max_model_len: longest prompt + generated text, in tokens.
      policy: the tree policy of method "ddtree"; assign another one to try it.
      on_ranks: assign a function to have it called, where tokens are drafted, with a request's number and the ranks of
        its next tokens (`tree.accepted_ranks`; the first token, of prefill, has none). Other programs then run.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        *,
        max_model_len: int | None = None,
        max_slots: int = 8,
        page_size: int = 64,
        prefill_chunk: int | None = None,
        implementation: Implementation = "auto",
        names: tuple[str, str | None] = ("target", None),
        mtp: MTP | None = None,
        mesh: Mesh | None = None,
        memory: MemoryPlanner | None = None,
    ):
        limit = target.config.max_position_embeddings
        self.max_model_len = limit if max_model_len is None else max_model_len
        if not 1 <= self.max_model_len <= limit:
            raise UserError(
                f"--max-model-len must be 1 to {limit} (the model's own limit), found {max_model_len}"
            )
        self.target, self.drafter, self.mtp, self.tokenizer = target, drafter, mtp, tokenizer
        self.max_slots, self.page_size = max_slots, page_size
        self.device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        on_cpu = self.device.platform == "cpu"
        self.prefill_chunk = prefill_chunk or (128 if on_cpu else 512)
        self.implementation: Implementation = implementation
        self.names = names
        self.policy: TreePolicy = SpineFirst()
        self.on_ranks: Callable[[int, list[int]], None] | None = None
        self.programs = Programs(target, drafter, mesh, mtp)
        self._memory = memory
        self._states: dict[Any, DecodeState] = {}
        self._controllers: dict[Any, BudgetController] = {}

    # ---------------------------------------------------------------- requests

    def method_of(self, params: SamplingParams) -> str:
        """The method that a request will use ("auto" resolved), or `UserError` where it cannot be served."""
        if params.method == "auto":
            if self.drafter is not None:
                return "ddtree"
            return "ar" if self.mtp is None else "mtp"
        if params.method == "mtp" and self.mtp is None:
            raise UserError("--method mtp needs a checkpoint with its own draft head (mtp.* weights)")
        if params.method in ("dflash", "ddtree") and self.drafter is None:
            raise UserError(f"--method {params.method} needs a drafter; give one with --draft-model")
        return params.method

    def spec_of(self, params: SamplingParams, capacity: int) -> RoundSpec:
        """How a request drafts; the rule and what else of the round depends on sampling follow from its group."""
        method = self.method_of(params)
        pages = capacity // self.page_size
        if method == "ar":
            return RoundSpec(0, context_pages=pages, implementation=self.implementation)
        if method == "mtp":
            steps = params.mtp_steps
            return RoundSpec(
                steps, steps + 1, SpineFirst(), context_pages=pages, implementation=self.implementation, mtp=True,
                ranks=self.on_ranks is not None,
            )  # fmt: skip
        assert self.drafter is not None
        buckets: tuple[int, ...] = ()
        own = self.drafter.config.block_size
        block = params.block_size or own
        if block > own:
            raise UserError(f"--block-size must be at most the drafter's {own}, found {block}")
        if method == "dflash":
            budget, policy = block - 1, SpineFirst()
        else:
            if params.tree_budget == "auto":
                buckets = buckets_of(block, self.device.platform == "cpu")
            budget = buckets[-1] if params.tree_budget == "auto" else params.tree_budget
            policy = self.policy
        return RoundSpec(
            budget,
            block,
            policy,
            sampled_draft=params.draft_sampling == "probabilistic",
            context_pages=pages,
            implementation=self.implementation,
            ranks=self.on_ranks is not None,
            buckets=buckets,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as it is, or ids."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            ids = [int(i) for i in prompt]
        vocab = self.target.config.vocab_size
        if not ids:
            raise UserError("--prompt is empty; give at least one token")
        if min(ids) < 0 or max(ids) >= vocab:
            raise UserError(f"--prompt has a token id outside the vocabulary of {vocab}")
        if len(ids) >= self.max_model_len:
            raise UserError(
                f"--prompt has {len(ids)} tokens, with one to generate more than --max-model-len {self.max_model_len}"
            )
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, enable_thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template up to the assistant's turn."""
        text = self.tokenizer.apply_chat_template(messages, enable_thinking=enable_thinking)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> _Running:
        ids = self.encode(prompt)
        vocab = self.target.config.vocab_size
        for token, _ in params.logit_bias:
            if token >= vocab:
                raise UserError(f"--logit-bias names token {token}, outside the vocabulary of {vocab}")
        limit = min(params.max_new_tokens, self.max_model_len - len(ids))
        eos = () if params.ignore_eos else self.target.config.eos_token_ids
        checker = StopChecker(self.tokenizer, max_new_tokens=limit, stop_strings=params.stop, eos_ids=eos)
        return _Running(index, ids, params, checker, limit)

    # ---------------------------------------------------------------- public

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Decodes all prompts, up to `max_slots` at a time, and returns their completions in order.

        Args:
          prompts: texts or lists of token ids (of a conversation: `encode_chat`).
          params: one for all, or one a prompt.

        Raises:
          UserError: a prompt or parameter that cannot be served; nothing has been decoded then.
        """
        done: dict[int, Completion] = {}
        for index, chunk in self._run(prompts, params, burst=None):
            if chunk.completion is not None:
                done[index] = chunk.completion
        return [done[i] for i in range(len(prompts))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Yields text as rounds finish; the last chunk carries the completion."""
        for _, chunk in self._run([prompt], params, burst=1):
            yield chunk

    # ---------------------------------------------------------------- running

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        burst: int | None,
    ) -> Iterator[tuple[int, Chunk]]:
        """Checks everything first, then decodes groups of requests that share a round."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} parameter sets")
        requests = [self._request(i, *pair) for i, pair in enumerate(zip(prompts, params, strict=True))]
        longest = max((len(r.prompt) + r.limit for r in requests), default=1)
        capacity = context_capacity(longest, self.page_size)
        groups: dict[RoundSpec, list[_Running]] = {}
        for request in requests:
            groups.setdefault(self.spec_of(request.params, capacity), []).append(request)
        for spec, group in groups.items():
            yield from self._run_group(group, spec, capacity, burst)

    def _state_key(self, slots: int, capacity: int, spec: RoundSpec) -> Any:
        """What the shapes of a decode state depend on; a drafter's state serves all its trees."""
        return slots, capacity, spec.mtp, spec.block_size if spec.mtp else spec.budget > 0

    def _state(self, slots: int, capacity: int, spec: RoundSpec) -> DecodeState:
        """The decode state of this shape: fresh, or the one that the last run left (admission clears slots)."""
        kept = self._states.pop(self._state_key(slots, capacity, spec), None)
        if kept is not None:
            return kept
        self._states.clear()  # one set of caches at a time
        drafter = self.drafter.config if self.drafter is not None and spec.budget and not spec.mtp else None
        return self.programs.init(
            drafter, slots, capacity, self.page_size, mtp_steps=spec.budget if spec.mtp else 0
        )

    def _controller(
        self, state: DecodeState, specs: list[RoundSpec], buffer: int
    ) -> tuple[DecodeState, BudgetController]:
        """What chooses between these rounds on a state of this shape; times each of them if it is the first."""
        key = (specs[0], *state.block_tables.shape)
        if key not in self._controllers:
            start = time.perf_counter()
            state, curve = measure_curve(self.programs, state, specs, buffer, self.page_size)
            self._controllers[key] = BudgetController(curve)
            self.programs.compile_seconds += time.perf_counter() - start
        return state, self._controllers[key]

    def _prefill(
        self, state: DecodeState, slot: int, request: _Running, spec: RoundSpec, needs: SamplingNeeds | None
    ) -> tuple[DecodeState, list[int]]:
        """Admits a request to a slot and runs its prompt; returns the first token."""
        sampling = None
        if needs is not None:
            sampling = slot_settings(request.params, needs, self.target.config.vocab_size)
        width = state.block_tables.shape[1]
        # Unused entries repeat a page of the slot's own: they are never read, and never another slot's.
        table = (request.pages + [request.pages[-1]] * width)[:width]
        eos = () if request.params.ignore_eos else self.target.config.eos_token_ids
        stop_ids = (*eos, *([-1] * state.stop_ids.shape[1]))[: state.stop_ids.shape[1]]
        state = self.programs.admit(state, slot, table, request.limit, stop_ids, sampling)
        request.admitted = time.perf_counter()  # after the first call's compilation
        output = None
        for start in range(0, len(request.prompt), self.prefill_chunk):
            piece = request.prompt[start : start + self.prefill_chunk]
            last = start + len(piece) == len(request.prompt)
            padded = piece + [0] * (self.prefill_chunk - len(piece))
            result = self.programs.prefill(state, slot, padded, len(piece), last, _prefill_spec(spec))
            assert result is not None
            state, output = result
        assert output is not None
        output = jax.device_get(output)
        first = [int(output.tokens[0, 0])]
        request.logprobs += _token_logprobs(output, 0, 1, request.params.logprobs)
        request.first_token = time.perf_counter()
        return state, first

    def _run_group(
        self, group: list[_Running], spec: RoundSpec, capacity: int, burst: int | None
    ) -> Iterator[tuple[int, Chunk]]:
        """Continuous batching over the slots, the host one burst behind the device."""
        needs = SamplingNeeds.of([r.params for r in group])
        spec = _sampling_spec(spec, needs, [r.params for r in group])
        slots = power_of_two(min(len(group), self.max_slots))
        if self._memory is not None:
            slots = self._memory.fit(slots, capacity).slots
        compiled_before = self.programs.compile_seconds
        state = self._state(slots, capacity, spec)
        sampling = None if needs is None else init_sampling(needs, slots, self.target.config.vocab_size)
        state = dataclasses.replace(state, sampling=self.programs.replicated(sampling))
        pool = PagePool(slots * (capacity // self.page_size), self.page_size)
        buffer = max(BURST_TOKENS, spec.max_emitted)
        # A stop string is seen by the host alone, so it must look after every round.
        if burst is None:
            burst = 1 if any(r.params.stop for r in group) else buffer
        padding = [0] * self.prefill_chunk
        self.programs.prefill(state, 0, padding, 1, True, _prefill_spec(spec), compile_only=True)
        specs = _rounds_of(spec)
        for one in specs:
            self.programs.decode(state, burst, one, buffer, compile_only=True)
        controller = None
        if spec.buckets:
            state, controller = self._controller(state, specs, buffer)

        waiting = collections.deque(group)
        running: dict[int, _Running] = {}
        flying: collections.deque[tuple[dict[int, _Running], RoundOutput, jax.Array, int, float]] = collections.deque()
        # A burst's seconds mean something where nobody waits for the host; and processes must not choose differently.
        timing = may_time = burst > 1 and jax.process_count() == 1
        ready = 0.0  # when the device had finished its last burst
        while waiting or running or flying:
            while waiting and len(running) < slots:
                slot = next(s for s in range(slots) if s not in running)
                request = waiting.popleft()
                timing = may_time and not flying  # a prompt delays what is in flight
                request.pages = pool.allocate(len(request.prompt) + request.limit)
                state, first = self._prefill(state, slot, request, spec, needs)
                update = request.checker.push(first)
                if update.finish_reason is None:
                    running[slot] = request
                    if controller is not None:
                        controller.new_request(slots)
                else:
                    # Stopped by what only the host sees (a stop string): the device must not go on in pages given back.
                    state = self.programs.release(state, np.arange(slots) == slot)
                    pool.release(request.pages)
                yield request.index, self._chunk(request, update, spec, compiled_before)
            wait = False
            if running:
                index, length = (0, burst) if controller is None else controller.next()
                result = self.programs.decode(state, min(burst, length), specs[index], buffer)
                assert result is not None
                state, (output, histogram) = result
                flying.append((dict(running), output, histogram, index, time.perf_counter()))
                wait = controller is not None and index > 0 and controller.unsure()
            if flying and (len(flying) > 1 or not running or wait):
                owners, output, histogram, index, begun = flying.popleft()
                output, histogram = jax.device_get((output, histogram))
                begun, ready, rounds = max(begun, ready), time.perf_counter(), 0
                if controller is not None and output.evidence is not None:
                    controller.observe(index, output.evidence)
                ended = np.zeros((slots,), bool)
                for slot, request in owners.items():
                    if running.get(slot) is not request:
                        continue  # ended in an earlier burst; these are its surplus rounds
                    count = output.count[slot]
                    update = request.checker.push(output.tokens[slot, :count].tolist())
                    request.logprobs += _token_logprobs(output, slot, count, request.params.logprobs)
                    if output.ranks is not None and self.on_ranks is not None:
                        self.on_ranks(request.index, output.ranks[slot, :count].tolist())
                    rounds = max(rounds, request.count_rounds(specs[index].budget, histogram[slot]))
                    if update.finish_reason is not None:
                        ended[slot] = True
                        del running[slot]
                        pool.release(request.pages)
                    if update.token_ids or update.finish_reason is not None:
                        yield request.index, self._chunk(request, update, spec, compiled_before)
                if ended.any():
                    state = self.programs.release(state, ended)
                if timing and rounds >= SHORTEST_TIMED and controller is not None:
                    controller.timed(index, (ready - begun) / rounds)
                timing = may_time
        self._states[self._state_key(slots, capacity, spec)] = state

    def _chunk(self, request: _Running, update: StopUpdate, spec: RoundSpec, compiled_before: float) -> Chunk:
        if update.finish_reason is None:
            return Chunk(update.text, update.token_ids)
        request.finished = time.perf_counter()
        return Chunk(update.text, update.token_ids, self._completion(request, spec, compiled_before))

    def _completion(self, request: _Running, spec: RoundSpec, compiled_before: float) -> Completion:
        checker = request.checker
        ids = checker.token_ids
        histogram = request.histogram if request.histogram is not None else np.zeros((1,), int)
        rounds = int(histogram.sum())
        emitted = int((histogram * np.arange(len(histogram))).sum())
        seconds = request.finished - request.first_token
        assert checker.finish_reason is not None
        return Completion(
            text=checker.text,
            token_ids=ids,
            finish_reason=checker.finish_reason,
            stop=checker.stop,
            prompt_tokens=len(request.prompt),
            completion_tokens=len(ids),
            method=self.method_of(request.params),
            rounds=rounds,
            mean_accepted_length=emitted / rounds if rounds else 0.0,
            accepted_length_histogram=[int(n) for n in histogram],
            tree_budget=max(request.budgets, key=lambda nodes: request.budgets[nodes], default=spec.budget),
            tree_budgets=dict(sorted(request.budgets.items())),
            prefill_seconds=request.first_token - request.admitted,
            decode_seconds=seconds,
            compile_seconds=self.programs.compile_seconds - compiled_before,
            tokens_per_second=(len(ids) - 1) / seconds if len(ids) > 1 and seconds > 0 else 0.0,
            device=self.device.device_kind,
            dtype=str(jnp.dtype(self.target.dtype)),
            kernels=self.programs.kernels(*_rounds_of(spec), _prefill_spec(spec)),
            model=self.names[0],
            draft_model=self.names[1] if spec.budget and not spec.mtp else None,
            seed=request.params.seed,
            logprobs=None if request.params.logprobs is None else request.logprobs[: len(ids)],
        )

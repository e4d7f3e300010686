"""The engine: models, and what they can be asked for. The public class of the library; `scheduler.py` decodes."""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from dflash_jax.budget import BudgetController, buckets_of
from dflash_jax.drafter import Drafter
from dflash_jax.errors import UserError
from dflash_jax.flights import Request
from dflash_jax.memory_plan import MemoryPlanner, context_capacity, power_of_two
from dflash_jax.mtp import MTP
from dflash_jax.programs import Programs
from dflash_jax.request import Chunk, Completion, SamplingParams
from dflash_jax.round import DecodeState, RoundSpec
from dflash_jax.scheduler import Scheduler
from dflash_jax.stopping import StopChecker
from dflash_jax.target import Target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tree import BestFirst, SpineFirst, TreePolicy
from pallas_kernels.dispatch import Implementation

Prompt = str | Sequence[int]


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
      controllers: what chooses between budgets (`tree_budget="auto"`), by `Scheduler.curve_key`; kept between calls.
      arrivals: a thread that waits for results while another one hands over work.
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
        self.policy: TreePolicy = BestFirst()
        self.on_ranks: Callable[[int, list[int]], None] | None = None
        self.programs = Programs(target, drafter, mesh, mtp)
        self._memory = memory
        self._states: dict[Any, DecodeState] = {}
        self.controllers: dict[Any, BudgetController] = {}
        self.arrivals = concurrent.futures.ThreadPoolExecutor(1, "arrivals")

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

    def spec_of(self, params: SamplingParams, capacity: int, slots: int = 1) -> RoundSpec:
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
                width, on_cpu = self.target.config.hidden_size, self.device.platform == "cpu"
                buckets = buckets_of(block, width, on_cpu, slots)
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

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request that a scheduler of this engine takes.

        Raises:
          UserError: a prompt or parameter that this model cannot serve.
        """
        ids = self.encode(prompt)
        vocab = self.target.config.vocab_size
        for token, _ in params.logit_bias:
            if token >= vocab:
                raise UserError(f"--logit-bias names token {token}, outside the vocabulary of {vocab}")
        limit = min(params.max_new_tokens, self.max_model_len - len(ids))
        eos = () if params.ignore_eos else self.target.config.eos_token_ids
        checker = StopChecker(self.tokenizer, max_new_tokens=limit, stop_strings=params.stop, eos_ids=eos)
        return Request(ids, params, checker, limit)

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
        requests = [self.request(*pair) for pair in zip(prompts, params, strict=True)]
        for number, request in enumerate(requests):
            request.number = number
        longest = max((r.tokens for r in requests), default=1)
        groups: dict[RoundSpec, list[Request]] = {}
        for request in requests:
            spec = self.spec_of(request.params, context_capacity(longest, self.page_size))
            groups.setdefault(spec, []).append(request)
        # One after the other: a round costs as much for a few slots as for all of them.
        for group in groups.values():
            scheduler = self.scheduler(len(group), longest, burst=burst)
            for request in group:
                scheduler.submit(request)
            while scheduler.busy:
                for request, chunk in scheduler.step():
                    yield request.number, chunk
            scheduler.close()

    def scheduler(
        self,
        slots: int,
        tokens: int,
        *,
        burst: int | None = None,
        interleave: bool = False,
        few_programs: bool = False,
        narrow: bool = False,
        pages: int | None = None,
        prefix_bytes: int = 0,
    ) -> Scheduler:
        """A scheduler for requests of up to `tokens` tokens each, prompt and text.

        It has up to `slots` slots: a power of two, at most `max_slots`, and no more than device memory holds.

        Args:
          slots: see above.
          tokens: see above.
          burst, interleave, few_programs, narrow: see `Scheduler`.
          pages: that all slots share, and that requests get as their texts grow; None for as many as slots can use.
          prefix_bytes: of device memory (of all devices together) for recurrent states of beginnings of prompts, see
            `PrefixCache`; 0 for no such cache.
        """
        prefixes = 0
        if prefix_bytes:
            prefixes = prefix_bytes // self.prefix_state_bytes()
            if prefixes < 1:
                raise UserError(
                    f"--prefix-cache-mib must hold a state of {self.prefix_state_bytes() / 2**20:.1f} MiB, "
                    f"found {prefix_bytes / 2**20:.1f}"
                )
        slots, capacity = power_of_two(min(slots, self.max_slots)), context_capacity(tokens, self.page_size)
        if self._memory is not None:
            limit = self._memory.limit
            left = None if limit is None else limit - prefix_bytes // self._memory.shards
            slots = dataclasses.replace(self._memory, limit=left).fit(slots, capacity, pages).slots
        return Scheduler(
            self, slots, capacity,
            burst=burst, interleave=interleave, few_programs=few_programs, narrow=narrow, pages=pages,
            lazy=pages is not None, prefixes=prefixes,
        )  # fmt: skip

    def state_kind(self, spec: RoundSpec) -> tuple[bool, int]:
        """What the shapes of a decode state depend on besides sizes; a drafter's state serves all its trees."""
        return spec.mtp, spec.block_size if spec.mtp else spec.budget > 0

    def take_state(self, slots: int, capacity: int, pages: int, spec: RoundSpec) -> DecodeState:
        """A decode state of this shape with no slot active: the one that was kept last, or a new one.

        Admission clears slots, so neither differs from the other.
        """
        kept = self._states.pop((slots, capacity, pages, self.state_kind(spec)), None)
        if kept is not None:
            return kept
        self._states.clear()  # one set of caches at a time
        return self.new_state(slots, capacity, pages, spec)

    def new_state(
        self, slots: int, capacity: int, pages: int, spec: RoundSpec, **options: bool
    ) -> DecodeState:
        """A new decode state for requests that draft like this; options as of `Programs.init`."""
        drafter = self.drafter.config if self.drafter is not None and spec.budget and not spec.mtp else None
        steps = spec.budget if spec.mtp else 0
        return self.programs.init(
            drafter, slots, capacity, self.page_size, mtp_steps=steps, pages=pages, **options
        )

    def prefix_state_bytes(self) -> int:
        """Bytes of a slot of the usual state, pages aside; few but not none where no layer is recurrent."""
        spec = self.spec_of(SamplingParams(), self.page_size)
        state = self.new_state(1, self.page_size, 1, spec, abstract=True)

        def size(tree: Any) -> int:
            return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))

        return size(state) - size((state.cache.kv, state.cache.draft_kv))

    def keep_state(self, state: DecodeState, slots: int, capacity: int, pages: int, spec: RoundSpec) -> None:
        """Keeps a state, none of whose slots is active, for the next `take_state` of its shape."""
        self._states[slots, capacity, pages, self.state_kind(spec)] = state

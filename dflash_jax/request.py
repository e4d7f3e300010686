"""What a user asks for and gets: sampling parameters, completions, streamed chunks."""

import dataclasses
from typing import Literal

from dflash_jax.errors import UserError
from dflash_jax.stopping import FinishReason

Method = Literal["auto", "ar", "mtp", "dflash", "ddtree"]
METHODS: tuple[Method, ...] = ("auto", "ar", "mtp", "dflash", "ddtree")
DraftSampling = Literal["greedy", "probabilistic"]
DRAFT_SAMPLING: tuple[DraftSampling, ...] = ("greedy", "probabilistic")
MAX_TREE_BUDGET = 1023
MAX_LOGPROBS = 20
# What divides or is added to logits in fp32 is at most so large, and what divides them not smaller than one over it:
# with counts of a text's tokens and the lowest temperature nothing reaches fp32's end, 3.4e38: texts would be noise.
LARGEST = 1e30
# Below it the logits over the temperature leave fp32's range of exact comparison; greedy is what is meant.
MIN_TEMPERATURE = 1e-3
MAX_MTP_STEPS = 15


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to decode one request. Nothing is taken from a checkpoint's generation_config.json but its end tokens.

    Attributes:
      max_new_tokens: most tokens to generate, the stop token included.
      temperature: divides the logits; 0 is greedy.
      top_k: sample from the k most probable tokens and their equals; 0 is off.
      top_p: sample from the fewest most probable tokens that hold this share of the probability; 1 is off.
      min_p: leave out tokens less probable than this share of the most probable one's; 0 is off.
      presence_penalty, frequency_penalty: subtracted from the logits of tokens already generated, once or as often as
        they occur.
      repetition_penalty: divides (negative logits: multiplies) those of tokens in prompt or text; 1 is off.
      logit_bias: (token id, what to add to its logit); the penalties, and this, apply to greedy decoding too.
      stop: strings that end the text (not part of it).
      ignore_eos: go on past the model's end tokens, up to max_new_tokens.
      method: "ar" one token a pass, "mtp" chains of the checkpoint's own head, "dflash" the drafter's chain, "ddtree"
        its tree; "auto" takes ddtree with a drafter, mtp without one where the checkpoint has the head, and else ar.
      tree_budget: nodes of the tree besides the anchor (ddtree only), or "auto": as many as pay on this device for
        this text, down to none (autoregressive).
      block_size: rows of the drafter's block, at most the drafter's own; None for the drafter's own.
      mtp_steps: tokens that the head drafts a round (mtp only).
      seed: of the noise, 0 to 2**64 - 1. Equal seeds give equal tokens for equal prompts, alone or in any batch.
      draft_sampling: whether the chain of method "dflash" is the drafter's best tokens ("greedy") or drawn from its
        marginals and accepted by rejection sampling ("probabilistic": same distribution, other tokens for a seed).
      logprobs: record log-probabilities of the tokens emitted and of so many best ones, 0 to 20; None is off.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    method: Method = "auto"
    tree_budget: int | Literal["auto"] = "auto"
    block_size: int | None = None
    seed: int = 0
    draft_sampling: DraftSampling = "greedy"
    logprobs: int | None = None
    mtp_steps: int = 3

    def __post_init__(self) -> None:
        """Raises `UserError` for a value no request can have."""
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens must be at least 1, found {self.max_new_tokens}")
        self._check_sampling()
        if self.method not in METHODS:
            raise UserError(f"--method must be one of {', '.join(METHODS)}, found {self.method!r}")
        budget = self.tree_budget
        if budget != "auto" and not (isinstance(budget, int) and 1 <= budget <= MAX_TREE_BUDGET):
            raise UserError(f"--tree-budget must be 1 to {MAX_TREE_BUDGET} or 'auto', found {budget!r}")
        if self.block_size is not None and self.block_size < 2:
            raise UserError(
                f"--block-size must be at least 2 (anchor and one draft), found {self.block_size}"
            )
        if not 1 <= self.mtp_steps <= MAX_MTP_STEPS:
            raise UserError(f"--mtp-steps must be 1 to {MAX_MTP_STEPS}, found {self.mtp_steps}")
        if isinstance(self.stop, str) or "" in self.stop:
            raise UserError("--stop takes non-empty strings")

    def _check_sampling(self) -> None:
        """Written so that NaN fails every test."""
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= LARGEST):
            words = f"--temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, up to {LARGEST:g}"
            raise UserError(f"{words}, found {self.temperature}")
        if not (isinstance(self.top_k, int) and 0 <= self.top_k < 1 << 31):
            raise UserError(f"--top-k must be a whole number, 0 (off) or more, found {self.top_k}")
        if not 1 / LARGEST <= self.top_p <= 1:
            raise UserError(f"--top-p must be above 0, {1 / LARGEST:g} to 1 (off), found {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"--min-p must be 0 (off) to 1, found {self.min_p}")
        for flag, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not abs(penalty) <= LARGEST:
                raise UserError(f"--{flag}-penalty must be a finite number up to {LARGEST:g}, found {penalty}")
        if not 1 / LARGEST <= self.repetition_penalty <= LARGEST:
            words = f"--repetition-penalty must be above 0 (1 is off), {1 / LARGEST:g} to {LARGEST:g}"
            raise UserError(f"{words}, found {self.repetition_penalty}")
        for token, bias in self.logit_bias:
            if not (isinstance(token, int) and token >= 0 and abs(bias) <= LARGEST):
                raise UserError(
                    f"--logit-bias takes TOKEN=BIAS, an id and a number up to {LARGEST:g}, found {token}={bias}"
                )
        if not (isinstance(self.seed, int) and 0 <= self.seed < 1 << 64):
            raise UserError(f"--seed must be 0 to 2**64 - 1, found {self.seed}")
        if self.draft_sampling not in DRAFT_SAMPLING:
            known = ", ".join(DRAFT_SAMPLING)
            raise UserError(f"--draft-sampling must be one of {known}, found {self.draft_sampling!r}")
        if self.draft_sampling == "probabilistic" and self.method != "dflash":
            raise UserError(
                f"--draft-sampling probabilistic needs --method dflash (a chain), found --method {self.method}"
            )
        if self.logprobs is not None and not (isinstance(self.logprobs, int) and 0 <= self.logprobs <= MAX_LOGPROBS):
            raise UserError(f"--logprobs must be 0 to {MAX_LOGPROBS}, found {self.logprobs}")


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one emitted token, under the model's own distribution (no penalty, bias, temperature).

    Attributes:
      token_id: the token emitted.
      logprob: its log-probability, in nats.
      top: (token id, log-probability) of the most probable tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished request; the fields of `--json`.

    Attributes:
      text: the generated text, without what stopped it.
      token_ids: the generated ids, a stop token included.
      finish_reason: "stop" (a stop token or string) or "length".
      stop: the stop string or stop token id that ended it, if one did.
      cached_tokens: beginning of the prompt that a server had kept from another request and did not read again.
      rounds: target passes after prefill.
      mean_accepted_length: τ, tokens emitted per round (bonus included); 0 where there was no round.
      accepted_length_histogram: entry n is the number of rounds that emitted n tokens.
      tree_budget: nodes besides the anchor (mtp: its steps); 0 for ar. Of "auto" what most rounds had.
      tree_budgets: nodes -> rounds that had so many; more than one only with "auto".
      prefill_seconds: from admission until the first token is on the host; decode_seconds: from there until the last
        one is.
      compile_seconds: spent on compiling programs for the call that this request was part of, and on timing their
        rounds once for tree_budget "auto".
      tokens_per_second: tokens after the first, over decode_seconds.
      kernels: op -> "pallas" or "xla", as its prefill and decode programs were compiled; "pallas+xla" where the calls
        of one op differ (shapes that the kernel refuses). The log says why, at level INFO.
      logprobs: one entry a token id if they were asked for, else None.
      started: when it was admitted, in seconds of `time.perf_counter`.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop: str | int | None
    prompt_tokens: int
    completion_tokens: int
    method: str
    rounds: int
    mean_accepted_length: float
    accepted_length_histogram: list[int]
    tree_budget: int
    tree_budgets: dict[int, int]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    tokens_per_second: float
    device: str
    dtype: str
    kernels: dict[str, str]
    model: str
    draft_model: str | None
    seed: int
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    started: float = 0.0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a streamed request.

    Attributes:
      text: new text that will not be taken back.
      token_ids: new ids.
      completion: set on the last chunk only.
      logprobs: one entry a new id if they were asked for, else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

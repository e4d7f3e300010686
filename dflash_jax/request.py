"""What a user asks for and gets: sampling parameters, completions, streamed chunks."""

import dataclasses
from typing import Literal

from dflash_jax.errors import UserError
from dflash_jax.stopping import FinishReason

Method = Literal["auto", "ar", "mtp", "dflash", "ddtree"]
METHODS: tuple[Method, ...] = ("auto", "ar", "mtp", "dflash", "ddtree")
MAX_TREE_BUDGET = 1023
MAX_MTP_STEPS = 15


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to decode one request.

    Attributes:
      max_new_tokens: most tokens to generate, the stop token included.
      temperature: 0 is greedy; this version decodes greedily only.
      stop: strings that end the text (not part of it).
      ignore_eos: go on past the model's end tokens, up to max_new_tokens.
      method: "ar" one token a pass, "mtp" chains of the checkpoint's own head, "dflash" the drafter's chain, "ddtree"
        its tree; "auto" takes ddtree with a drafter, mtp without one where the checkpoint has the head, and else ar.
      tree_budget: nodes of the tree besides the anchor (ddtree only), or "auto".
      block_size: rows of the drafter's block, at most the drafter's own; None for the drafter's own.
      mtp_steps: tokens that the head drafts a round (mtp only).
      seed: recorded with the result; greedy decoding has no randomness.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    method: Method = "auto"
    tree_budget: int | Literal["auto"] = "auto"
    block_size: int | None = None
    seed: int = 0
    mtp_steps: int = 3

    def __post_init__(self) -> None:
        """Raises `UserError` for a value no request can have."""
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens must be at least 1, found {self.max_new_tokens}")
        if not self.temperature >= 0.0:
            raise UserError(f"--temperature must be 0 or more, found {self.temperature}")
        if self.temperature > 0.0:
            raise UserError(
                "--temperature above 0 is not available in this version; use --temperature 0 (greedy)"
            )
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


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished request; the fields of `--json`.

    Attributes:
      text: the generated text, without what stopped it.
      token_ids: the generated ids, a stop token included.
      finish_reason: "stop" (a stop token or string) or "length".
      stop: the stop string or stop token id that ended it, if one did.
      rounds: target passes after prefill.
      mean_accepted_length: τ, tokens emitted per round (bonus included); 0 where there was no round.
      accepted_length_histogram: entry n is the number of rounds that emitted n tokens.
      tree_budget: nodes besides the anchor (mtp: its steps); 0 for ar.
      prefill_seconds: from admission to the first token; decode_seconds: from there to the last.
      compile_seconds: spent on compiling programs for the call that this request was part of.
      tokens_per_second: tokens after the first, over decode_seconds.
      kernels: op -> "pallas" or "xla", as its prefill and decode programs were compiled; "pallas+xla" where the calls
        of one op differ (shapes that the kernel refuses). The log says why, at level INFO.
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


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a streamed request.

    Attributes:
      text: new text that will not be taken back.
      token_ids: new ids.
      completion: set on the last chunk only.
    """

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None

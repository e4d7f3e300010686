"""A text's rounds one by one, with everything inside them: marginals, tree, the target's choices, the walk.

For looking, not for speed: the parts of `round.speculative_round` with their results kept, one round a call, on one
device, greedy. The tokens are those that `Engine.generate` gives.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.acceptance import greedy
from dflash_jax.drafter import Drafter
from dflash_jax.engine import Engine
from dflash_jax.errors import UserError
from dflash_jax.memory_plan import context_capacity
from dflash_jax.round import (
    DecodeState,
    RoundOutput,
    RoundSpec,
    commit_walk,
    draft,
    init_state,
    prefill,
    verify,
)
from dflash_jax.settle import settle
from dflash_jax.target import Target
from dflash_jax.tree import SpineFirst, Tree, TreePolicy, Walk, build_tree


@dataclasses.dataclass(frozen=True)
class TracedRound:
    """One round of one slot (batch axis 1 in `tree` and `walk`).

    Attributes:
      log_probs: the drafter's marginals, natural logarithms, depth 1 first.
      tree: what was verified.
      chosen: the target's token after each row.
      walk: which rows that accepts.
      tokens: what the round emitted.
    """

    log_probs: Float[np.ndarray, "L V"]
    tree: Tree
    chosen: Int[np.ndarray, " N"]
    walk: Walk
    tokens: list[int]

    @property
    def path(self) -> list[int]:
        """Accepted rows, from node 0 down."""
        return np.asarray(self.walk.path[0, : int(self.walk.count[0])]).tolist()

    @property
    def bonus(self) -> int:
        """The target's token after the last accepted row."""
        return int(self.walk.bonus[0])


def _one_round(
    target: Target, drafter: Drafter, state: DecodeState, spec: RoundSpec
) -> tuple[DecodeState, RoundOutput, Float[Array, "L V"], Tree, Int[Array, "B N"], Walk]:
    draft_kv, logits = draft(target, drafter, state, spec)
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, draft_kv=draft_kv))
    log_probs = jax.nn.log_softmax(logits)
    tree = build_tree(state.anchor, log_probs, spec.budget, spec.policy)
    output = verify(target, state, tree, drafter.config.target_layer_ids, spec)
    chosen = greedy(target.logits(output.hidden), tree, state.lengths, None, None, target.vocabulary)
    settled = settle(state, tree, chosen, spec)
    walked = settled.walked
    state, emitted = commit_walk(state, output, settled, spec)
    return state, emitted, log_probs[0], tree, chosen, walked


def trace_rounds(
    engine: Engine,
    prompt: str | Sequence[int],
    *,
    rounds: int,
    budget: int = 31,
    policy: TreePolicy | None = None,
) -> Iterator[TracedRound]:
    """The first rounds of a prompt's greedy text; fewer where the text ends.

    The first token, which prefill chooses, is the first round's anchor and in no round's `tokens`.

    Args:
      engine: with a drafter, on one device.
      prompt: text, or token ids (of a conversation: `engine.encode_chat`).
      rounds: how many at most.
      budget: tree nodes besides the anchor, at least 1.
      policy: which prefixes are kept; the engine's if not given.

    Raises:
      UserError: no drafter, several devices, or a prompt that leaves no room.
    """
    target, drafter = engine.target, engine.drafter
    if drafter is None:
        raise UserError("trace_rounds needs a drafter; give one with --draft-model")
    if target.shards > 1:
        raise UserError(f"trace_rounds needs a model on one device, found --tp {target.shards}")
    if rounds < 1 or budget < 1:
        raise UserError(f"trace_rounds needs rounds and budget of at least 1, found {rounds} and {budget}")
    ids = engine.encode(prompt)
    block, page = drafter.config.block_size, engine.page_size
    limit = min(rounds * block + 1, engine.max_model_len - len(ids))
    capacity = context_capacity(len(ids) + limit, page)
    spec = RoundSpec(
        budget, block, engine.policy if policy is None else policy, context_pages=capacity // page,
        implementation=engine.implementation,
    )  # fmt: skip
    state = init_state(
        target.config, drafter.config, slots=1, capacity=capacity, page_size=page, dtype=target.dtype
    )
    eos = jnp.asarray([target.config.eos_token_ids or (-1,)], jnp.int32)
    state = dataclasses.replace(
        state, block_tables=jnp.arange(capacity // page)[None], remaining=jnp.array([limit]), stop_ids=eos
    )
    first_pass = jax.jit(prefill, static_argnums=7)
    no_draft = dataclasses.replace(spec, budget=1, block_size=1, policy=SpineFirst())  # one program for all trees
    slot, chunk = jnp.array([0]), engine.prefill_chunk
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        padded = jnp.asarray([piece + [0] * (chunk - len(piece))])
        last = jnp.array([start + len(piece) == len(ids)])
        state, _ = first_pass(target, drafter, state, slot, padded, jnp.array([len(piece)]), last, no_draft)
    step = jax.jit(_one_round, static_argnums=3)
    for _ in range(rounds):
        if not bool(state.active[0]):
            return
        state, emitted, log_probs, tree, chosen, walked = step(target, drafter, state, spec)
        tokens = np.asarray(emitted.tokens[0, : int(emitted.count[0])]).tolist()
        yield TracedRound(np.asarray(log_probs), tree, np.asarray(chosen[0]), walked, tokens)

"""One speculative round, draft → tree → verify → walk → commit, as a pure function of (models, state).

Everything stays on the device. A chain is the tree whose every node has one child, and autoregressive decoding is the
tree of one row; there is no other path. `decoding.decode` repeats the round in a `lax.while_loop`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.acceptance import AcceptanceRule, greedy, sampled_chain
from dflash_jax.cache import Cache, Context, commit, commit_causal, init_cache, write_pages
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import Drafter
from dflash_jax.mtp import MTP, draft_chain, prefill_context
from dflash_jax.sampling import (
    SamplingState,
    TokenLogprobs,
    count_emitted,
    count_prompt,
    token_logprobs,
)
from dflash_jax.settle import Evidence, Settled, cut, settle
from dflash_jax.target import Rows, Target, TargetOutput
from dflash_jax.tree import (
    SpineFirst,
    Tree,
    TreePolicy,
    accepted_ranks,
    ancestor_index,
    candidates_needed,
    chain_tree,
    grow_tree,
    is_plain_chain,
    plain_chain,
    root_only_tree,
    top_candidates,
)
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gdn_scan import path_rows


@dataclasses.dataclass(frozen=True)
class RoundSpec:
    """The static side of a round: everything that needs another compiled program when it changes.

    Attributes:
      budget: tree nodes besides the anchor; 0 is autoregressive and needs no drafter.
      block_size: rows of the drafter's block, anchor included; the tree is at most block_size - 1 deep.
      policy: which prefixes the tree keeps.
      rule: how the target chooses a token from its logits.
      sampled_draft: draw a chain from the drafter's marginals instead of building a tree of their best tokens.
      logprobs: whether rounds also return log-probabilities.
      context_pages: entries of the block tables that are read, a bound on the context of the XLA kernels.
      implementation: kernel choice.
      ranks: whether rounds that draft also return which sibling was accepted at each depth.
      mtp: the target's own head drafts `budget` tokens, one after the other, instead of a drafter its block.
      buckets: budgets, ascending, between which rounds switch (`steering.py`); those that draft return `Evidence` for
        them. Rounds of budget 0 keep the drafter's context complete if there are any.
    """

    budget: int
    block_size: int = 1
    policy: TreePolicy = dataclasses.field(default_factory=SpineFirst)
    rule: AcceptanceRule = greedy
    sampled_draft: bool = False
    logprobs: bool = False
    context_pages: int | None = None
    implementation: Implementation = "auto"
    mtp: bool = False
    ranks: bool = False
    buckets: tuple[int, ...] = ()

    @property
    def drafts(self) -> bool:
        """Whether a round needs what drafts: for a draft, or to keep its context."""
        return self.budget > 0 or bool(self.buckets)

    @property
    def max_emitted(self) -> int:
        """Most tokens that one round can emit for a slot."""
        return self.block_size if self.budget else 1


@functools.lru_cache(maxsize=256)
def rounds_of(spec: RoundSpec) -> tuple[RoundSpec, ...]:
    """The rounds that requests of this spec may use, by bucket; the spec alone where the budget is fixed."""
    return tuple(dataclasses.replace(spec, budget=b) for b in spec.buckets) or (spec,)


@struct.dataclass
class DecodeState:
    """All that decoding keeps on the device, for every slot. Donated from round to round.

    Attributes:
      cache: pages and states; hold exactly the tokens before the anchor.
      block_tables: page numbers of each slot in token order.
      lengths: tokens in the caches; the anchor's position.
      anchor: the newest emitted token, not yet in the target's caches.
      taps: target features of the rows accepted last round, the drafter's next context (the MTP head's: hidden
        states after the final norm); None without a drafter.
      num_taps: how many of them, at positions lengths - num_taps … lengths - 1.
      active: slots that decode.
      remaining: tokens that the slot may still emit.
      stop_ids: tokens that end the slot's sequence, -1 where unused.
      histogram: rounds of the slot by tokens emitted.
      next_tokens: with the MTP head, the token after each tap; else None.
      sampling: how the slots sample; None where all of them are greedy.
      beliefs: those of `steering.Steering`, while rounds that are steered run; else None.
    """

    cache: Cache
    block_tables: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    anchor: Int[Array, " B"]
    taps: Float[Array, "B D F"] | None
    num_taps: Int[Array, " B"]
    active: Bool[Array, " B"]
    remaining: Int[Array, " B"]
    stop_ids: Int[Array, "B S"]
    histogram: Int[Array, "B H"]
    next_tokens: Int[Array, "B D"] | None = None
    sampling: SamplingState | None = None
    beliefs: Float[Array | np.ndarray, " M"] | None = None


def init_state(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    slots: int,
    capacity: int,
    page_size: int,
    dtype: jax.typing.DTypeLike,
    mtp_steps: int = 0,
    pages: int | None = None,
) -> DecodeState:
    """The state of `slots` empty slots of up to `capacity` tokens each (a multiple of `page_size`), none active.

    They share `pages` pages; None for as many as all of them can use.
    For rounds that draft with the target's own head, `mtp_steps` tokens each, if that is not 0.
    """
    per_slot = capacity // page_size
    block, features = mtp_steps + 1, min(mtp_steps, 1)
    if drafter is not None:
        block, features = drafter.block_size, len(drafter.target_layer_ids)
    taps = jnp.zeros((slots, block, features * target.hidden_size), dtype) if features else None

    # One array each: donated buffers must not be shared.
    def zeros() -> Int[Array, " B"]:
        return jnp.zeros((slots,), jnp.int32)

    return DecodeState(
        cache=init_cache(
            target, drafter, slots=slots, pages=pages or slots * per_slot, page_size=page_size, dtype=dtype,
            mtp=mtp_steps > 0,
        ),
        block_tables=jnp.zeros((slots, per_slot), jnp.int32),
        lengths=zeros(),
        anchor=zeros(),
        taps=taps,
        num_taps=zeros(),
        active=jnp.zeros((slots,), bool),
        remaining=zeros(),
        stop_ids=jnp.full((slots, max(len(target.eos_token_ids), 1)), -1, jnp.int32),
        histogram=jnp.zeros((slots, block + 1), jnp.int32),
        next_tokens=jnp.zeros((slots, block), jnp.int32) if mtp_steps else None,
    )


@struct.dataclass
class RoundOutput:
    """Tokens that one round (or one prefill) emitted; entries from `count` on mean nothing.

    `ranks`, where the spec asks for them, are those of `tree.accepted_ranks`. Rounds that choose their own budgets also
    return how many of a slot took each bucket, and what to steer the next ones by.
    """

    tokens: Int[Array, "B D"]
    count: Int[Array, " B"]
    logprobs: TokenLogprobs | None = None
    ranks: Int[Array, "B D"] | None = None
    evidence: Evidence | None = None
    used: Int[Array, "B K"] | None = None
    beliefs: Float[Array, " M"] | None = None


def write_context(drafter: Drafter, state: DecodeState) -> Float[Array, "Ld P S 2 K d"]:
    """The draft KV with the keys and values of the taps that wait in the state."""
    assert state.taps is not None and state.cache.draft_kv is not None
    order = jnp.arange(state.taps.shape[1])
    positions = (state.lengths - state.num_taps)[:, None] + order
    with jax.named_scope("draft_context"):
        fresh = drafter.context_kv(state.taps, positions)
        # A slot that has ended may still hold taps, and its pages may be another request's by now.
        valid = state.active[:, None] & (order < state.num_taps[:, None])
        return write_pages(state.cache.draft_kv, fresh, state.block_tables, positions, valid)


def draft(
    target: Target, drafter: Drafter, state: DecodeState, spec: RoundSpec
) -> tuple[Float[Array, "Ld P S 2 K d"], Float[Array, "B L V"]]:
    """Writes last round's accepted features to the draft KV, runs one block, returns the marginals of its slots.

    Returns:
      The draft KV, and fp32 logits of the block_size - 1 tokens after the anchor (slot k predicts the token at
      anchor + k; slot 0's own output is not used), of this device's slice of the vocabulary.
    """
    draft_kv = write_context(drafter, state)
    with jax.named_scope("draft_block"):
        masks = jnp.full(
            (state.anchor.shape[0], spec.block_size - 1), drafter.config.mask_token_id, jnp.int32
        )
        block = target.embed(jnp.concatenate([state.anchor[:, None], masks], axis=1))
        tables = state.block_tables[:, : spec.context_pages]
        hidden = drafter(block, draft_kv, tables, state.lengths, implementation=spec.implementation)
        return draft_kv, target.logits(hidden[:, 1:], spec.implementation)


def verify(
    target: Target, state: DecodeState, tree: Tree, taps: tuple[int, ...], spec: RoundSpec
) -> TargetOutput:
    """One target pass over all rows of the tree; nothing is written."""
    width, earlier = state.cache.conv.shape[2], tree.earlier
    if width and earlier is None:
        earlier = ancestor_index(tree.parents, width)
    rows = Rows(
        tokens=tree.tokens,
        positions=state.lengths[:, None] + tree.depths,
        valid=tree.valid,
        ancestors=tree.ancestors,
        conv_taps=earlier,
        words=tree.words,
        paths=tree.paths,
    )
    context = Context(
        pages=state.cache.kv,
        block_tables=state.block_tables[:, : spec.context_pages],
        lengths=state.lengths,
        recurrent=state.cache.recurrent,
        conv=state.cache.conv,
    )
    return target(rows, context, taps=taps, implementation=spec.implementation)


def commit_walk(
    state: DecodeState, output: TargetOutput, settled: Settled, spec: RoundSpec
) -> tuple[DecodeState, RoundOutput]:
    """Moves the accepted path into the caches, hands the taps on, advances the slots."""
    walked, count = settled.walked, settled.count
    cache = commit(
        state.cache,
        output.updates,
        state.block_tables,
        settled.lengths - count,  # and not what was before, which may have been overwritten in place
        walked.path,
        count,
        spec.implementation,
    )
    taps, num_taps, next_tokens = state.taps, state.num_taps, state.next_tokens
    if output.taps is not None and taps is not None and spec.budget == 0:
        # No draft took the taps that wait: one more joins them.
        taps = taps.at[jnp.arange(count.shape[0]), num_taps].set(output.taps[:, 0], mode="drop")
        num_taps = num_taps + count
    elif output.taps is not None and taps is not None:
        accepted = jnp.take_along_axis(output.taps, walked.path[:, :, None], axis=1)
        taps = jnp.pad(accepted, ((0, 0), (0, taps.shape[1] - accepted.shape[1]), (0, 0)))
        num_taps = count
        if next_tokens is not None:
            next_tokens = walked.tokens
    state = dataclasses.replace(
        state,
        cache=cache,
        lengths=settled.lengths,
        anchor=settled.anchor,
        taps=taps,
        num_taps=num_taps,
        active=settled.active,
        remaining=settled.remaining,
        histogram=settled.histogram,
        next_tokens=next_tokens,
        sampling=count_emitted(state.sampling, jnp.arange(count.shape[0]), walked.tokens, count),
    )
    return state, RoundOutput(tokens=walked.tokens, count=count)


def speculative_round(
    target: Target, drafter: Drafter | MTP | None, state: DecodeState, spec: RoundSpec
) -> tuple[DecodeState, RoundOutput]:
    """One round for all slots (DFlash, arXiv 2602.06036, section 4; DDTree's tree verification).

    Emits, a slot, 1 … block_size tokens, all chosen by the target; inactive slots emit none and keep their state.
    """
    taps: tuple[int, ...] = ()
    draft_scores = None
    if not spec.budget:
        tree = root_only_tree(state.anchor)
        if spec.buckets and isinstance(drafter, Drafter):
            taps = drafter.config.target_layer_ids
        # Else no draft KV is written: a slot decoded so can never draft later.
    elif drafter is None:
        raise ValueError("a round with a tree needs a drafter")
    elif isinstance(drafter, MTP):
        with jax.named_scope("draft"):
            draft_kv, drafted, _ = draft_chain(target, drafter, state, spec)
            state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, draft_kv=draft_kv))
        tree = chain_tree(state.anchor, drafted)
    else:
        with jax.named_scope("draft"):
            draft_kv, logits = draft(target, drafter, state, spec)
            state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, draft_kv=draft_kv))
        with jax.named_scope("tree"):
            length = spec.block_size - 1
            if spec.sampled_draft:
                assert state.sampling is not None
                log_probs = jax.nn.log_softmax(target.vocabulary.gather(logits))
                tree, draft_scores = sampled_chain(state.anchor, log_probs, state.lengths, state.sampling)
            else:
                depths, k = candidates_needed(length, target.config.vocab_size, spec.budget, spec.policy)
                values, tokens, costs = top_candidates(logits[:, :depths], k, target.vocabulary, spec.implementation)
                if is_plain_chain(length, spec.budget, spec.policy):
                    tree = plain_chain(state.anchor, values, tokens, length)
                else:
                    layers, slots, heads, _, dims = state.cache.recurrent.shape
                    tree = grow_tree(
                        state.anchor, values, tokens, spec.budget, spec.policy, length, spec.implementation,
                        window=state.cache.conv.shape[2], costs=costs,
                        paths=path_rows(target.dtype, slots * heads * dims, spec.budget + 1, length) if layers else 0,
                    )  # fmt: skip
        taps = drafter.config.target_layer_ids
    with jax.named_scope("verify"):
        output = verify(target, state, tree, taps, spec)
        if spec.mtp:
            output = dataclasses.replace(output, taps=output.hidden)
        logits = target.logits(output.hidden, spec.implementation)
    with jax.named_scope("rule"):
        chosen = spec.rule(logits, tree, state.lengths, state.sampling, draft_scores, target.vocabulary)
    with jax.named_scope("walk"):
        settled = settle(state, tree, chosen, spec)
    walked = settled.walked
    with jax.named_scope("commit"):
        state, emitted = commit_walk(state, output, settled, spec)
    emitted = dataclasses.replace(emitted, evidence=settled.evidence)
    if spec.ranks and spec.budget:
        emitted = dataclasses.replace(emitted, ranks=accepted_ranks(tree, walked))
    if spec.logprobs:
        on_path = logits[jnp.arange(logits.shape[0])[:, None], walked.path]
        on_path = target.vocabulary.gather(on_path)
        emitted = dataclasses.replace(emitted, logprobs=token_logprobs(on_path, walked.tokens))
    return state, emitted


def prefill(
    target: Target,
    drafter: Drafter | MTP | None,
    state: DecodeState,
    slots: Int[Array, " b"],
    tokens: Int[Array, "b C"],
    count: Int[Array, " b"],
    last: Bool[Array, " b"],
    spec: RoundSpec,
) -> tuple[DecodeState, RoundOutput]:
    """One chunk of the prompts of some slots; where it is the last chunk, the first token is chosen.

    Args:
      slots: slots that the chunk belongs to (all different).
      tokens: the next prompt tokens of each, padded on the right.
      count: how many are real.
      last: whether the prompt ends with this chunk; the slot then becomes active, unless its first token ends it.

    Returns:
      The state, and one token for the slots of `last` (count 1, else 0).
    """
    batch, chunk = tokens.shape
    start = state.lengths[slots]
    tables = state.block_tables[slots]
    order = jnp.arange(chunk)
    valid = order < count[:, None]
    rows = Rows(tokens=tokens, positions=start[:, None] + order, valid=valid)
    context = Context(
        pages=state.cache.kv,
        block_tables=tables[:, : spec.context_pages],
        lengths=start,
        recurrent=state.cache.recurrent[:, slots],
        conv=state.cache.conv[:, slots],
    )
    taps = drafter.config.target_layer_ids if isinstance(drafter, Drafter) else ()
    with jax.named_scope("prefill"):
        output = target(rows, context, taps=taps, implementation=spec.implementation)
        cache = commit_causal(state.cache, output.updates, tables, start, slots, count)
    if isinstance(drafter, Drafter):
        assert output.taps is not None and cache.draft_kv is not None
        with jax.named_scope("draft_context"):
            fresh = drafter.context_kv(output.taps, rows.positions)
            draft_kv = write_pages(cache.draft_kv, fresh, tables, rows.positions, valid)
            cache = dataclasses.replace(cache, draft_kv=draft_kv)
    final = jnp.take_along_axis(output.hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
    logits = target.logits(final, spec.implementation)
    sampling = count_prompt(state.sampling, slots, tokens, valid)
    own = jax.tree.map(lambda leaf: leaf[slots], sampling)
    root = root_only_tree(tokens[:, 0])
    first = spec.rule(logits, root, start + count - 1, own, None, target.vocabulary)

    kept, next_tokens, waiting = state.taps, state.next_tokens, 0
    if isinstance(drafter, MTP):
        # The chunk's last token waits for the token after it: the next chunk's first or the one chosen here.
        assert kept is not None and next_tokens is not None and cache.draft_kv is not None
        with jax.named_scope("draft_context"):
            draft_kv, newest = prefill_context(
                target, drafter, cache.draft_kv, tables, start, tokens, count, kept[slots, 0], output.hidden
            )
        cache = dataclasses.replace(cache, draft_kv=draft_kv)
        kept, next_tokens = kept.at[slots, 0].set(newest), next_tokens.at[slots, 0].set(first[:, 0])
        waiting = 1

    # The first token goes through the same cut as every later one.
    view = dataclasses.replace(
        state, active=last, remaining=state.remaining[slots], stop_ids=state.stop_ids[slots]
    )
    emitted, active = cut(view, first, jnp.ones((batch,), jnp.int32))
    state = dataclasses.replace(
        state,
        cache=cache,
        lengths=state.lengths.at[slots].add(count),
        anchor=state.anchor.at[slots].set(jnp.where(last, first[:, 0], state.anchor[slots])),
        taps=kept,
        num_taps=state.num_taps.at[slots].set(waiting),
        next_tokens=next_tokens,
        active=state.active.at[slots].set(active),
        remaining=state.remaining.at[slots].add(-emitted),
        sampling=count_emitted(sampling, slots, first, emitted),
    )
    logprobs = token_logprobs(target.vocabulary.gather(logits), first) if spec.logprobs else None
    return state, RoundOutput(first, emitted, logprobs)

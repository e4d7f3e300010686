"""Sampling parameters on the device: the distribution of the next token, and the noise that draws from it.

**Order** of the steps, all on fp32 logits: repetition, frequency and presence penalties, logit bias, temperature,
top-k, top-p, min-p. Penalties and bias move the greedy token too, so they come before the temperature. Top-p counts
probabilities renormalised after top-k. Min-p compares probabilities at the request's temperature, as in vLLM; it is
last, as in transformers, so that what it cuts does not change the mass that top-p counts.

**Ties.** A filter keeps every token whose logit equals that of the last token kept. The result then depends on the
values alone and not on how a vocabulary is ordered or divided.

**Noise.** The token after position p of a request with seed s is argmax(filtered logits + Gumbel noise), and the noise
is a function of (s, p, token id) alone: not of the slot, of the other requests, of the tree, or of the round in which
the position is decoded. Autoregressive, chain and tree decoding hence draw the same tokens.

All of this sees whole vocabularies: where devices share one, the acceptance rules gather the logits first.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from dflash_jax.request import MAX_LOGPROBS, SamplingParams
from dflash_jax.tree import Tree

# Independent streams of randomness of one request.
TARGET_STREAM, DRAFT_STREAM, ACCEPT_STREAM = 0, 1, 2


@struct.dataclass
class Filters:
    """Top-k (0: off), top-p (1: off) and min-p (0: off) of every slot."""

    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]


@struct.dataclass
class Penalties:
    """Penalties of every slot and what they count.

    Attributes:
      repetition: divides positive and multiplies negative logits of tokens in prompt or text; 1 is off.
      presence, frequency: subtracted for tokens of the text, once or as often as they occur; 0 is off.
      prompt: tokens that occur in the prompt.
      counts: how often each token has been emitted, the anchor included.
    """

    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    prompt: Bool[Array, "B V"]
    counts: Int[Array, "B V"]


@struct.dataclass
class SamplingState:
    """How every slot samples. A part that no request of the batch needs is None and costs nothing.

    Attributes:
      seed: the request's seed, high word first.
      temperature: 0 is greedy, whatever the filters.
      filters, penalties: see there.
      bias: added to the logits.
    """

    seed: UInt32[Array, "B 2"]
    temperature: Float[Array, " B"]
    filters: Filters | None = None
    penalties: Penalties | None = None
    bias: Float[Array, "B V"] | None = None


@struct.dataclass
class TokenLogprobs:
    """Log-probabilities of emitted tokens under the model's own distribution, before penalties and temperature.

    Attributes:
      chosen: of the token emitted.
      top, top_tokens: the `MAX_LOGPROBS` best tokens (fewer in a smaller vocabulary), best first.
    """

    chosen: Float[Array, "B D"]
    top: Float[Array, "B D K"]
    top_tokens: Int[Array, "B D K"]


# ---------------------------------------------------------------- state


@dataclasses.dataclass(frozen=True)
class SamplingNeeds:
    """Which parts of `SamplingState` a batch of requests needs; each combination is a program of its own."""

    filters: bool = False
    penalties: bool = False
    bias: bool = False

    @classmethod
    def of(cls, requests: Sequence[SamplingParams]) -> "SamplingNeeds | None":
        """The needs of requests that share a round; None where all of them take the model's best token."""
        needs = cls(
            filters=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in requests),
            penalties=any(
                p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0 for p in requests
            ),
            bias=any(p.logit_bias for p in requests),
        )
        plain = needs == cls() and all(p.temperature == 0 for p in requests)
        return None if plain else needs

    def __or__(self, other: "SamplingNeeds | None") -> "SamplingNeeds":
        if other is None:
            return self
        return SamplingNeeds(*(a or b for a, b in zip(*map(dataclasses.astuple, (self, other)), strict=True)))


# What a batch needs, rounded up: each level has all parts of those before it.
NEEDS_LEVELS = (SamplingNeeds(), SamplingNeeds(filters=True), SamplingNeeds(filters=True, penalties=True, bias=True))


def rounded_up(needs: SamplingNeeds | None) -> SamplingNeeds | None:
    """The first of `NEEDS_LEVELS` that has all that is needed: a server then has a program for few combinations."""
    return None if needs is None else next(level for level in NEEDS_LEVELS if level | needs == level)


def slot_settings(
    params: SamplingParams,
    needs: SamplingNeeds,
    vocab: int,
    emitted: Sequence[int] = (),
    cached: Sequence[int] = (),
) -> SamplingState:
    """One request's row of `SamplingState` (no slot axis).

    Args:
      params: the request's.
      needs: the parts to be there.
      vocab: size of the vocabulary.
      emitted: tokens of its text so far, for the penalties: not empty if it goes on in another slot.
      cached: tokens of its prompt that prefill will not read, for the penalties.
    """
    filters = penalties = bias = None
    if needs.filters:
        filters = Filters(jnp.int32(params.top_k), jnp.float32(params.top_p), jnp.float32(params.min_p))
    if needs.penalties:
        penalties = Penalties(
            jnp.float32(params.repetition_penalty),
            jnp.float32(params.presence_penalty),
            jnp.float32(params.frequency_penalty),
            # By the host: the device would compile for every length.
            prompt=jnp.asarray(np.bincount(np.asarray(cached, np.int32), minlength=vocab) > 0),
            counts=jnp.asarray(np.bincount(np.asarray(emitted, np.int32), minlength=vocab), jnp.int32),
        )
    if needs.bias:
        row = np.zeros((vocab,), np.float32)
        for token, value in params.logit_bias:
            row[token] += value
        bias = jnp.asarray(row)
    return SamplingState(
        seed=jnp.asarray(np.asarray([params.seed >> 32, params.seed & 0xFFFFFFFF], np.uint32)),
        temperature=jnp.float32(params.temperature),
        filters=filters,
        penalties=penalties,
        bias=bias,
    )


def init_sampling(needs: SamplingNeeds, slots: int, vocab: int) -> SamplingState:
    """State of slots that no request has been admitted to."""
    row = slot_settings(SamplingParams(), needs, vocab)
    return jax.tree.map(lambda one: jnp.zeros((slots, *one.shape), one.dtype), row)


def widened(
    state: SamplingState | None, needs: SamplingNeeds, running: Mapping[int, SamplingParams], slots: int, vocab: int
) -> SamplingState:
    """The state with the parts that `needs` asks for and it lacks; parts that it has are kept as they are.

    Args:
      state: None where every slot has been greedy so far.
      needs: at least what `state` has.
      running: the requests in slots that are in use; all of them do without the parts that are new.
      slots, vocab: sizes.
    """
    fresh = init_sampling(needs, slots, vocab)
    for slot, params in running.items():
        own = slot_settings(params, needs, vocab)
        fresh = jax.tree.map(lambda all_slots, row, slot=slot: all_slots.at[slot].set(row), fresh, own)
    if state is None:
        return fresh
    had = {field.name: getattr(state, field.name) for field in dataclasses.fields(SamplingState)}
    return dataclasses.replace(fresh, **{name: part for name, part in had.items() if part is not None})


def count_prompt(
    state: SamplingState | None, slots: Int[Array, " b"], tokens: Int[Array, "b C"], valid: Bool[Array, "b C"]
) -> SamplingState | None:
    """Notes the prompt's tokens for the repetition penalty."""
    if state is None or state.penalties is None:
        return state
    prompt = state.penalties.prompt
    tokens = jnp.where(valid, tokens, prompt.shape[1])
    prompt = prompt.at[slots[:, None], tokens].set(True, mode="drop")
    return dataclasses.replace(state, penalties=dataclasses.replace(state.penalties, prompt=prompt))


def count_emitted(
    state: SamplingState | None, slots: Int[Array, " b"], tokens: Int[Array, "b D"], count: Int[Array, " b"]
) -> SamplingState | None:
    """Notes the first `count` tokens, which the slots have just emitted, for the penalties."""
    if state is None or state.penalties is None:
        return state
    counts = state.penalties.counts
    tokens = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], tokens, counts.shape[1])
    counts = counts.at[slots[:, None], tokens].add(1, mode="drop")
    return dataclasses.replace(state, penalties=dataclasses.replace(state.penalties, counts=counts))


# ---------------------------------------------------------------- reductions over the vocabulary


def largest(values: Float[Array, "... V"]) -> Float[Array, "... 1"]:
    """The highest value of each row."""
    return jnp.max(values, axis=-1, keepdims=True)


def total(values: Shaped[Array, "... V"]) -> Shaped[Array, "... 1"]:
    """The sum of each row."""
    return jnp.sum(values, axis=-1, keepdims=True)


def best_token(scores: Float[Array, "... V"]) -> Int[Array, "..."]:
    """The token of the highest score; the smallest id among equals."""
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def at_token(values: Float[Array, "... V"], tokens: Int[Array, "..."]) -> Float[Array, "..."]:
    """One entry of the vocabulary a row."""
    return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]


def probabilities(scores: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Softmax; -inf is probability 0."""
    weights = jnp.exp(scores - largest(scores))
    return weights / total(weights)


# ---------------------------------------------------------------- from logits to the distribution


def _rows(per_slot: Array) -> Array:
    """[B] to [B, 1, 1], to meet [B, N, V]."""
    return per_slot[:, None, None]


def penalised(logits: Float[Array, "B N V"], tree: Tree, penalties: Penalties) -> Float[Array, "B N V"]:
    """Penalties of every row: the tokens on its own path count as emitted, its own included.

    Node 0, the anchor, is among `penalties.counts` already.
    """
    slot, row = jnp.arange(logits.shape[0])[:, None, None], jnp.arange(logits.shape[1])
    on_path = tree.ancestors & tree.valid[:, None, :] & (row > 0)
    counts = jnp.broadcast_to(penalties.counts[:, None], logits.shape)
    counts = counts.at[slot, row[:, None], tree.tokens[:, None, :]].add(on_path.astype(jnp.int32))
    repetition = _rows(penalties.repetition)
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where((counts > 0) | penalties.prompt[:, None], scaled, logits)
    return logits - _rows(penalties.frequency) * counts - _rows(penalties.presence) * (counts > 0)


def _threshold(enough: Callable[[Array], Array], shape: tuple[int, ...]) -> UInt32[Array, "... 1"]:
    """The largest t with enough(t), which holds for 0 and stops holding once: 32 halvings, exact."""

    def halve(step: Array, t: Array) -> Array:
        higher = t | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        return jnp.where(enough(higher), higher, t)

    return jax.lax.fori_loop(0, 32, halve, jnp.zeros(shape, jnp.uint32))


def _ordered(values: Float[Array, "... V"]) -> UInt32[Array, "... V"]:
    """Integers in the order of the floats; + 0.0 makes one of the two zeros."""
    bits = jax.lax.bitcast_convert_type(values + 0.0, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _filtered(scores: Float[Array, "B N V"], filters: Filters) -> Float[Array, "B N V"]:
    """-inf for what top-k, top-p and min-p exclude. Nothing is sorted."""
    keys = _ordered(scores)
    shape = (*scores.shape[:-1], 1)
    k = _rows(jnp.where(filters.top_k > 0, filters.top_k, scores.shape[-1]))
    lowest = _threshold(lambda t: total((keys >= t).astype(jnp.int32)) >= k, shape)

    best = largest(scores)
    weights = jnp.where(keys >= lowest, jnp.exp(scores - best), 0.0)
    wanted = _rows(filters.top_p) * total(weights)
    nucleus = _threshold(lambda t: total(jnp.where(keys >= t, weights, 0.0)) >= wanted, shape)
    # A full sum already holds once the tokens left are below its rounding, so 1 is not left to the search.
    lowest = jnp.where(_rows(filters.top_p) < 1.0, jnp.maximum(lowest, nucleus), lowest)
    keep = (keys >= lowest) & (scores >= best + _rows(jnp.log(filters.min_p)))
    return jnp.where(keep, scores, -jnp.inf)


def tempered(logits: Float[Array, "B N V"], state: SamplingState) -> Float[Array, "B N V"]:
    """Temperature and filters. Greedy slots keep their scale; no filter removes their best token."""
    scores = logits / _rows(jnp.where(state.temperature > 0, state.temperature, 1.0))
    return scores if state.filters is None else _filtered(scores, state.filters)


def next_token_scores(
    logits: Float[Array, "B N V"], tree: Tree, state: SamplingState
) -> Float[Array, "B N V"]:
    """All steps in order; the softmax of the result is the distribution of the token after each row."""
    if state.penalties is not None:
        logits = penalised(logits, tree, state.penalties)
    if state.bias is not None:
        logits = logits + state.bias[:, None]
    return tempered(logits, state)


# ---------------------------------------------------------------- noise


def _bits(
    state: SamplingState, stream: int, start: Int[Array, " B"], count: int, shape: tuple[int, ...]
) -> UInt32[Array, "B D ..."]:
    """Random bits for positions start, start + 1, … of every slot."""

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, stream), position), shape, jnp.uint32)

    positions = start[:, None] + jnp.arange(count, dtype=start.dtype)
    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(state.seed, positions)


def gumbel(
    state: SamplingState, stream: int, start: Int[Array, " B"], count: int, vocab: int
) -> Float[Array, "B D V"]:
    """Gumbel noise for the tokens after positions start, start + 1, …; zero for greedy slots.

    Large values decide the maximum over a large vocabulary. They come from small u, which has all 32 bits.
    """
    bits = _bits(state, stream, start, count, (vocab,))
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    noise = jnp.where(_rows(state.temperature) > 0, -jnp.log(-jnp.log1p(-u)), 0.0)
    # Rows of one depth share their noise; without the barrier the compiler may make it anew for each of them.
    return jax.lax.optimization_barrier(noise)


def uniform(state: SamplingState, stream: int, start: Int[Array, " B"], count: int) -> Float[Array, "B D"]:
    """Uniform numbers in [0, 1), one a position."""
    return (_bits(state, stream, start, count, ()) >> 8).astype(jnp.float32) * 2.0**-24


# ---------------------------------------------------------------- log-probabilities


def token_logprobs(logits: Float[Array, "B D V"], tokens: Int[Array, "B D"]) -> TokenLogprobs:
    """Log-probabilities of `tokens` and of the best ones, from the rows' unchanged logits."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    top, top_tokens = jax.lax.top_k(log_probs, min(MAX_LOGPROBS, logits.shape[-1]))
    return TokenLogprobs(at_token(log_probs, tokens), top, top_tokens.astype(jnp.int32))


def empty_logprobs(slots: int, length: int, vocab: int) -> TokenLogprobs:
    """A buffer for what `token_logprobs` returns."""
    top = (slots, length, min(MAX_LOGPROBS, vocab))
    return TokenLogprobs(jnp.zeros((slots, length)), jnp.zeros(top), jnp.zeros(top, jnp.int32))

"""Rounds repeated on the device in a `lax.while_loop`: all of one budget, or each of the budget that pays best."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax import steering as steer
from dflash_jax.drafter import Drafter
from dflash_jax.mtp import MTP
from dflash_jax.round import DecodeState, RoundOutput, RoundSpec, rounds_of, speculative_round, write_context
from dflash_jax.sampling import empty_logprobs
from dflash_jax.settle import Evidence
from dflash_jax.steering import Steering
from dflash_jax.target import Target
from pallas_kernels.scalars import scalars

# Among `RoundOutput.ranks`: the token of a round that drafted nothing.
NOT_DRAFTED = -2

Carry = tuple[DecodeState, RoundOutput, Array]


def decode(
    target: Target,
    drafter: Drafter | MTP | None,
    state: DecodeState,
    max_rounds: Int[Array, ""] | None,
    spec: RoundSpec,
    buffer: int,
    own: Bool[Array, " B"] | None = None,
    steering: Steering | None = None,
) -> tuple[DecodeState, RoundOutput]:
    """Repeats the round on the device until no slot is active, `max_rounds` are done, or the buffer could overflow.

    Args:
      max_rounds: None for one round without a loop, whether or not a slot is active.
      buffer: tokens a slot that the output can hold; at least spec.max_emitted.
      own: the slots that these rounds are for, None for all. Others, which may be in the middle of a prompt or decode
        by another spec, stay exactly as they are.
      steering: rounds take those of `spec.buckets` that `steering.step` names; None: all take `spec.budget`.
    """
    before = state
    if own is not None:
        state = dataclasses.replace(state, active=state.active & own)
    start = (state, _empty(target, spec, state.anchor.shape[0], buffer, steering), jnp.zeros((), jnp.int32))
    loop = _Loop(target, drafter, spec, buffer, max_rounds)
    if steering is not None:
        state, output, _ = loop.steered(start, steering)
    elif spec.buckets and not spec.budget:
        state, output, _ = loop.without_drafts(start)
    elif max_rounds is None:
        state, output, _ = loop.one(start, spec)
    else:
        state, output, _ = loop.repeat(start, spec, max_rounds)
    if own is not None:
        state = _restore(state, before, own)
    return state, output


def _empty(target: Target, spec: RoundSpec, slots: int, buffer: int, steering: Steering | None) -> RoundOutput:
    """What no round has emitted."""
    output = RoundOutput(tokens=jnp.zeros((slots, buffer), jnp.int32), count=jnp.zeros((slots,), jnp.int32))
    if spec.logprobs:
        output = dataclasses.replace(output, logprobs=empty_logprobs(slots, buffer, target.config.vocab_size))
    if spec.ranks and spec.budget:
        output = dataclasses.replace(output, ranks=jnp.zeros_like(output.tokens))
    buckets = len(spec.buckets)
    if steering is not None:
        used = jnp.zeros((slots, buckets), jnp.int32)
        return dataclasses.replace(output, used=used, beliefs=jnp.asarray(steering.beliefs))
    if buckets and spec.budget:
        return dataclasses.replace(output, evidence=_no_evidence(slots, buckets))
    return output


def _loop[Carried](going: Callable[[Carried], Array], body: Callable[[Carried], Carried], carry: Carried) -> Carried:
    """`jax.lax.while_loop`, with the condition as the last thing of the body.

    On a GPU the host reads the condition before it hands over a body, which is one graph if there is no loop in it: so
    the host waits for no launch outside of the graph.
    """

    def step(flagged: tuple[Array, Carried]) -> tuple[Array, Carried]:
        after = body(flagged[1])
        return going(after), after

    return jax.lax.while_loop(lambda flagged: flagged[0], step, (going(carry), carry))[1]


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The rounds of one call of `decode`, whose arguments these are."""

    target: Target
    drafter: Drafter | MTP | None
    spec: RoundSpec
    buffer: int
    max_rounds: Array | None

    def going(self, carry: Carry, limit: Array) -> Array:
        state, output, rounds = carry
        fits = jnp.max(output.count) + self.spec.max_emitted <= self.buffer
        return jnp.any(state.active) & (rounds < limit) & fits

    def one(self, carry: Carry, spec: RoundSpec) -> Carry:
        """One round of this spec, its tokens put behind those that are there. The evidence is that of the round."""
        state, output, rounds = carry
        state, fresh = speculative_round(self.target, self.drafter, state, spec)
        slots, order = jnp.arange(state.anchor.shape[0])[:, None], jnp.arange(spec.max_emitted)
        place = jnp.where(order < fresh.count[:, None], output.count[:, None] + order, self.buffer)

        def append(kept: Array, new: Array) -> Array:
            return kept.at[slots, place].set(new, mode="drop")

        if output.ranks is not None and fresh.ranks is None:
            fresh = dataclasses.replace(fresh, ranks=jnp.full_like(fresh.tokens, NOT_DRAFTED))
        output = dataclasses.replace(
            output,
            tokens=append(output.tokens, fresh.tokens),
            count=output.count + fresh.count,
            logprobs=jax.tree.map(append, output.logprobs, fresh.logprobs),
            ranks=jax.tree.map(append, output.ranks, fresh.ranks),
            evidence=fresh.evidence,
        )
        return state, output, rounds + 1

    def repeat(self, carry: Carry, spec: RoundSpec, limit: Array) -> Carry:
        """Rounds of one spec, until there have been `limit`. Their evidence is added up."""

        def body(carry: Carry) -> Carry:
            state, output, rounds = self.one(carry, spec)
            evidence = jax.tree.map(jnp.add, carry[1].evidence, output.evidence)
            return state, dataclasses.replace(output, evidence=evidence), rounds

        return _loop(lambda carry: self.going(carry, limit), body, carry)

    def without_drafts(self, carry: Carry) -> Carry:
        """Rounds of budget 0 that keep the drafter's context complete; as many as `max_rounds` says."""
        plain = dataclasses.replace(self.spec, budget=0)
        if self.max_rounds is None:
            return self.one((self._write_taps(carry[0]), *carry[1:]), plain)
        limit = self.max_rounds
        return _loop(lambda c: self.going(c, limit), lambda c: self.stretch(c, plain), carry)

    def stretch(self, carry: Carry, plain: RoundSpec) -> Carry:
        """`PLAIN_ROUNDS` rounds without a draft, or as many as may be; their taps go into the draft KV at once."""
        state, output, rounds = carry
        assert self.max_rounds is not None and state.taps is not None
        room = state.taps.shape[1]
        limit = jnp.minimum(rounds + steer.PLAIN_ROUNDS, self.max_rounds)
        wide = jnp.pad(state.taps, ((0, 0), (0, steer.PLAIN_ROUNDS), (0, 0)))
        carry = (dataclasses.replace(state, taps=wide), output, rounds)
        state, output, rounds = self.repeat(carry, plain, limit)
        state = self._write_taps(state)
        assert state.taps is not None
        return dataclasses.replace(state, taps=state.taps[:, :room]), output, rounds

    def _write_taps(self, state: DecodeState) -> DecodeState:
        """The taps that wait go into the draft KV; then there is room for as many more."""
        assert isinstance(self.drafter, Drafter)
        cache = dataclasses.replace(state.cache, draft_kv=write_context(self.drafter, state))
        return dataclasses.replace(state, cache=cache, num_taps=jnp.zeros_like(state.num_taps))

    def steered(self, carry: Carry, steering: Steering) -> Carry:
        """Rounds of budgets of which most is expected, see `steering.py`.

        On a GPU the host looks at every condition of a loop, in about the time of ten launches, and a body without a
        loop is one graph. So a loop stays with a bucket as long as that is the choice, and its body is a round with the
        choice after it: the host looks once a round, as it does where the budget is fixed. These loops stand one after
        the other, the largest bucket's, with which most texts begin and end, first: to choose one of them, by a
        `lax.switch`, would be one more look, and copies of what goes into it.
        """
        assert self.max_rounds is not None
        limit, budgets = self.max_rounds, self.spec.buckets
        seconds, size = jnp.asarray(steering.seconds), steering.beliefs.shape[0]
        forced = jnp.asarray(steering.forced)[None]
        assert carry[1].used is not None
        # A histogram counts the rounds of a slot that emit something.
        counted = jnp.sum(carry[0].histogram, axis=1) - jnp.sum(carry[1].used, axis=1)
        # With the choice, and whether rounds go on.
        Steered = tuple[Carry, Array, Array]

        def learn(carry: Carry, told: Array, index: int | None) -> Steered:
            """What `told` says of the rounds before, and a choice for the next ones."""
            state, output, rounds = carry
            assert output.beliefs is not None
            beliefs, chosen = scalars(
                functools.partial(steer.step, index=index, budgets=budgets), output.beliefs, seconds, forced, told,
                results=(size, 1), in_place=True, implementation=self.spec.implementation,
            )  # fmt: skip
            carry = state, dataclasses.replace(output, beliefs=beliefs, evidence=None), rounds
            return carry, chosen, self.going(carry, limit)

        def plain(steered: Steered, spec: RoundSpec) -> Steered:
            before = steered[0]
            after = self.stretch(before, spec)
            return learn(after, (after[2] - before[2]).astype(jnp.float32)[None], 0)

        def drafting(steered: Steered, spec: RoundSpec, index: int) -> Steered:
            after = self.one(steered[0], spec)
            assert after[1].evidence is not None
            return learn(after, jnp.sum(jnp.asarray(after[1].evidence.numbers), axis=0), index)

        def staying(index: int, spec: RoundSpec, steered: Steered) -> Steered:
            """Rounds of a bucket as long as it is the choice."""
            body = functools.partial(plain, spec=spec)
            if spec.budget:
                body = functools.partial(drafting, spec=spec, index=index)
            (state, output, rounds), chosen, going = _loop(lambda c: c[2] & (c[1][0] == index), body, steered)
            assert output.used is not None
            ran = jnp.sum(state.histogram, axis=1) - counted - jnp.sum(output.used, axis=1)
            used = output.used + ran[:, None] * (jnp.arange(len(budgets)) == index)
            return (state, dataclasses.replace(output, used=used), rounds), chosen, going

        loops = [functools.partial(staying, *pair) for pair in reversed(list(enumerate(rounds_of(self.spec))))]

        def each(steered: Steered) -> Steered:
            for loop in loops:
                steered = loop(steered)
            return steered

        steered = learn(carry, jnp.asarray(steering.keep)[None], None)
        if len(loops) == 2:
            # So few are those of rounds of a third of a millisecond, and most texts want trees all along: a loop before
            # those that take turns spares them two looks, for a round more to compile.
            steered = loops[0](steered)
            loops.reverse()
        return jax.lax.while_loop(lambda steered: steered[2], each, steered)[0]


def _no_evidence(slots: int, buckets: int) -> Evidence:
    return Evidence(jnp.zeros((slots, 1 + 2 * buckets), jnp.float32))


def _restore(state: DecodeState, before: DecodeState, own: Bool[Array, " B"]) -> DecodeState:
    """Gives the slots that are not `own` back what a round changes even in a slot that is not active."""

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(own.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    names = ("active", "num_taps", "taps", "next_tokens")
    return dataclasses.replace(
        state, **{name: jax.tree.map(pick, getattr(state, name), getattr(before, name)) for name in names}
    )

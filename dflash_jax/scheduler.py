"""The scheduler: requests come and go at any time and share the slots and pages of one decode state.

It runs on the host, on one thread, and decides only by what it was given and by the tokens that came back, so several
processes of one run decide alike. One `step` admits what fits, hands the device one chunk of a prompt and one burst of
rounds for each way of drafting among the requests, and reads the results of the step before: the device is never idle
while the host looks at tokens.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.acceptance import greedy, reject_and_resample, sample
from dflash_jax.budget import BudgetController, measure_curve, unsteered
from dflash_jax.decoding import NOT_DRAFTED
from dflash_jax.errors import UserError
from dflash_jax.flights import Flight, Request, prefill_spec, token_logprobs
from dflash_jax.pages import PagePool
from dflash_jax.prefix_cache import Prefix, PrefixCache
from dflash_jax.programs import shapes_of
from dflash_jax.request import Chunk, Completion, SamplingParams, TokenLogprob
from dflash_jax.round import DecodeState, RoundSpec, rounds_of
from dflash_jax.sampling import SamplingNeeds, rounded_up, slot_settings, widened
from dflash_jax.stopping import StopUpdate

if TYPE_CHECKING:
    from dflash_jax.engine import Engine

# Tokens a slot that one burst of rounds can hand to the host.
BURST_TOKENS = 256
# Prefill chunks between two states that are kept of a prompt, beside the one at its end.
CHUNKS_PER_PREFIX = 4


def widths_of(slots: int) -> tuple[int, ...]:
    """Slots that a round may hold, ascending: 1, 4, 16 and so on up to less than half of them, and all.

    Few, because each is as many programs as there are ways to decode.
    """
    widths = [1]
    while 2 * widths[-1] < slots:
        widths.append(4 * widths[-1])
    return (*widths[:-1], slots)


@functools.lru_cache(maxsize=256)  # of each step; the same object again is also found faster as a part of a key
def _full_spec(spec: RoundSpec, sampling: bool, logprobs: bool) -> RoundSpec:
    """See `Scheduler._full_spec`."""
    rule = greedy if not sampling else reject_and_resample if spec.sampled_draft else sample
    return dataclasses.replace(spec, rule=rule, sampled_draft=spec.sampled_draft and sampling, logprobs=logprobs)


class Scheduler:
    """Continuous batching over the slots of one decode state. Not thread-safe: one thread calls it.

    Requests are admitted in the order of their arrival, none overtakes another: each waits for a free slot, for pages
    for its prompt and text (`lazy`: for its prompt), and, where the state is of another kind (that of a drafter, of
    the target's own head), for the requests before it to end. Requests that draft in different ways decode in turns, a
    burst each. Before the first request of an adaptive budget, rounds are timed, for which all slots must be free: it
    waits for that too.

    Attributes:
      engine: whose models decode.
      slots, capacity: requests decoded at once, and tokens that one of them can hold.
      pool: pages of the state.
      preemptions: how often a request had to give its slot back.
      prefixes: beginnings of prompts that need not be read again; None without such a cache.
      needs: the parts of the sampling state that the requests of now need; None where all of them are greedy.
    """

    def __init__(
        self,
        engine: "Engine",
        slots: int,
        capacity: int,
        *,
        pages: int | None = None,
        burst: int | None = None,
        interleave: bool = False,
        few_programs: bool = False,
        lazy: bool = False,
        narrow: bool = False,
        prefixes: int = 0,
    ):
        """An empty scheduler.

        Args:
          engine: see the class.
          slots: see the class.
          capacity: see the class; whole pages.
          pages: that all slots share; None for as many as they can use.
          burst: most rounds of a burst; None for what one buffer of tokens holds. With 1 programs have no loop of
            rounds, in which the host of a GPU waits, so it hands out one round's results during the next.
          interleave: whether decoding goes on, a round after each chunk, while prompts are read (no request stalls
            the others), or waits until all of them are (less work in all).
          few_programs: whether needs are rounded up (`sampling.NEEDS_LEVELS`), so that fewer programs are compiled, of
            which some do more than their requests need, and whether the state is from the start that of the requests
            which leave the method to the engine.
          lazy: whether requests get pages as their texts grow. Where none are left the request that was admitted last
            gives its slot and pages back and is first in the queue; it reads what it had emitted again and goes on.
          narrow: whether rounds are only as wide as the requests in them ask for, see `widths_of`: faster while few
            of the slots are in use, for a program more of each kind for each width.
          prefixes: recurrent states to keep, each of the beginning of a prompt whose pages then stay as well.
        """
        self.engine, self.slots, self.capacity = engine, slots, capacity
        self.pool = PagePool(pages or slots * (capacity // engine.page_size), engine.page_size)
        self._burst, self._interleave, self._few_programs = burst, interleave, few_programs
        self._single = burst == 1
        self._lazy, self.preemptions = lazy, 0
        self._widths = widths_of(slots) if narrow else (slots,)
        interval = CHUNKS_PER_PREFIX * engine.prefill_chunk
        # The prefixes kept all end in different pages, so there are never more of them.
        self.prefixes = PrefixCache(self.pool, min(prefixes, self.pool.pages), interval) if prefixes else None
        self._store: DecodeState | None = None  # the states of the prefixes, one a slot
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: dict[int, Request] = {}  # by slot
        self._prefilling: collections.deque[Request] = collections.deque()
        self._flying: list[Flight] = []
        self._state: DecodeState | None = None
        self._made_for = RoundSpec(0)  # the kind of request that the state was made for
        self.needs: SamplingNeeds | None = None
        self._logprobs = False
        self._refused: tuple[Any, ...] = ()  # a request for which there were too few pages, and when that was

    # ---------------------------------------------------------------- from outside

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._waiting or self._running or self._flying)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in slots."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Puts a new request at the end of the queue.

        Raises:
          UserError: it could not be served even alone.
        """
        if request.tokens > self.capacity or self.pool.pages_for(request.tokens) > self.pool.pages:
            most = min(self.capacity, self.pool.pages * self.pool.page_size)
            raise UserError(
                f"--prompt has {len(request.prompt)} tokens, with --max-new-tokens {request.limit} more than the "
                f"{most} that a slot can hold"
            )
        request.spec = self.engine.spec_of(request.params, self.capacity, self.slots)
        request.compiled_before = self.engine.programs.compile_seconds
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request at once, wherever it is; its slot and pages are free. One that has ended stays as it is."""
        if request.slot is not None:
            self._release([request])
        elif request in self._waiting:
            self._waiting.remove(request)
            self._refused = ()

    def close(self) -> None:
        """Cancels everything and gives the state back to the engine, which the next scheduler may use."""
        self._waiting.clear()
        self._release(list(self._running.values()))
        self._flying.clear()
        if self.prefixes is not None:
            self.prefixes.clear()
            self._store = None
        self._give_back_state()

    def step(self) -> list[tuple[Request, Chunk]]:
        """Admits, prefills, decodes; returns what the step before has emitted, in no order but each request's own.

        A request has ended, and its slot and pages are free, when its chunk carries a completion. After an exception
        the device's state is unknown: drop the scheduler.
        """
        landing, self._flying = self._flying, []
        chunks: list[tuple[Request, Chunk]] = []
        if not self._single or (jax.process_count() == 1 and all(flight.ready for flight in landing)):
            # The device has nothing left to do meanwhile, and less if a text has ended. Of several processes one might
            # see it earlier than another, and hand over another program; where rounds are a loop, a GPU's host has
            # waited for its end already.
            chunks, landing = self._land_all(landing), []
        self._admit()
        if self._lazy and not self._grow(landing):
            # There are too few pages for what may be coming: first see what has come.
            chunks, landing = chunks + self._land_all(landing), []
            while not self._grow(landing):
                self._preempt()
        if self._prefilling:
            self._prefill_chunk(self._prefilling[0])
        decodes = self._interleave or not self._prefilling
        if self._single:
            if decodes:
                self._decode()
            return chunks + self._land_all(landing)
        # On a GPU the host waits in a loop of rounds until it ends. First tokens arrive meanwhile, and handing over the
        # loop takes as long as reading a short prompt.
        arriving, self._flying = [self.engine.arrivals.submit(flight.arrive) for flight in self._flying], []
        if decodes:
            self._decode()
        for arrival in arriving:
            chunks += self._land(*arrival.result())
        return chunks

    def check(self) -> None:
        """Walks slots, pages and the device's state; raises `RuntimeError` that names what is not in order."""
        problems = []
        held = collections.Counter(page for request in self._running.values() for page in request.pages)
        held.update(self.prefixes.held if self.prefixes is not None else ())
        counted = {page: self.pool.holders(page) for page in range(self.pool.pages) if self.pool.holders(page)}
        if held != counted or sorted([*held, *self.pool.unused]) != list(range(self.pool.pages)):
            problems.append(
                f"{self.pool.pages} pages, but held {dict(held)}, counted {counted}, free {sorted(self.pool.unused)}"
            )
        for slot, request in self._running.items():
            if request.slot != slot or not 0 <= slot < self.slots:
                problems.append(f"slot {slot} runs a request of slot {request.slot}")
            whole, now = self.pool.pages_for(request.tokens), self.pool.pages_for(request.known)
            if not (now if self._lazy else whole) <= len(request.pages) <= whole:
                problems.append(f"slot {slot} has {len(request.pages)} pages for {request.tokens} tokens")
        if any(request.slot is not None or request.pages for request in self._waiting):
            problems.append("a waiting request holds a slot or pages")
        if [r for r in self._prefilling if self._running.get(-1 if r.slot is None else r.slot) is not r or r.decoding]:
            problems.append("a request that is not in a slot, or has its prompt there, is in line for prefill")
        if self._state is not None:
            active, tables = jax.device_get((self._state.active, self._state.block_tables))
            decoding = {slot for slot, request in self._running.items() if request.decoding}
            if not set(np.flatnonzero(active)) <= decoding:
                problems.append(f"slots {np.flatnonzero(active)} are active, of which {decoding} decode")
            for slot, request in self._running.items():
                if tables[slot, : len(request.pages)].tolist() != request.pages:
                    problems.append(f"slot {slot} holds pages {request.pages}, its table has {tables[slot]}")
        elif self._running:
            problems.append("requests run without a state")
        if problems:
            raise RuntimeError("; ".join(problems))

    # ---------------------------------------------------------------- admission

    def _admit(self) -> bool:
        """Gives slots and pages to the requests at the head of the queue, as far as they go; whether there were any."""
        fresh: list[Request] = []
        timing = False  # whether rounds are timed before these requests begin
        while self._waiting and len(self._running) < self.slots:
            request = self._waiting[0]
            if not self._serves(request.spec):
                if self._running:
                    break
                # One that does not draft takes the state of the next that does, which can then join it.
                usual = request.spec
                if self._few_programs:
                    usual = self.engine.spec_of(SamplingParams(), self.capacity, self.slots)
                self._make_state(next((r.spec for r in self._waiting if r.spec.budget), usual))
            untimed = request.spec.buckets and self.curve_key(request.spec) not in self.engine.controllers
            # Timing writes into pages, so with a cache of prefixes none may have been found yet.
            if untimed and len(self._running) > (len(fresh) if self.prefixes is None else 0):
                break
            timing |= bool(untimed)
            taken = self._take_pages(request, find=not timing)
            if taken is None:
                break
            self._waiting.popleft()
            slot = next(slot for slot in range(self.slots) if slot not in self._running)
            request.begin(slot, *taken)
            self._running[slot] = request
            self._prefilling.append(request)
            fresh.append(request)
        if fresh:
            self._settle(fresh)
        for spec in dict.fromkeys(request.spec for request in fresh):
            self._compile(spec)
        for request in fresh:
            self._prepare(request)
        return bool(fresh)

    def _take_pages(self, request: Request, find: bool) -> tuple[list[int], Prefix | None] | None:
        """Pages for a request's admission, the first of them those of a kept prefix; None if there are too few."""
        tokens = self._pages_until(request, []) if self._lazy else request.tokens
        prefix, added = None, 0 if self.prefixes is None else self.prefixes.added
        # A long prompt takes milliseconds to look up: once, and not each step, as long as nothing has changed.
        now = (request, request.known, self.pool.free, added)
        if now == self._refused:
            return None
        if self.prefixes is not None:
            request.keys = self.prefixes.keys(request.prompt + request.emitted, self._kind(request))
            prefix = self.prefixes.find(request.keys) if find else None
        shared = [] if prefix is None else list(prefix.pages)
        missing = self.pool.pages_for(tokens) - len(shared)
        # Who has just been admitted should not be the first to lose its pages again.
        if not self._make_room(missing + (len(self._running) if self._lazy else 0)):
            self.pool.release(shared)
            self._refused = now
            return None
        if self.prefixes is not None:
            self.prefixes.hits += prefix is not None
            self.prefixes.misses += prefix is None
        return shared + self.pool.allocate(missing * self.pool.page_size), prefix

    def _make_room(self, pages: int) -> bool:
        """Drops kept prefixes until so many pages are free; whether they are. In vain none is dropped."""
        if pages <= self.pool.free:
            return True
        if self.prefixes is None or pages > self.pool.free + self.prefixes.evictable:
            return False
        while pages > self.pool.free and self.prefixes.evict():
            pass
        return pages <= self.pool.free

    @staticmethod
    def _kind(request: Request) -> tuple[bool, bool]:
        """What the pages of a request hold beside the target's keys and values."""
        return request.spec.drafts, request.spec.mtp

    def _pages_until(self, request: Request, landing: Sequence[Flight]) -> int:
        """Tokens for which a request must hold pages before the next burst, with what is still in flight."""
        spec, buffer = request.spec, self._buffer(request.spec)
        burst = buffer if self._burst is None else min(self._burst * spec.max_emitted, buffer)
        coming = sum(flight.most for flight in landing if any(owner is request for _, owner in flight.owners))
        return min(request.tokens, request.known + coming + 1 + burst)

    def _grow(self, landing: Sequence[Flight]) -> bool:
        """Gives requests the pages that their next burst may need, the oldest first; False if there are too few."""
        for request in self._running.values():
            tokens = self._pages_until(request, landing)
            missing = self.pool.pages_for(tokens) - len(request.pages)
            if not self._make_room(missing):
                return False
            if missing > 0:
                request.pages = request.pages + self.pool.allocate(missing * self.pool.page_size)
                assert self._state is not None and request.slot is not None
                table = self._table(request.pages)
                self._state = self.engine.programs.assign_pages(self._state, request.slot, table)
        return True

    def _preempt(self) -> None:
        """The youngest request makes room and waits, before all others. Nothing of it is in flight.

        The oldest never has to: it fits alone.
        """
        youngest = next(reversed(self._running.values()))
        self._release([youngest])
        self._waiting.appendleft(youngest)
        self.preemptions += 1

    def _table(self, pages: Sequence[int]) -> list[int]:
        """A slot's block table. Unused entries repeat a page of its own: never read, and never another slot's."""
        width = self.capacity // self.pool.page_size
        return [*pages, *[pages[-1]] * width][:width]

    def _serves(self, spec: RoundSpec) -> bool:
        """Whether there is a state that can hold such a request. Without a draft any can."""
        kind = self.engine.state_kind
        return self._state is not None and (not spec.budget or kind(spec) == kind(self._made_for))

    def _make_state(self, spec: RoundSpec) -> None:
        self._give_back_state()
        self._state = self.engine.take_state(self.slots, self.capacity, self.pool.pages, spec)
        self._made_for = spec
        if self.prefixes is not None:
            self.prefixes.clear()  # pages of another state
            size = self.pool.page_size
            self._store = None  # not two of them at once
            self._store = self.engine.new_state(self.prefixes.places, size, 1, spec)

    def _give_back_state(self) -> None:
        if self._state is not None:
            self.engine.keep_state(self._state, self.slots, self.capacity, self.pool.pages, self._made_for)
        self._state = None

    def _settle(self, fresh: Sequence[Request]) -> None:
        """Makes the state hold what the requests of now need to sample, those in line included.

        While slots are in use nothing is taken away, so that programs do not change back and forth.
        """
        assert self._state is not None
        old = {slot: r.params for slot, r in self._running.items() if r not in fresh}
        everyone = [r.params for r in (*self._running.values(), *self._waiting)]
        needs, logprobs = SamplingNeeds.of(everyone), any(p.logprobs is not None for p in everyone)
        if self._few_programs:
            needs = rounded_up(needs)
        sampling = self._state.sampling if old else None
        if old:
            needs = needs if self.needs is None else self.needs | needs
            logprobs |= self._logprobs
        if needs != self.needs or not old:
            vocab = self.engine.target.config.vocab_size
            if needs is not None:
                sampling = self.engine.programs.replicated(widened(sampling, needs, old, self.slots, vocab))
            self._state = dataclasses.replace(self._state, sampling=sampling)
        self.needs, self._logprobs = needs, logprobs

    def curve_key(self, draft: RoundSpec) -> Any:
        """What the time of a round depends on, how tokens are chosen left out."""
        return dataclasses.replace(draft, ranks=False) if draft.ranks else draft, self._widths, self.capacity

    def _compile(self, draft: RoundSpec) -> None:
        """Compiles what requests of this kind need; times the rounds of an adaptive budget if they are the first."""
        programs, controllers, key = self.engine.programs, self.engine.controllers, self.curve_key(draft)
        assert self._state is not None
        spec = self._full_spec(draft)
        # Threads that find nothing to compile take longer than all else between a request and its first chunk.
        mark = (spec, self._buffer(spec), self._widths, self._single, self.engine.prefill_chunk)
        mark += shapes_of(self._state)
        if mark not in programs.ready:
            self._compile_all(spec)
            programs.ready.add(mark)
        if draft.buckets and key not in controllers:
            start = time.perf_counter()
            if self.prefixes is not None:
                self.prefixes.clear()  # timing writes into pages
            curves = {}
            for width in self._widths:
                self._state, curves[width] = measure_curve(
                    programs, self._state, spec, self._buffer(spec), self.engine.page_size,
                    loop=not self._single, places=self._places(range(width)),
                )  # fmt: skip
            controllers[key] = BudgetController(curves)
            programs.compile_seconds += time.perf_counter() - start

    def _compile_all(self, spec: RoundSpec) -> None:
        """Compiles prefill, and the rounds of every width and budget."""
        programs = self.engine.programs
        assert self._state is not None
        padding = [0] * self.engine.prefill_chunk
        jobs = [
            functools.partial(
                programs.prefill, self._state, 0, padding, 1, True, prefill_spec(spec), compile_only=True
            )
        ]
        rounds, limit, steering = rounds_of(spec), None, None
        if not self._single:
            rounds, limit = (spec,), 1
            steering = unsteered(len(spec.buckets)) if spec.buckets else None
        for width in self._widths:
            places = self._places(range(width))
            jobs += [
                functools.partial(
                    programs.decode, self._state, limit, one, self._buffer(spec), slots=places, steering=steering,
                    compile_only=True,
                )
                for one in rounds
            ]
        programs.together(jobs)

    def _prepare(self, request: Request) -> None:
        """Empties the request's slot for it."""
        engine, programs = self.engine, self.engine.programs
        assert self._state is not None and request.slot is not None
        sampling = None
        if self.needs is not None:
            vocab = engine.target.config.vocab_size
            cached = request.reads[: request.prefilled]
            sampling = slot_settings(request.params, self.needs, vocab, request.emitted, cached)
        table = self._table(request.pages)
        eos = () if request.params.ignore_eos else engine.target.config.eos_token_ids
        places = self._state.stop_ids.shape[1]
        stop_ids = (*eos, *([-1] * places))[:places]
        left = request.limit - len(request.emitted)
        self._state = programs.admit(self._state, request.slot, table, left, stop_ids, sampling)
        if request.prefix is not None:
            assert self._store is not None
            prefix = request.prefix
            self._state = programs.copy_slot(self._state, request.slot, self._store, prefix.place, prefix.tokens)

    # ---------------------------------------------------------------- work for the device

    def _full_spec(self, spec: RoundSpec) -> RoundSpec:
        """The round of requests that share a draft: one program serves whatever any of them needs."""
        return _full_spec(spec, self.needs is not None, self._logprobs)

    def _buffer(self, spec: RoundSpec) -> int:
        return spec.max_emitted if self._single else max(BURST_TOKENS, spec.max_emitted)

    def _prefill_chunk(self, request: Request) -> None:
        """Hands the device the next piece of a prompt. The prompts in line take turns where decoding goes on."""
        assert self._state is not None and request.slot is not None
        if not request.started:
            request.started = time.perf_counter()
        chunk = self.engine.prefill_chunk
        stop = min(request.prefilled + chunk, len(request.reads))
        if self.prefixes is not None:
            stop = self.prefixes.end(request.prefilled, stop, len(request.reads))
        piece = request.reads[request.prefilled : stop]
        last = request.prefilled + len(piece) == len(request.reads)
        padded = piece + [0] * (chunk - len(piece))
        spec = prefill_spec(self._full_spec(request.spec))
        result = self.engine.programs.prefill(self._state, request.slot, padded, len(piece), last, spec)
        assert result is not None
        self._state, results = result
        request.prefilled += len(piece)
        if self.prefixes is not None and self.prefixes.keeps(request.prefilled, len(request.reads)):
            place = self.prefixes.add(request.keys[: request.prefilled // self.pool.page_size], request.pages)
            if place is not None:
                assert self._store is not None
                self._store = self.engine.programs.copy_slot(
                    self._store, place, self._state, request.slot, request.prefilled
                )
        if last:
            self._prefilling.popleft()
            self._flying.append(Flight([(0, request)], results, spec))
            if request.spec.buckets:
                mates = sum(r.decoding and r.spec == request.spec for r in self._running.values())
                self.engine.controllers[self.curve_key(request.spec)].new_request(mates)
        elif self._interleave:
            self._prefilling.rotate(-1)

    def _decode(self) -> None:
        """Hands the device one burst for each way of drafting."""
        lanes: dict[RoundSpec, list[Request]] = {}
        for request in self._running.values():
            # The token that a prompt's end emits may be all that is wanted.
            if request.decoding and (request.emitted or request.limit > 1):
                lanes.setdefault(request.spec, []).append(request)
        for draft, lane in lanes.items():
            spec = self._full_spec(draft)
            rounds = self._buffer(spec) if self._burst is None else self._burst
            # A stop string is seen by the host alone, so it must look after every round; and prompts and other ways of
            # drafting wait for the end of a burst.
            if self._prefilling or len(lanes) > 1 or any(r.params.stop for r in lane):
                rounds = 1
            controller, bucket, buffer, steering = None, 0, self._buffer(spec), None
            width = next(width for width in self._widths if width >= len(lane))
            if draft.buckets:
                controller = self.engine.controllers[self.curve_key(draft)]
                controller.use(width)
                if self._single:
                    bucket = controller.next()
                    spec = rounds_of(spec)[bucket]
                else:
                    steering = controller.steering()
            used = [r.slot for r in lane if r.slot is not None]
            own = np.zeros((self.slots,), bool)
            own[used] = True
            places = self._places([*used, *(slot for slot in range(self.slots) if not own[slot])][:width])
            owners = list(zip(used if places is None else range(len(used)), lane, strict=True))
            assert self._state is not None
            limit = None if self._single else rounds
            result = self.engine.programs.decode(self._state, limit, spec, buffer, own, places, steering=steering)
            assert result is not None
            self._state, (results, beliefs) = result
            if controller is not None and beliefs is not None:
                controller.steered(beliefs)
            most = min(rounds * spec.max_emitted, buffer)
            self._flying.append(Flight(owners, results, spec, width, most, controller, bucket))

    def _places(self, slots: Sequence[int]) -> Sequence[int] | None:
        """What `Programs.decode` is told for these slots: None where they are all, in whichever order."""
        return slots if len(slots) < self.slots else None

    # ---------------------------------------------------------------- results

    def _land_all(self, flights: Sequence[Flight]) -> list[tuple[Request, Chunk]]:
        return [pair for flight in flights for pair in self._land(*flight.arrive())]

    def _land(self, flight: Flight, results: Any, arrived: float) -> list[tuple[Request, Chunk]]:
        """Hands results, which arrived at a time, to their requests; ends those that are done."""
        output, histogram = results
        chunks, ended = [], []
        for row, request in flight.owners:
            if request.slot is None:
                continue  # ended in an earlier flight; these are its surplus rounds
            count = int(output.count[row])
            fresh = output.tokens[row, :count].tolist()
            request.emitted += fresh
            request.newest = arrived
            update = request.checker.push(fresh)
            logprobs = token_logprobs(output, row, len(update.token_ids), request.params.logprobs)
            request.logprobs += logprobs
            if histogram is None:
                request.first_token = request.first_token or arrived
            elif output.used is None:
                request.count_rounds(flight.spec.budget, histogram[row])
            else:
                used = zip(flight.spec.buckets, output.used[row].tolist(), strict=True)
                request.count_rounds(dict(used), histogram[row])
            if output.ranks is not None and self.engine.on_ranks is not None:
                drafted = [rank for rank in output.ranks[row, :count].tolist() if rank != NOT_DRAFTED]
                self.engine.on_ranks(request.number, drafted)
            if update.finish_reason is not None:
                ended.append(request)
            if update.token_ids or update.finish_reason is not None:
                chunks.append((request, self._chunk(request, update, logprobs)))
        self._release(ended)
        if (controller := flight.controller) is not None and self._single:
            controller.use(flight.width)
            controller.observe(flight.bucket, output.evidence)
        return chunks

    def _release(self, requests: Sequence[Request]) -> None:
        """Takes slots and pages back.

        The device must not go on in pages given back: where only the host has seen the end (a stop string), the slot
        would still be active.
        """
        slots = np.zeros((self.slots,), bool)
        for request in requests:
            assert request.slot is not None
            slots[request.slot] = True
            del self._running[request.slot]
            self.pool.release(request.pages)
            if request in self._prefilling:
                self._prefilling.remove(request)
            request.slot, request.pages = None, []
        if requests:
            self._refused = ()
            assert self._state is not None
            self._state = self.engine.programs.release(self._state, slots)

    def _chunk(self, request: Request, update: StopUpdate, logprobs: list[TokenLogprob]) -> Chunk:
        done = None if update.finish_reason is None else self._completion(request)
        return Chunk(update.text, update.token_ids, done, tuple(logprobs))

    def _completion(self, request: Request) -> Completion:
        engine, checker, histogram = self.engine, request.checker, request.histogram
        spec = self._full_spec(request.spec)
        ids = checker.token_ids
        rounds = int(histogram.sum())
        emitted = int((histogram * np.arange(len(histogram))).sum())
        seconds = request.newest - request.first_token
        assert checker.finish_reason is not None
        return Completion(
            text=checker.text,
            token_ids=ids,
            finish_reason=checker.finish_reason,
            stop=checker.stop,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached,
            completion_tokens=len(ids),
            method=engine.method_of(request.params),
            rounds=rounds,
            mean_accepted_length=emitted / rounds if rounds else 0.0,
            accepted_length_histogram=[int(n) for n in histogram],
            tree_budget=max(request.budgets, key=lambda nodes: request.budgets[nodes], default=spec.budget),
            tree_budgets=dict(sorted(request.budgets.items())),
            prefill_seconds=request.first_token - request.started,
            decode_seconds=seconds,
            compile_seconds=engine.programs.compile_seconds - request.compiled_before,
            tokens_per_second=(len(ids) - 1) / seconds if len(ids) > 1 and seconds > 0 else 0.0,
            device=engine.device.device_kind,
            dtype=str(jnp.dtype(engine.target.dtype)),
            kernels=engine.programs.kernels(*rounds_of(spec), prefill_spec(spec)),
            model=engine.names[0],
            draft_model=engine.names[1] if spec.budget and not spec.mtp else None,
            seed=request.params.seed,
            logprobs=None if request.params.logprobs is None else request.logprobs,
            started=request.started,
        )

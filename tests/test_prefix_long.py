"""Prefixes of thousands of tokens: the same texts as ever, of which only the new part is read."""

import dataclasses
import functools
import time

import grpc
import pytest

from dflash_jax import Completion, Engine, SamplingParams
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.scheduler import CHUNKS_PER_PREFIX, Scheduler
from dflash_jax.tokenizer import Tokenizer
from serve import messages
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from tests.models import random_drafter, random_target
from tests.scheduling import serve, text
from tests.servers import serving

PAGE, CHUNK, SLOTS, CAPACITY = 64, 128, 4, 5632
TREE = SamplingParams(max_new_tokens=8, method="ddtree", tree_budget=7, ignore_eos=True)
SHARED = 5000


@functools.cache
def engine() -> Engine:
    target = random_target(3, max_position_embeddings=8192)
    return Engine(
        target, random_drafter(target, max_position_embeddings=8192), Tokenizer.from_folder(BUNDLED_TARGET),
        max_slots=SLOTS, page_size=PAGE, prefill_chunk=CHUNK, max_model_len=CAPACITY,
    )  # fmt: skip


@functools.cache
def prompts() -> list[list[int]]:
    """Eight that share their first 5,000 tokens and end on, before and behind the end of a page."""
    return [text(SHARED) + text(length, length) for length in (1, 7, 55, 56, 57, 120, 200, 300)]


def scheduler(prefixes: int, pages: int | None = None, **options: bool) -> Scheduler:
    return Scheduler(
        engine(), SLOTS, CAPACITY, burst=1, interleave=True, few_programs=True, prefixes=prefixes, pages=pages,
        **options,
    )  # fmt: skip


@functools.cache
def alone() -> list[Completion]:
    one = scheduler(0)
    done = [serve(one, [(prompt, TREE)])[0] for prompt in prompts()]
    one.close()
    return done


def same(done: list[Completion]) -> bool:
    """Text and acceptance are those of each alone."""
    assert [c.token_ids for c in done] == [c.token_ids for c in alone()]
    assert [c.accepted_length_histogram for c in done] == [c.accepted_length_histogram for c in alone()]
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefixes", "pages", "lazy"),
    [(0, None, False), (32, None, False), (1, None, False), (32, 90, False), (2, 100, True)],
    ids=["off", "on", "one place", "few pages", "few pages, as texts grow"],
)
def test_eight_that_share_5000_tokens(prefixes: int, pages: int | None, lazy: bool) -> None:
    """All at once, cold and then warm."""
    asked = [(prompt, TREE) for prompt in prompts()]
    one = scheduler(prefixes, pages, lazy=lazy)
    cold, warm = serve(one, asked), serve(one, asked)
    assert same(cold) and same(warm)
    cached = [c.cached_tokens for c in warm]
    if not prefixes:
        assert not any(cached)
    elif pages is None and prefixes > 1:
        assert cached == [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts()]
    else:
        assert one.prefixes is not None and one.prefixes.added > len(one.prefixes)  # some had to go
    one.close()
    assert one.pool.free == one.pool.pages


@pytest.mark.slow
def test_a_hit_reads_the_rest_alone_and_is_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    one, read = scheduler(64), []
    prefill = Scheduler._prefill_chunk
    monkeypatch.setattr(Scheduler, "_prefill_chunk", lambda self, r: read.append(r) or prefill(self, r))
    seconds = {}
    base = text(SHARED + 20)
    serve(one, [(base, TREE)])  # everything is compiled
    for tokens in (0, 1250, 2500, 3750, SHARED):
        prompt = base[:tokens] + text(len(base) - tokens, 9 + tokens)
        read.clear()
        (done,) = serve(one, [(prompt, TREE)])
        kept = CHUNKS_PER_PREFIX * CHUNK
        cached = (len(base) - 1) // PAGE * PAGE if tokens == SHARED else tokens // kept * kept
        assert done.cached_tokens == cached
        # A chunk more where one ends for a state to be kept.
        assert 0 <= len(read) - -(-(len(base) - cached) // CHUNK) <= 1
        seconds[cached] = done.prefill_seconds
    print("seconds to the first token by tokens that were there:", {n: round(s, 3) for n, s in seconds.items()})
    values = list(seconds.values())
    assert values == sorted(values, reverse=True)
    # Half of a prompt that is there saves about half, and all but its last page nearly everything.
    assert seconds[2048] < 0.8 * seconds[0] and seconds[4992] < 0.15 * seconds[0]
    one.close()


@pytest.mark.slow
def test_who_decodes_beside_hits_has_the_acceptance_of_before() -> None:
    long = dataclasses.replace(TREE, max_new_tokens=160)
    mates = [(text(40, i), long) for i in range(2)]
    asked = [(prompt, TREE) for prompt in prompts()]
    histograms = {}
    for name, prefixes in (("misses", 0), ("hits", 32)):
        one = scheduler(prefixes)
        if prefixes:
            serve(one, asked)
        done = serve(one, [*mates, *asked])
        assert same(done[2:])
        histograms[name] = [(c.token_ids, c.accepted_length_histogram) for c in done[:2]]
        assert not prefixes or sum(c.cached_tokens for c in done[2:]) >= 8 * 4992
        one.close()
    quiet = [serve(scheduler(0), [mate])[0] for mate in mates]
    assert histograms["hits"] == histograms["misses"] == [(c.token_ids, c.accepted_length_histogram) for c in quiet]


@pytest.mark.slow
def test_over_the_wire_a_hit_comes_sooner() -> None:
    alone()
    waited: dict[str, list[float]] = {}
    places = 32 * engine().prefix_state_bytes()
    with (
        serving(engine(), max_queue=8, prefix_bytes=places) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = pb_grpc.DFlashStub(channel)

        def ask(prompt: list[int]) -> tuple[float, list[pb.GenerateResponse]]:
            """Seconds to the first chunk, and all of them."""
            given = pb.Input(tokens=pb.TokenIds(ids=prompt))
            request = pb.GenerateRequest(input=given, params=messages.sampling_message(TREE))
            begun = time.perf_counter()
            call = stub.Generate(request, timeout=300)
            first = next(call)
            return time.perf_counter() - begun, [first, *call]

        for _ in range(2):  # a miss and a hit: all is compiled
            ask(text(200, 1))
        for name in ("cold", "warm"):
            waited[name] = []
            for prompt, expected in zip(prompts(), alone(), strict=True):
                seconds, parts = ask(prompt)
                waited[name].append(seconds)
                assert [i for part in parts for i in part.token_ids] == expected.token_ids
                usage = parts[-1].finished.usage
                assert name == "cold" or usage.cached_tokens == (len(prompt) - 1) // PAGE * PAGE
    print("seconds to the first chunk:", {name: [round(s, 3) for s in values] for name, values in waited.items()})
    assert sum(waited["warm"]) < 0.3 * 8 * waited["cold"][0]  # the first cold one alone read everything

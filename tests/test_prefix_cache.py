"""Prompts that begin alike: the tokens are those without a cache, whatever is kept, shared or dropped."""

import dataclasses
import functools

import pytest

from dflash_jax import Completion, Engine, SamplingParams, UserError
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.pages import PagePool
from dflash_jax.prefix_cache import Prefix, PrefixCache
from dflash_jax.scheduler import Scheduler
from dflash_jax.tokenizer import Tokenizer
from tests import scheduling
from tests.models import FULL, random_drafter, random_mtp, random_target
from tests.scheduling import text

PAGE, CHUNK = 16, 32
AR = SamplingParams(max_new_tokens=8, method="ar", ignore_eos=True)
TREE = dataclasses.replace(AR, method="ddtree", tree_budget=7)
MTP = dataclasses.replace(AR, method="mtp")


@functools.cache
def engine() -> Engine:
    target = random_target(3)
    return Engine(
        target, random_drafter(target), Tokenizer.from_folder(BUNDLED_TARGET), max_slots=2, page_size=PAGE,
        prefill_chunk=CHUNK, mtp=random_mtp(target),
    )  # fmt: skip


def scheduler(prefixes: int, pages: int | None = None, **options: bool) -> Scheduler:
    return Scheduler(engine(), 2, 512, burst=1, interleave=True, prefixes=prefixes, pages=pages, **options)


def serve(one: Scheduler, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    """All of them with the same parameters."""
    return scheduling.serve(one, [(prompt, params) for prompt in prompts])


# ---------------------------------------------------------------- the cache alone


def test_a_page_is_free_when_its_last_holder_has_gone():
    pool = PagePool(4, PAGE)
    pages = pool.allocate(2 * PAGE)
    pool.share(pages)
    pool.release(pages)
    assert pool.free == 2 and pool.holders(pages[0]) == 1
    pool.release(pages)
    assert pool.free == 4
    with pytest.raises(ValueError, match="twice"):
        pool.release(pages)
    with pytest.raises(ValueError, match="free"):
        pool.share(pages)


def test_the_longest_prefix_is_found_and_the_oldest_goes_first():
    pool = PagePool(32, PAGE)
    cache = PrefixCache(pool, 2, interval=2 * PAGE)
    tokens = text(5 * PAGE)
    pages = pool.allocate(5 * PAGE)
    keys = cache.keys(tokens, "a")
    assert len(keys) == 4  # a prompt must have a token left to read
    assert keys == cache.keys([*tokens, 0], "a")[:4] == cache.keys(tokens[: 4 * PAGE + 1], "a")
    assert cache.add(keys[:2], pages) is not None
    assert cache.add(keys, pages) is not None
    assert cache.add(keys, pages) is None  # there already
    pool.release(pages)
    assert pool.free == 32 - 4  # the cache holds what the request gave back
    found = cache.find(keys)
    assert found is not None and found.tokens == 4 * PAGE and list(found.pages) == pages[:4]
    short = cache.find(cache.keys(tokens[: 4 * PAGE], "a"))
    assert short is not None and short.tokens == 2 * PAGE
    assert cache.find(cache.keys(tokens, "b")) is None and cache.find(cache.keys(tokens[1:], "a")) is None
    assert cache.find(cache.keys([*tokens[:PAGE], tokens[PAGE] ^ 1, *tokens[PAGE + 1 :]], "a")) is None
    other = pool.allocate(PAGE)
    cache.find(keys[:2])  # now the longer one was used longest ago
    assert cache.add(cache.keys(text(PAGE + 1, 1), "a"), other) == found.place and len(cache) == 2
    assert cache.find(keys) == short


def test_chunks_end_where_a_state_is_kept():
    cache = PrefixCache(PagePool(8, PAGE), 2, interval=4 * PAGE)
    assert cache.end(0, 32, 300) == 32 and not cache.keeps(32, 300)
    assert cache.end(50, 82, 300) == 64 and cache.keeps(64, 300)
    assert cache.end(256, 300, 300) == 288 and cache.keeps(288, 300)  # the last page's end before the prompt's
    assert cache.end(256, 288, 288) == 272  # the last token is read in any case
    assert cache.end(288, 300, 300) == 300 and not cache.keeps(300, 300)


# ---------------------------------------------------------------- in the scheduler


@pytest.mark.parametrize("turns", [4, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("params", [AR, TREE, MTP], ids=["ar", "ddtree", "mtp"])
def test_a_conversation_is_not_read_again_and_its_tokens_are_the_same(params: SamplingParams, turns: int):
    """Without a cache, with one, and with those too small for this conversation and another in turns."""
    one, plain_one = scheduler(8), scheduler(0)
    tight = [scheduler(1), scheduler(8, pages=34)]
    said, before, other = text(70), 1, text(90, 99)
    for turn in range(turns):
        (cached,), (plain,) = (serve(s, [said], params) for s in (one, plain_one))
        assert cached.token_ids == plain.token_ids
        assert plain.cached_tokens == 0
        # All of the last turn's prompt but its last page, which was not full.
        assert cached.cached_tokens == (before - 1) // PAGE * PAGE
        if params is TREE:  # the drafter's context was there too: the drafts are as good
            assert cached.accepted_length_histogram == plain.accepted_length_histogram
        for small in tight:
            (again,) = serve(small, [said], params)
            assert again.token_ids == plain.token_ids
            serve(small, [other], params)
        before = len(said)
        said = said + cached.token_ids + text(13, turn)
    for small in tight[: 2 if turns == 20 else 1]:
        assert small.prefixes is not None and small.prefixes.added > len(small.prefixes)  # some had to go
    for s in (one, plain_one, *tight):
        s.close()
        assert s.pool.free == s.pool.pages


@pytest.mark.parametrize("places", [1, 8])
@pytest.mark.parametrize("pages", [None, 34])
def test_requests_that_share_a_beginning(places: int, pages: int | None):
    """Also with room for one state only, and with so few pages that prefixes must go for requests to be admitted."""
    shared = text(150)
    prompts = [shared + text(10 + 7 * i, i) for i in range(8)]
    one = scheduler(places, pages)
    expected = [c.token_ids for c in serve(scheduler(0), prompts, TREE)]
    for _ in range(2):
        done = serve(one, prompts, TREE)
        assert [c.token_ids for c in done] == expected
    assert places == 1 or sum(c.cached_tokens for c in done) >= 8 * 128
    assert one.prefixes is not None and len(one.prefixes) <= places
    one.close()
    assert one.pool.free == one.pool.pages


def test_prefixes_do_not_go_in_vain():
    """A request that waits for the pages of others drops nothing, looks its prompt up once, and counts as one hit."""
    one = scheduler(8, pages=12)
    (first,) = serve(one, [text(60, 1)], AR)
    running = engine().request(text(100), dataclasses.replace(AR, max_new_tokens=30))
    waiting = engine().request(text(60, 1), dataclasses.replace(AR, max_new_tokens=40))
    one.submit(running)
    one.submit(waiting)
    assert one.prefixes is not None
    keys, asked = one.prefixes.keys, []
    one.prefixes.keys = lambda tokens, kind: asked.append(len(tokens)) or keys(tokens, kind)  # type: ignore[method-assign]
    result = None
    while one.busy:
        for request, chunk in one.step():
            result = chunk.completion if request is waiting else result
        one.check()
    assert result is not None and result.cached_tokens == 48 and result.token_ids[:8] == first.token_ids
    assert (one.prefixes.hits, one.prefixes.misses) == (1, 2)
    # A look-up when it came, at most one more for each prefix that the other one kept, and one when that had ended.
    assert asked.count(60) <= 4
    one.close()


def test_methods_do_not_share_what_only_one_of_them_has():
    """Autoregressive prompts leave no context for a drafter."""
    one, prompt = scheduler(8), text(100)
    assert [serve(one, [prompt], p)[0].cached_tokens for p in (TREE, TREE, AR, AR, TREE)] == [0, 96, 0, 96, 96]


def test_penalties_know_the_part_of_the_prompt_that_was_not_read():
    params = dataclasses.replace(AR, repetition_penalty=1.8, max_new_tokens=30)
    one, prompt = scheduler(8), text(100)
    first, again = serve(one, [prompt], params)[0], serve(one, [prompt], params)[0]
    assert again.cached_tokens == 96 and again.token_ids == first.token_ids
    assert first.token_ids != serve(one, [prompt], dataclasses.replace(params, repetition_penalty=1.0))[0].token_ids


def test_timing_an_adaptive_budget_spoils_no_prefix():
    auto = dataclasses.replace(TREE, tree_budget="auto")
    one, prompt = scheduler(8), text(100)
    engine().controllers.clear()
    (plain,) = serve(one, [prompt], TREE)
    results = serve(one, [prompt, prompt], auto)  # times its rounds, which writes into every page
    assert [r.token_ids for r in results] == [plain.token_ids] * 2
    assert serve(one, [prompt], TREE)[0].token_ids == plain.token_ids


def test_preempted_requests_find_what_they_had_read():
    """Pages run out while texts grow; a request that is read again begins behind its kept prefix."""
    params = dataclasses.replace(TREE, max_new_tokens=150)
    prompts = [text(100, i) for i in range(2)]
    one = scheduler(4, 24, lazy=True)
    done = serve(one, prompts, params)
    assert one.preemptions > 0
    assert [c.token_ids for c in done] == [serve(scheduler(0), [p], params)[0].token_ids for p in prompts]
    one.close()
    assert one.pool.free == one.pool.pages


def test_a_cache_that_holds_no_state_is_refused():
    size = engine().prefix_state_bytes()
    with pytest.raises(UserError, match="must hold a state"):
        engine().scheduler(1, 100, prefix_bytes=size - 1)
    one = engine().scheduler(1, 100, prefix_bytes=3 * size)
    assert one.prefixes is not None and one.prefixes.places == 3


def test_without_recurrent_layers_there_is_a_place_a_page():
    """Their states are next to nothing, and more prefixes than pages there cannot be."""
    target = random_target(3, layer_types=(FULL,) * 4)
    dense = Engine(target, None, Tokenizer.from_folder(BUNDLED_TARGET), page_size=PAGE, prefill_chunk=CHUNK)
    one = dense.scheduler(1, 120, prefix_bytes=2**20)
    assert one.prefixes is not None and one.prefixes.places == one.pool.pages
    prompt = text(60)
    done = []
    for _ in range(2):
        one.submit(dense.request(prompt, AR))
        while one.busy:
            done += [chunk.completion for _, chunk in one.step() if chunk.completion is not None]
    assert [c.cached_tokens for c in done] == [0, 48] and done[0].token_ids == done[1].token_ids


def test_what_a_preempted_request_finds_again_was_not_cached():
    request = engine().request(text(100), AR)
    request.begin(0, [0, 1], None)
    request.begin(0, [0, 1], Prefix(96, (0,), 0))
    assert (request.prefilled, request.cached) == (96, 0)

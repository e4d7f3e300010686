"""Stop rules, checked against a direct reading of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_jax import tokenizer as tokenizer_module
from dflash_jax.errors import UserError
from dflash_jax.stopping import StopChecker, StopStrings

# Every byte, some merges so that stop strings begin and end inside tokens, and three special tokens.
MERGES = [
    ("a", "b"),
    ("ab", "ab"),
    ("b", "a"),
    ("a", "c"),
    ("ab", "c"),
    ("Ġ", "a"),
    ("abab", "abab"),
    ("b", "ð"),
]


def build() -> tokenizer_module.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<|turn|>")])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer_module.Tokenizer(backend)


TOKENIZER = build()
END, TURN = TOKENIZER.token_to_id("<|end|>"), TOKENIZER.token_to_id("<|turn|>")
BYTE = {TOKENIZER.token_bytes(i): i for i in range(256)}


def ids_of(*tokens: str) -> list[int]:
    ids = [TOKENIZER.token_to_id(token) for token in tokens]
    assert None not in ids
    return ids


def check(ids, blocks=None, **options):
    """Runs a checker over blocks of the given sizes (then the rest) and checks what holds for every run."""
    checker = StopChecker(TOKENIZER, **{"max_new_tokens": 1000, **options})
    updates, start = [], 0
    for size in [*(blocks or []), len(ids)]:
        updates.append(checker.push(ids[start : start + size]))
        start += size
    assert "".join(update.text for update in updates) == checker.text
    assert [number for update in updates for number in update.token_ids] == checker.token_ids
    assert (updates[-1].finish_reason, updates[-1].stop) == (checker.finish_reason, checker.stop)
    return checker


def result(checker):
    return checker.text, checker.token_ids, checker.finish_reason, checker.stop


def test_stop_token_inside_a_block():
    ids = [*ids_of("a", "b"), TURN, END, *ids_of("c")]
    checker = check(ids, [1, 16], eos_ids=[END, 12345])
    # The special token TURN is skipped in the text and stays in the ids; END ends it and stays too.
    assert result(checker) == ("ab", ids[:4], "stop", END)


def test_ordinary_stop_token_adds_no_text():
    ids = ids_of("a", "abab", "c")
    assert result(check(ids, eos_ids=[ids[1]])) == ("a", ids[:2], "stop", ids[1])


def test_no_stop_tokens_means_the_end_of_text_is_ignored():
    ids = [END, *ids_of("a")]
    assert result(check(ids)) == ("a", ids, None, None)


@pytest.mark.parametrize("blocks", [[], [1, 1, 1, 1], [2], [3]])
def test_stop_string_spans_tokens_and_blocks(blocks):
    # "x|abab|ac|abab|z": the stop string begins inside the second token and ends inside the fourth.
    ids = ids_of("x", "abab", "ac", "abab", "z")
    checker = check(ids, blocks, stop_strings=["bacab"])
    assert result(checker) == ("xaba", ids[:4], "stop", "bacab")


def test_text_is_held_back_only_while_it_may_be_a_stop():
    checker = StopChecker(TOKENIZER, stop_strings=["bac"], max_new_tokens=100)
    assert checker.push(ids_of("x", "abab")).text == "xaba"
    assert checker.push(ids_of("a")).text == ""
    assert checker.push(ids_of("b")).text == "ba"
    assert checker.push(ids_of("x")).text == "bx"
    update = checker.push(ids_of("ba"))
    assert (update.text, update.finish_reason) == ("", None)
    update = checker.finish()
    assert (update.text, update.token_ids, update.finish_reason) == ("ba", (), "length")


def test_earliest_end_wins_then_the_longest():
    ids = ids_of("a", "b", "c", "a")
    assert result(check(ids, stop_strings=["abca", "bc"]))[0::3] == ("a", "bc")
    assert result(check(ids, stop_strings=["c", "bc", "abc"]))[0::3] == ("", "abc")
    # Both in one token: the order of characters decides, not that of the list.
    assert result(check(ids_of("abab"), stop_strings=["bab", "ba"]))[0::3] == ("a", "ba")


@pytest.mark.parametrize("blocks", [[], [1] * 6, [2, 2], [4]])
def test_max_new_tokens_cuts_inside_a_block(blocks):
    ids = ids_of("a", "b", "c", "ab", "z", "z")
    assert result(check(ids, blocks, max_new_tokens=4, stop_strings=["abz"])) == (
        "abcab",
        ids[:4],
        "length",
        None,
    )


def test_a_stop_met_by_the_last_allowed_token_wins():
    ids = ids_of("a", "b")
    assert result(check(ids, max_new_tokens=2, stop_strings=["b"])) == ("a", ids, "stop", "b")
    assert result(check([*ids, END], max_new_tokens=3, eos_ids=[END])) == ("ab", [*ids, END], "stop", END)


def test_bytes_behind_a_stop_string_in_its_token_are_dropped():
    # One token: the stop string and the first byte of a character, met at the limit.
    ids = ids_of("a", "bð")
    assert result(check(ids, max_new_tokens=2, stop_strings=["b"])) == ("a", ids, "stop", "b")


@pytest.mark.parametrize(
    ("text", "stop", "start"), [("aaab", "aab", 1), ("abababac", "ababac", 2), ("aabaabaaab", "aabaaab", 3)]
)
def test_a_stop_string_that_overlaps_itself_is_found(text, stop, start):
    ids = [BYTE[char.encode()] for char in text]
    assert result(check([*ids, BYTE[b"z"]], stop_strings=[stop])) == (text[:start], ids, "stop", stop)


def test_tokens_after_the_end_are_dropped():
    checker = check(ids_of("a", "b"), stop_strings=["b"])
    before = result(checker)
    update = checker.push(ids_of("c", "c"))
    assert (update.text, update.token_ids, update.finish_reason, update.stop) == ("", (), "stop", "b")
    assert checker.finish().finish_reason == "stop"
    assert result(checker) == before


def test_half_a_character_at_the_end_is_replaced():
    half = [BYTE[b"a"], BYTE[b"\xf0"], BYTE[b"\x9f"]]
    assert result(check(half, max_new_tokens=3)) == ("a\ufffd", half, "length", None)
    assert result(check([*half, END], eos_ids=[END])) == ("a\ufffd", [*half, END], "stop", END)
    assert result(check([*half, END], eos_ids=[END], stop_strings=["\ufffd"])) == (
        "a",
        [*half, END],
        "stop",
        "\ufffd",
    )


def test_stop_string_inside_a_multibyte_character_is_no_match():
    ids = TOKENIZER.encode("ä€👍")
    assert check(ids, [1] * len(ids), stop_strings=["Ã", "\ufffd"]).text == "ä€👍"


def test_special_token_as_a_stop_string():
    ids = [*ids_of("a"), TURN, *ids_of("b")]
    assert result(check(ids, stop_strings=["<|turn|>"])) == ("a", ids[:2], "stop", "<|turn|>")
    # Spelled out in ordinary tokens it is the same string.
    spelled = [BYTE[bytes([value])] for value in b"a<|turn|>b"]
    assert result(check(spelled, stop_strings=["<|turn|>"])) == ("a", spelled[:-1], "stop", "<|turn|>")
    # Readable added tokens are part of the text anyway.
    readable = ids_of("a", "<think>", "b")
    assert result(check(readable, stop_strings=["ink"])) == ("a<th", readable[:2], "stop", "ink")


def test_wrong_arguments_are_refused():
    for options in ({"stop_strings": ["a", ""]}, {"max_new_tokens": 0}):
        with pytest.raises(UserError, match=r"^--"):
            check([], **options)
    with pytest.raises(TypeError):
        check([], stop_strings="abc")


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Start of the first stop string in a whole text, and that string, by trying every end."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), stop
    return None


def longest_possible_start(text: str, stops: list[str]) -> int:
    """How many of the last characters may be the beginning of a stop string."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=7), max_size=3),
    st.lists(st.integers(1, 7), max_size=40),
)
def test_stop_strings_release_all_that_is_safe(text, stops, cuts):
    searcher, released, start = StopStrings(stops), "", 0
    expected = first_stop(text, stops)
    for size in [*cuts, len(text)]:
        safe, stop = searcher.feed(text[start : start + size])
        released += safe
        start += size
        seen = text[:start]
        if stop is not None:
            assert (len(released), stop) == expected
            assert text.startswith(released)
            return
        # Nothing that could be a stop is out, and nothing else is kept.
        assert released == seen[: len(seen) - longest_possible_start(seen, stops)]
    assert expected is None
    assert released + searcher.flush() == text


PIECES = st.one_of(
    st.sampled_from(ids_of("a", "b", "c", "ab", "ba", "ac", "abc", "abab", "abababab", "Ġa", "Ġ", "<think>")),
    st.sampled_from([BYTE[bytes([value])] for value in "ä👍".encode()]),
    st.sampled_from([TURN, 9999]),
)
STOPS = st.text("abcä👍 <\ufffd", min_size=1, max_size=6)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(PIECES, max_size=30),
    st.one_of(st.none(), st.integers(0, 30)),
    st.lists(STOPS, max_size=3),
    st.lists(st.integers(1, 16), max_size=30),
    st.integers(1, 35),
)
def test_blocks_do_not_matter(ids, end_at, stops, blocks, limit):
    """The result is that of the whole text cut at the first stop, however tokens arrive."""
    if end_at is not None:
        ids = [*ids[:end_at], END, *ids[end_at:]]
    checker = check(ids, blocks, max_new_tokens=limit, stop_strings=stops, eos_ids=[END])
    # Where the sequence would end without stop strings.
    last, reason, stop = len(ids), None, None
    if END in ids[:limit]:
        last, reason, stop = ids.index(END) + 1, "stop", END
    elif len(ids) >= limit:
        last, reason = limit, "length"
    text = TOKENIZER.decode(ids[:last])
    found = first_stop(text, stops)
    if found is not None and (reason is not None or checker.finish_reason is not None):
        start, expected_stop = found
        assert (checker.text, checker.finish_reason, checker.stop) == (text[:start], "stop", expected_stop)
        # The ids end with the token that completes the string: one less is not enough.
        needed = start + len(expected_stop)
        kept = len(checker.token_ids)
        assert checker.token_ids == ids[:kept]
        detokenizer = TOKENIZER.detokenizer()
        lengths = [len(detokenizer.push([number])) for number in ids[:kept]]
        assert sum(lengths[:-1]) < needed
        assert kept == last or sum(lengths) >= needed
        return
    assert checker.token_ids == ids[:last]
    assert (checker.finish_reason, checker.stop) == (reason, stop)
    if reason is not None:
        assert checker.text == text
    else:
        # Still running: what is out is a beginning of the text, and the end of it is only held back.
        assert text.startswith(checker.text)
        assert checker.text + checker.finish().text == text or first_stop(text, stops) is not None

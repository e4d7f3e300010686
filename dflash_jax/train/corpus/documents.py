"""The mixture of documents, in chat and plain form, and the rule that keeps some content out of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from dflash_jax.train.corpus import arithmetic, code, howto, knowledge, smalltalk, stories, words
from dflash_jax.train.corpus.facts import ANIMALS
from dflash_jax.train.corpus.grammar import block, draw_pair, finish, key, pick, say

SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Document:
    """One training document: either ``messages`` (chat form) or ``text`` (plain form).

    ``keys`` is the content pair that decides the split: two table rows, or a row and an audience.
    """

    kind: str
    keys: tuple[str, str]
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None


# kind: share of documents in percent. Chat kinds sum to 60.
MIXTURE = {
    "chat_story": 17, "chat_howto": 9, "chat_describe": 9, "chat_compare": 6, "chat_recommend": 5, "chat_summary": 4,
    "chat_math": 4, "chat_code": 4, "chat_hello": 1, "chat_unknown": 1,
    "story": 25, "article": 6, "howto": 3, "code": 3, "math": 3,
}  # fmt: skip
_WHEEL = tuple(kind for kind, share in MIXTURE.items() for _ in range(share))

_SYSTEM = (
    "You are a helpful assistant.", "You are a friendly assistant. Answer in simple words.", "Answer in simple English.",
    "You are a patient teacher.", "Be helpful and honest.", "You are a helpful assistant who writes clearly.",
)  # fmt: skip
_ASK_STORY = block("""
{Write|Tell me|Please write|Can you write} a {short |}story about @ [hero] {named|called} [name] [ask]{|.}
{Tell me|Write} a story about [name], @ [hero], [ask2]{|.} It takes place [at_place].
I would like {to hear |}a {short |}story about @ [hero] {named|called} [name] [ask]{|.}
{Once upon a time there was|There was once} @ [hero] {named|called} [name] [ask]. {Continue the story.|How does it go on?|Please continue the story.}
Write {a bedtime|a short} story [at_place] {about|with} @ [hero] {named|called} [name] [ask].
""")
_ASK_SUMMARY = block("""
{Summarise|Please summarise|Sum up} this story{| in a few sentences}: [story]
{What is this story about|What happens in this story}? [story]
{Read this story and tell me the most important points|Give me a short summary of the following story}: [story]
""")
_SUMMARY_FRAME = block("""
{This|The} story is about [name], @ [hero], who lived near [place]. [recap] {The lesson is clear|At the end, we learn something}: [lesson]
{The main character is|The story tells about} [name], @ [hero] who lived near [place]. [recap] [lesson]
""")
_SUMMARY_END = block("""
{The story takes place|Everything happens} [at_place], {and|where} [friend] {plays|has} an important part.
Besides [name], {the most important person is|there is} [friend], [frole].
{It is a story about|The main topics are} {friendship and patience|courage and kindness}, {told|and it is told} in simple words.
""")
_TITLES = (
    "{name} and the {obj}",
    "The {thing}",
    "{name} and {friend}",
    "The story of {name}",
    "@ {daytime} near {place}",
)


def make(kind: str, rng: Random, split: str) -> Document:
    """One document of ``kind`` whose content pair lies in ``split``."""
    kind_name = kind.removeprefix("chat_")
    return _MAKERS[kind_name](kind, rng, split)


def _chat(kind: str, keys: tuple, rng: Random, *turns: str) -> Document:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    if rng.random() < 0.15:
        messages.insert(0, {"role": "system", "content": pick(rng, _SYSTEM)})
    return Document(kind, (key(keys[0]), key(keys[1])), messages=tuple(messages))


def _story(kind: str, rng: Random, split: str) -> Document:
    c, plot = stories.cast(rng, split)
    keys = (c["obj"], c["place"][4:])
    text = stories.story(rng, c, plot)
    if kind == "story":
        if rng.random() < 0.25:
            text = f"{finish(pick(rng, _TITLES).format(**c))}\n\n{text}"
        return Document(kind, keys, text=text)
    ask = say(plot.ask, c, rng)
    c["ask"], c["ask2"] = ask, ask
    return _chat(kind, keys, rng, finish(say(_ASK_STORY, c, rng)), text)


def _summary(kind: str, rng: Random, split: str) -> Document:
    c, plot = stories.cast(rng, split)
    c["story"] = " ".join(stories.sentences(rng, c, plot))
    c["recap"], c["lesson"] = say(plot.recap, c, rng), say(plot.lesson, c, rng)
    answer = finish(f"{say(_SUMMARY_FRAME, c, rng)} {say(_SUMMARY_END, c, rng)}")
    return _chat(kind, (c["obj"], c["place"][4:]), rng, finish(say(_ASK_SUMMARY, c, rng)), answer)


def _howto(kind: str, rng: Random, split: str) -> Document:
    record, audience = draw_pair(
        rng, split, lambda r: pick(r, howto.HOWTOS), lambda r: pick(r, howto.AUDIENCES)
    )
    keys = (record[0], audience)
    if kind == "howto":
        return Document(kind, keys, text=howto.plain(rng, record))
    while True:
        question, named = howto.question(rng, record, audience)
        if named or split == "train":  # without the audience the request would be one that training holds
            return _chat(kind, keys, rng, question, howto.answer(rng, record, audience if named else None))


def _topic(rng: Random) -> str:
    return pick(rng, ("animal", "animal", "place", "job"))


def _describe(kind: str, rng: Random, split: str) -> Document:
    topic = _topic(rng)
    rows = knowledge.TOPICS[topic][0]
    row, audience = draw_pair(rng, split, lambda r: pick(r, rows), lambda r: pick(r, knowledge.AUDIENCES))
    keys = (row, audience)
    if split == "train" and rng.random() < 0.3:
        question, aspect = knowledge.follow_up(rng, topic, row)
        return _chat(kind, keys, rng, question, knowledge.describe(rng, topic, row, aspect))
    while True:
        question = knowledge.ask(rng, topic, row, audience)
        if split == "train" or audience in question:
            return _chat(kind, keys, rng, question, knowledge.describe(rng, topic, row))


def _article(kind: str, rng: Random, split: str) -> Document:
    topic = _topic(rng)
    rows = knowledge.TOPICS[topic][0]
    a, b = draw_pair(rng, split, lambda r: pick(r, rows), lambda r: pick(r, rows))
    if (split == "train" and rng.random() < 0.6) or a == b:
        text = f"{knowledge.title(topic, a)}\n\n{knowledge.describe(rng, topic, a)}"
    else:
        text = f"{knowledge.title(topic, a)} and {_uncapital(knowledge.title(topic, b))}\n\n"
        text += knowledge.compare(rng, topic, a, b)
    return Document(kind, (key(a), key(b)), text=text)


def _uncapital(text: str) -> str:
    return text[0].lower() + text[1:]


def _compare(kind: str, rng: Random, split: str) -> Document:
    topic = _topic(rng)
    rows = knowledge.TOPICS[topic][0]
    while True:
        a, b = draw_pair(rng, split, lambda r: pick(r, rows), lambda r: pick(r, rows))
        if a != b:
            break
    return _chat(
        kind, (a, b), rng, knowledge.ask_compare(rng, a, b, topic), knowledge.compare(rng, topic, a, b)
    )


def _recommend(kind: str, rng: Random, split: str) -> Document:
    person, like = draw_pair(
        rng, split, lambda r: pick(r, smalltalk.PEOPLE), lambda r: pick(r, smalltalk.LIKES)
    )
    return _chat(kind, (person, like), rng, *smalltalk.recommend(rng, person, like))


def _math(kind: str, rng: Random, split: str) -> Document:
    girl = rng.random() < 0.5
    name, item = draw_pair(
        rng,
        split,
        lambda r: pick(r, words.GIRLS if girl else words.BOYS),
        lambda r: pick(r, arithmetic.ITEMS),
    )
    friend = pick(rng, words.BOYS if girl else words.GIRLS)
    question, answer = arithmetic.problem(rng, name, friend, item, girl)
    if kind == "math":
        return Document(kind, (name, item), text=f"Problem: {question}\n\nSolution: {answer}")
    return _chat(kind, (name, item), rng, question, answer)


def _code(kind: str, rng: Random, split: str) -> Document:
    name, use = draw_pair(rng, split, lambda r: pick(r, code.FUNCTIONS), lambda r: pick(r, code.VARIANTS))
    while True:
        request, _, answer = code.function(rng, name, use)
        if kind == "code":
            return Document(kind, (name, use), text=f"# {name}\n\n{answer}")
        if split == "train" or use in request:
            return _chat(kind, (name, use), rng, request, answer)


def _hello(kind: str, rng: Random, split: str) -> Document:
    name, animal = draw_pair(rng, split, lambda r: pick(r, words.GIRLS), lambda r: pick(r, ANIMALS))
    return _chat(kind, (name, animal), rng, *smalltalk.hello(rng, name, animal[0]))


def _unknown(kind: str, rng: Random, split: str) -> Document:
    topic, animal = draw_pair(rng, split, _unknown_topic, lambda r: pick(r, ANIMALS))
    return _chat(kind, (topic, animal), rng, *smalltalk.unknown(rng, topic, pick(rng, words.BOYS), animal[0]))


def _unknown_topic(rng: Random) -> str:
    return words.invented_name(rng) if rng.random() < 0.3 else pick(rng, smalltalk.TOPICS)


_MAKERS = {
    "story": _story, "summary": _summary, "howto": _howto, "describe": _describe, "article": _article,
    "compare": _compare, "recommend": _recommend, "math": _math, "code": _code, "hello": _hello, "unknown": _unknown,
}  # fmt: skip


def documents(seed: int, split: str = "train") -> Iterator[Document]:
    """An endless stream of documents of the mixture; the same seed gives the same stream.

    ``split`` is "train" or "heldout"; their content pairs (``Document.keys``) are disjoint.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    rng = Random(f"{split}-{seed}")
    while True:
        yield make(pick(rng, _WHEEL), rng, split)


def prompts(split: str, n: int, seed: int) -> list[dict]:
    """``n`` prompts in turn over all kinds: {"kind", "messages"} for chat, {"kind", "text"} for a beginning.

    Chat prompts end with the user's message. Plain prompts hold the first sentence or two of a document.
    """
    rng = Random(f"prompts-{split}-{seed}")
    kinds = _prompt_kinds(split)
    out: list[dict] = []
    while len(out) < n:
        kind = kinds[len(out) % len(kinds)]
        doc = make(kind, rng, split)
        if doc.messages is not None:
            messages = [dict(m) for m in doc.messages[:-1]]
            out.append({"kind": kind, "keys": list(doc.keys), "messages": messages})
        else:
            out.append({"kind": kind, "keys": list(doc.keys), "text": _beginning(doc.text or "", kind)})
    return out


def _prompt_kinds(split: str) -> tuple[str, ...]:
    """One round of prompts: the mixture, with every kind that answers at length at least once.

    A drafter guesses nothing of an answer whose like it has never seen, so it is trained on the short kinds too.
    """
    answered_at_length = (
        "chat_story", "story", "chat_howto", "chat_describe", "story", "chat_compare", "chat_story", "chat_code",
        "article", "chat_recommend", "story", "chat_math", "chat_summary", "howto", "chat_story", "code",
    )  # fmt: skip
    return (*answered_at_length, "chat_hello", "chat_unknown") if split == "train" else answered_at_length


def _beginning(text: str, kind: str) -> str:
    if kind == "code":
        return text[: text.index('"""', text.index('"""') + 3) + 3]
    head, _, rest = text.partition("\n\n")
    if kind == "story" and len(head) > 60:
        head, rest = "", text
    cut = rest.find(". ")
    second = rest.find(". ", cut + 1) if cut < 90 else cut
    stop = (second if second > 0 else cut) + 1
    return (head + "\n\n" if head else "") + rest[:stop]

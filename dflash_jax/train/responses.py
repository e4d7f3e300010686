"""Greedy answers of a target to many prompts: what its drafter learns from."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer
from tqdm import tqdm

from dflash_jax.cache import Cache, Context, commit, commit_causal, init_cache
from dflash_jax.errors import UserError
from dflash_jax.repetition import repeated_ngram_share
from dflash_jax.target import Rows, Target
from dflash_jax.tokenizer import Tokenizer as ChatTokenizer
from dflash_jax.train import open_prompts
from dflash_jax.train.corpus import prompts, render
from dflash_jax.train.data import Answers
from dflash_jax.train.settings import ResponseSettings

_PAGE = 64
_ASSISTANT = "<|im_start|>assistant\n"


def prompt_texts(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the model reads: a rendered chat with the assistant's header, or the beginning of a plain text."""
    return [
        render(entry["messages"]) + _ASSISTANT if "messages" in entry else entry["text"] for entry in entries
    ]


def encode_prompts(tokenizer_file: Path, split: str, settings: ResponseSettings, count: int) -> list[list[int]]:
    """Token ids of the first `count` prompts of a split that are short enough.

    Raises:
      UserError: no prompt is short enough.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    texts = prompt_texts(prompts(split, count, settings.seed))
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    short = [ids for ids in encoded if 0 < len(ids) <= settings.max_prompt_tokens]
    if not short:
        raise UserError(f"'max_prompt_tokens' {settings.max_prompt_tokens} leaves none of {count} {split} prompts")
    return short


def encode_open_prompts(
    target: Target,
    tokenizer: ChatTokenizer,
    settings: ResponseSettings,
    *,
    say: Callable[[str], None] = print,
) -> dict[str, list[list[int]]]:
    """Token ids of prompts for any chat model, by split; the target writes `settings.own_prompts` of them.

    Raises:
      UserError: no prompt of a split is short enough.
    """
    own: list[dict[str, Any]] = []
    if settings.own_prompts:
        turn = open_prompts.empty_turn(tokenizer)
        limit = dataclasses.replace(
            settings, max_prompt_tokens=len(turn), max_new_tokens=min(128, settings.max_new_tokens),
            max_seconds=None if settings.max_seconds is None else settings.max_seconds / 4,
        )  # fmt: skip
        drawn = answer(target, [turn] * settings.own_prompts, limit, say=say, name="own prompts", temperature=1.0)
        rows = zip(drawn.tokens, drawn.prompt_lengths, drawn.lengths, strict=True)
        written = [tokens[begin:end].tolist() for tokens, begin, end in rows]
        own = open_prompts.own_prompts(tokenizer, written, target.config.eos_token_ids)
    encoded = {}
    for split, count in (("train", settings.prompts), ("heldout", settings.heldout_prompts)):
        mine = [entry for entry in own if open_prompts.in_split(entry, split)]
        made = open_prompts.made_prompts(split, count, settings.seed)
        entries = mine + made
        order = np.random.default_rng(settings.seed).permutation(len(entries))[:count]
        chosen = [entries[i] for i in order]
        encoded[split] = open_prompts.encode(tokenizer, chosen, settings.max_prompt_tokens)
        say(f"{split} prompts: {len(mine)} of its own, {len(made)} made; {len(encoded[split])} chosen")
        if not encoded[split]:
            limit_tokens = settings.max_prompt_tokens
            raise UserError(f"'max_prompt_tokens' {limit_tokens} leaves none of {count} {split} prompts")
    return encoded


@functools.partial(jax.jit, static_argnames=("graph", "max_new_tokens", "stop_ids", "temperature"))
def generate_batch(
    graph: nnx.GraphDef,
    weights: nnx.State,
    prompt: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    *,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    temperature: float = 1.0,
    key: Array | None = None,
) -> tuple[Int[Array, "B R"], Int[Array, " B"]]:
    """Continuation of right-padded prompts, R = `max_new_tokens`, with one row a step and static caches.

    Greedy, or with a key drawn at `temperature`. Rows with length 0 are padding of the batch. Returns the new tokens,
    the stop token included, and their number.
    """

    def choose(logits: Float[Array, "B V"], step: Int[Array, ""] | int) -> Int[Array, " B"]:
        if key is not None:
            noise = jax.random.gumbel(jax.random.fold_in(key, step), logits.shape, logits.dtype)
            logits = logits / temperature + noise
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    target: Target = nnx.merge(graph, weights)
    config = target.config
    batch, width = prompt.shape
    pages = -(-(width + max_new_tokens) // _PAGE)
    tables = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    cache = init_cache(config, None, slots=batch, pages=batch * pages, page_size=_PAGE, dtype=target.dtype)
    stops = jnp.asarray(stop_ids, jnp.int32)

    order = jnp.broadcast_to(jnp.arange(width), (batch, width))
    start = target.empty_context(batch)
    out = target(Rows(prompt, order, order < lengths[:, None]), start)
    cache = commit_causal(cache, out.updates, tables, jnp.zeros_like(lengths), jnp.arange(batch), lengths)
    last = jnp.take_along_axis(out.hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    first = choose(target.logits(last), 0)
    # The taps of one row are the committed window alone.
    window = cache.conv.shape[2]
    taps = jnp.broadcast_to(-1 - jnp.arange(window), (batch, 1, window))
    alone = jnp.ones((batch, 1, 1), bool)
    root = jnp.zeros((batch, 1), jnp.int32)

    def stopped(token: Array) -> Array:
        return jnp.any(token[:, None] == stops, axis=1)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        index, token, alive, written, lengths, cache, made = carry
        made = made.at[:, index].set(jnp.where(alive, token, 0))
        written = written + alive
        alive = alive & ~stopped(token)
        rows = Rows(token[:, None], lengths[:, None], jnp.ones((batch, 1), bool), alone, taps)
        context = Context(cache.kv, tables, lengths, cache.recurrent, cache.conv)
        out = target(rows, context)
        count = alive.astype(jnp.int32)
        cache: Cache = commit(cache, out.updates, tables, lengths, root, count)
        token = choose(target.logits(out.hidden[:, 0]), index + 1)
        return index + 1, token, alive, written, lengths + count, cache, made

    def running(carry: tuple[Any, ...]) -> Array:
        return (carry[0] < max_new_tokens) & jnp.any(carry[2])

    made = jnp.zeros((batch, max_new_tokens), jnp.int32)
    carry = (jnp.int32(0), first, lengths > 0, jnp.zeros_like(lengths), lengths, cache, made)
    _, _, _, written, _, _, made = jax.lax.while_loop(running, step, carry)
    return made, written


def answer(
    target: Target,
    encoded: Sequence[Sequence[int]],
    settings: ResponseSettings,
    *,
    say: Callable[[str], None] = print,
    name: str = "responses",
    temperature: float = 0.0,
) -> Answers:
    """The target's answers to encoded prompts, in the order given: greedy, or drawn at a temperature.

    Stops early, with what it has, once `settings.max_seconds` have passed. Answers are in the dtype of `target`.
    """
    began = time.monotonic()
    # Both splits run in one compiled shape.
    width = -(-settings.max_prompt_tokens // 32) * 32
    batch = settings.batch
    graph, weights = nnx.split(target)
    stop_ids = target.config.eos_token_ids
    made, counts, done = [], [], 0
    for begin in tqdm(range(0, len(encoded), batch), desc=name, unit="batch", mininterval=5.0):
        if settings.max_seconds is not None and begin and time.monotonic() - began > settings.max_seconds:
            say(f"{name}: {begin} of {len(encoded)} prompts in {settings.max_seconds:.0f} s; going on with those")
            break
        part = encoded[begin : begin + batch]
        prompt, lengths = np.zeros((batch, width), np.int32), np.zeros((batch,), np.int32)
        for row, ids in enumerate(part):
            prompt[row, : len(ids)], lengths[row] = ids, len(ids)
        tokens, count = generate_batch(
            graph, weights, prompt, lengths, max_new_tokens=settings.max_new_tokens, stop_ids=stop_ids,
            temperature=temperature or 1.0, key=jax.random.key(settings.seed + begin) if temperature else None,
        )  # fmt: skip
        made.append(np.asarray(tokens)[: len(part)])
        counts.append(np.asarray(count)[: len(part)])
        done += len(part)
    made, counts = np.concatenate(made), np.concatenate(counts)
    prompt_lengths = np.array([len(ids) for ids in encoded[:done]], np.int32)
    tokens = np.zeros((done, width + settings.max_new_tokens), np.uint16)
    for row, ids in enumerate(encoded[:done]):
        end = len(ids) + counts[row]
        tokens[row, : len(ids)], tokens[row, len(ids) : end] = ids, made[row, : counts[row]]
    seconds = time.monotonic() - began
    rate = counts.sum() / seconds / 1e3
    say(f"{name}: {done} answers, {counts.mean():.0f} tokens each, {rate:.1f}k tok/s, {seconds:.0f} s")
    return Answers(tokens, prompt_lengths, (prompt_lengths + counts).astype(np.int32)).trimmed()


def repeated_share(answers: Answers, n: int = 8) -> float:
    """Share of the answers' n-grams that occurred before in the same answer: how much of the text is loops."""
    spans = zip(answers.tokens, answers.prompt_lengths, answers.lengths, strict=True)
    return repeated_ngram_share((tokens[begin:end].tolist() for tokens, begin, end in spans), n)

"""From documents to packed token ids, on as many processes as there are cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

from dflash_jax.train.corpus.documents import Document, documents

TOKENIZER_FILE = Path(__file__).resolve().parents[2] / "assets" / "target" / "tokenizer.json"
_CHUNK_TOKENS = 1_000_000
_BATCH_DOCUMENTS = 512


def render(messages: Sequence[Mapping[str, str]]) -> str:
    """The chat template's rendering of a finished conversation.

    Written out here because training renders millions of documents; a test holds it equal to
    ``chat_template.jinja``.
    """
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def document_text(document: Document) -> str:
    """The document as the model reads it, without the end-of-text token."""
    if document.messages is not None:
        return render(document.messages)
    assert document.text is not None
    return document.text


def texts(seed: int, split: str = "train") -> Iterator[str]:
    """An endless stream of rendered documents."""
    return map(document_text, documents(seed, split))


def chunk(
    seed: int, index: int, n_tokens: int, tokenizer_file: str, split: str = "train"
) -> UInt16[np.ndarray, " T"]:
    """Chunk ``index`` of the stream: exactly ``n_tokens`` ids of packed documents, each followed by <|endoftext|>.

    The chunk depends on (seed, index) alone, so the stream is the same for any number of workers.
    """
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = Tokenizer.from_file(tokenizer_file)
    end = tokenizer.token_to_id("<|endoftext|>")
    assert end is not None, f"{tokenizer_file} has no <|endoftext|>"
    source = texts(seed * 1_000_003 + index, split)
    ids: list[int] = []
    while len(ids) < n_tokens:
        for encoding in tokenizer.encode_batch_fast([next(source) for _ in range(_BATCH_DOCUMENTS)]):
            ids += encoding.ids
            ids.append(end)
    return np.array(ids[:n_tokens], dtype=np.uint16)


def token_stream(
    seed: int,
    n_tokens: int,
    workers: int = 1,
    split: str = "train",
    tokenizer_file: str | Path = TOKENIZER_FILE,
) -> UInt16[np.ndarray, " T"]:
    """``n_tokens`` ids (uint16) of packed documents.

    Args:
        seed: equal seeds give equal streams, whatever ``workers`` is.
        n_tokens: length of the result; every million tokens is an independent chunk.
        workers: processes; with more than one, the caller's script needs the ``__main__`` guard (spawn).
        split: "train" or "heldout".
        tokenizer_file: the trained ``tokenizer.json``.
    """
    sizes = [_CHUNK_TOKENS] * (n_tokens // _CHUNK_TOKENS)
    if n_tokens % _CHUNK_TOKENS:
        sizes.append(n_tokens % _CHUNK_TOKENS)
    jobs = [(seed, i, size, str(tokenizer_file), split) for i, size in enumerate(sizes)]
    out = np.empty(n_tokens, dtype=np.uint16)
    if workers <= 1 or len(jobs) == 1:
        parts: Iterator[np.ndarray] = (chunk(*job) for job in jobs)
        return _fill(out, parts)
    # Spawn, not fork: the caller may hold JAX threads and a CUDA context.
    with ProcessPoolExecutor(
        min(workers, len(jobs)), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return _fill(out, pool.map(chunk, *zip(*jobs, strict=True)))


def _fill(out: np.ndarray, parts: Iterator[np.ndarray]) -> np.ndarray:
    at = 0
    for part in parts:
        out[at : at + len(part)] = part
        at += len(part)
    return out

"""Generated English for the bundled pair: stories, explanations, comparisons, arithmetic and small programs.

``documents`` and ``prompts`` give content, ``token_stream`` gives packed token ids for training. Everything is
seeded. One content pair in sixteen is held out of training by a fixed hash (``grammar.is_heldout``).
"""

from dflash_jax.train.corpus.documents import MIXTURE, SPLITS, Document, documents, prompts
from dflash_jax.train.corpus.grammar import is_heldout
from dflash_jax.train.corpus.stream import document_text, render, texts, token_stream

__all__ = [
    "MIXTURE", "SPLITS", "Document", "document_text", "documents", "is_heldout", "prompts", "render", "texts",
    "token_stream",
]  # fmt: skip

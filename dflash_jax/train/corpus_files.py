"""The token streams of a run as files. Imports no JAX: the writer runs beside the process that owns the device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from dflash_jax.train.corpus import token_stream
from dflash_jax.train.settings import CorpusSettings

HELDOUT_SEED = 90_001


def corpus_paths(folder: Path) -> tuple[Path, Path]:
    """Files of the training and of the held-out stream."""
    return folder / "corpus" / "train.npy", folder / "corpus" / "heldout.npy"


def write_corpus(settings: CorpusSettings, folder: Path) -> None:
    """Generates both token streams, unless they are there in the size asked for."""
    workers = settings.workers or os.cpu_count() or 1
    train, heldout = corpus_paths(folder)
    for path, seed, count, split in (
        (heldout, HELDOUT_SEED, settings.heldout_tokens, "heldout"),
        (train, settings.seed, settings.tokens, "train"),
    ):
        if not (path.exists() and len(np.load(path, mmap_mode="r")) == count):
            save_stream(path, token_stream(seed, count, workers, split))


def start_corpus(recipe_path: Path, folder: Path) -> subprocess.Popen[bytes]:
    """`write_corpus` in a process of its own, beside compilation; its workers must not take the GPU's memory."""
    command = [sys.executable, "-m", "dflash_jax.train", "corpus", "--config", str(recipe_path), "--out", str(folder)]
    return subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def save_stream(path: Path, stream: np.ndarray) -> None:
    """Writes a token stream as uint16 .npy; the file appears only once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npy")
    np.save(part, np.asarray(stream, np.uint16))
    part.rename(path)

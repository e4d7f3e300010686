"""Batches: windows of a token stream that begin where documents begin; right-padded prompt-and-answer rows."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dflash_jax.errors import UserError


def window_starts(stream: np.ndarray, length: int, separator: int) -> np.ndarray:
    """Starts of the windows of `length` + 1 tokens that together read the stream about once.

    Each window begins at the first document start at or after a multiple of `length`: a model that only ever saw
    windows cut anywhere would rarely have seen a document at position 0, which is where every prompt begins.

    Args:
      stream: token ids, documents ended by `separator`.
      length: tokens predicted a window.
      separator: the token that ends every document.

    Raises:
      UserError: the stream holds no whole window.
    """
    begins = np.concatenate([[0], np.flatnonzero(stream == separator) + 1])
    begins = begins[begins + length + 1 <= len(stream)]
    if not len(begins):
        raise UserError(f"token stream: {len(stream)} tokens hold no window of {length + 1}; generate more tokens")
    wanted = np.arange(0, len(stream) - length, length)
    place = np.minimum(np.searchsorted(begins, wanted), len(begins) - 1)
    return np.unique(begins[place])


@dataclasses.dataclass(frozen=True)
class Order:
    """A seeded order of `size` examples, reshuffled every epoch; the position is the step alone."""

    size: int
    batch: int
    seed: int

    def __post_init__(self):
        if self.batch > self.size:
            raise UserError(f"data: {self.size} examples are fewer than one batch of {self.batch}")

    @property
    def steps_per_epoch(self) -> int:
        """Batches an epoch; the remainder of an epoch is dropped."""
        return self.size // self.batch

    def batches(self, step: int, count: int) -> np.ndarray:
        """Example numbers of steps step … step + count − 1: [count, batch] int32."""
        rows = []
        for index in range(step, step + count):
            epoch, place = divmod(index, self.steps_per_epoch)
            rows.append(self._permutation(epoch)[place * self.batch : (place + 1) * self.batch])
        return np.stack(rows).astype(np.int32)

    def _permutation(self, epoch: int) -> np.ndarray:
        if getattr(self, "_epoch", None) != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.size)
            object.__setattr__(self, "_epoch", epoch)
            object.__setattr__(self, "_order", order)
        return self._order


def take_windows(stream: Array, starts: Int[Array, " B"], length: int) -> Int[Array, "B length"]:
    """`length` tokens from each start, as int32, on the device."""
    slices = jax.vmap(lambda start: jax.lax.dynamic_slice(stream, (start,), (length,)))(starts)
    return slices.astype(jnp.int32)


def load_stream(path: Path, vocab_size: int) -> np.ndarray:
    """Reads a token stream, or raises `UserError` naming the file."""
    try:
        stream = np.load(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no token stream ({error}); `python -m dflash_jax.train corpus` writes one") from None
    if stream.dtype != np.uint16 or stream.ndim != 1:
        raise UserError(f"{path}: expected a one-dimensional uint16 array, found {stream.dtype} {stream.shape}")
    if len(stream) and int(stream.max()) >= vocab_size:
        raise UserError(f"{path}: holds token {int(stream.max())}, but the model's vocabulary is {vocab_size}")
    return stream


@dataclasses.dataclass(frozen=True)
class Answers:
    """Prompts and the target's answers.

    Attributes:
      tokens: uint16 [n, T], prompt then answer, right-padded with 0.
      prompt_lengths, lengths: int32 [n]; an answer is tokens[prompt_length : length], its stop token included.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def save(self, path: Path) -> None:
        """Writes an .npz; the file appears only once it is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez(part, tokens=self.tokens, prompt_lengths=self.prompt_lengths, lengths=self.lengths)
        part.rename(path)

    @classmethod
    def load(cls, path: Path) -> "Answers":
        """Reads an .npz written by `save`, or raises `UserError` naming the file."""
        try:
            with np.load(path) as file:
                return cls(file["tokens"], file["prompt_lengths"], file["lengths"])
        except (OSError, ValueError, KeyError) as error:
            hint = "`python -m dflash_jax.train responses` writes them"
            raise UserError(f"{path}: no answers ({error}); {hint}") from None

    def trimmed(self, multiple: int = 32) -> "Answers":
        """Without the columns that are padding in every row, up to a multiple that keeps shapes few."""
        width = min(-(-int(self.lengths.max()) // multiple) * multiple, self.tokens.shape[1])
        return dataclasses.replace(self, tokens=self.tokens[:, :width])

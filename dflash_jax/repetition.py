"""How much of a text is loops: without this figure, accepted lengths may be nothing but repetition."""

from collections.abc import Iterable, Sequence


def repeated_ngram_share(sequences: Iterable[Sequence[int]], n: int = 8) -> float:
    """Share of n-grams that already occurred in the same sequence, pooled over sequences; 0 where there is none."""
    repeated = total = 0
    for tokens in sequences:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0

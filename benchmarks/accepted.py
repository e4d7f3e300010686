"""Which drafts were accepted, by depth and by rank.

Input are the ranks of a text's tokens as `dflash_jax.tree.accepted_ranks` gives them: those of a round's accepted
children from depth 1 down, then -1 for its bonus token.
"""

import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Counts over rounds.

    Attributes:
      attempts: entry d - 1: rounds whose walk came to a row of depth d - 1 and so could take a child of depth d.
      taken: entry [d - 1][r]: those of them in which it took the child of rank r. Rows are as long as needed.
    """

    attempts: list[int]
    taken: list[list[int]]

    @property
    def by_depth(self) -> list[float]:
        """Share of the attempts at each depth that took any child."""
        return [sum(row) / n if n else 0.0 for row, n in zip(self.taken, self.attempts, strict=True)]

    @property
    def by_rank(self) -> list[float]:
        """Share of all accepted tokens that each rank has."""
        total = sum(map(sum, self.taken))
        width = max(map(len, self.taken), default=0)
        return (
            [sum(row[r] for row in self.taken if r < len(row)) / total for r in range(width)] if total else []
        )


def count_accepted(texts: Iterable[Sequence[int]], length: int) -> Accepted:
    """Counts the rounds of some texts.

    Args:
      texts: ranks of each text's tokens after the first. A text may end within a round; nothing is known then of the
        depth after its last token.
      length: depths that the drafter has.
    """
    attempts, taken = [0] * length, [[] for _ in range(length)]
    for ranks in texts:
        depth = 0
        for rank in ranks:
            if depth < length:
                attempts[depth] += 1
            if rank < 0:
                depth = 0
                continue
            row = taken[depth]
            row += [0] * (rank + 1 - len(row))
            row[rank] += 1
            depth += 1
    return Accepted(attempts, taken)

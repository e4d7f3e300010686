"""Host-side bookkeeping of cache pages."""

import collections
from collections.abc import Iterable

from dflash_jax.errors import UserError


class PagePool:
    """Hands out page numbers and takes them back. A page may have several holders and is free when none is left."""

    def __init__(self, pages: int, page_size: int):
        self.pages, self.page_size = pages, page_size
        self._free = list(range(pages - 1, -1, -1))
        self._holders: collections.Counter[int] = collections.Counter()

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def unused(self) -> list[int]:
        """Their numbers."""
        return list(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> list[int]:
        """Takes pages for `tokens` tokens, or raises `UserError` when there are not enough."""
        need = self.pages_for(tokens)
        if need > len(self._free):
            raise UserError(
                f"{tokens} tokens need {need} cache pages; {len(self._free)} of {self.pages} are free"
            )
        taken = self._free[len(self._free) - need :][::-1]
        del self._free[len(self._free) - need :]
        self._holders.update(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for pages that somebody holds."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def holders(self, page: int) -> int:
        """How many hold it."""
        return self._holders[page]

    def release(self, pages: list[int]) -> None:
        """Gives pages back, of one holder."""
        if len(set(pages)) != len(pages) or any(self._holders[page] < 1 for page in pages):
            raise ValueError("a page was released twice")
        self._holders.subtract(pages)
        self._free.extend(page for page in reversed(pages) if not self._holders[page])

"""Host-side bookkeeping of cache pages."""

from dflash_jax.errors import UserError


class PagePool:
    """Hands out page numbers and takes them back."""

    def __init__(self, pages: int, page_size: int):
        self.pages, self.page_size = pages, page_size
        self._free = list(range(pages - 1, -1, -1))

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
        taken = self._free[-need:][::-1]
        del self._free[-need:]
        return taken

    def release(self, pages: list[int]) -> None:
        """Gives pages back."""
        held = set(self._free)
        if held.intersection(pages) or len(set(pages)) != len(pages):
            raise ValueError("a page was released twice")
        self._free.extend(reversed(pages))

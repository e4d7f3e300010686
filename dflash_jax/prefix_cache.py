"""Prefixes of prompts that need not be read again: their pages, and the recurrent state after them.

Keys and values of a prefix stay where they are, in pages that requests share and nobody writes: a prefix ends with a
page. The drafter's context lies in pages of the same numbers, so it is shared with them. A recurrent state has no
pages: at chosen ends of prefixes (`PrefixCache.end`) one slot's part of the decode state is copied to a store of its
own, and back when a prompt begins with the same tokens. A prefix is found by a hash of all its tokens, a block a page.

The draft head's last entry of a prefix is the exception: it depends on the token after the prefix, so that who goes on
from there writes it, for all who share the page. Drafts may be worse for it, tokens cannot be others.

The cache holds its pages as requests do. Those used longest ago go first, when the store is full or pages run out.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from dflash_jax.pages import PagePool


@dataclasses.dataclass(frozen=True)
class Prefix:
    """One that is kept.

    Attributes:
      tokens: how many, whole pages.
      pages: that hold them.
      place: of its state in the store.
    """

    tokens: int
    pages: tuple[int, ...]
    place: int


class PrefixCache:
    """Which prefixes are kept, on the host. Moving states is the caller's part.

    Attributes:
      places: prefixes that can be kept at once.
      added: prefixes kept so far.
      hits, misses: requests admitted that began with one, and that did not; their scheduler counts them.
    """

    def __init__(self, pool: PagePool, places: int, interval: int):
        """An empty one.

        Args:
          pool: of the pages.
          places: see the class.
          interval: tokens between kept states within a prompt; its end has one anyhow.
        """
        self._pool, self.places = pool, places
        self._interval = max(interval // pool.page_size, 1) * pool.page_size
        self._kept: collections.OrderedDict[bytes, Prefix] = collections.OrderedDict()  # newest last
        self._free = list(range(places - 1, -1, -1))
        self.added = self.hits = self.misses = 0

    def __len__(self) -> int:
        """Prefixes kept."""
        return len(self._kept)

    @property
    def held(self) -> list[int]:
        """Its pages; one that several prefixes share is named by each."""
        return [page for prefix in self._kept.values() for page in prefix.pages]

    @property
    def evictable(self) -> int:
        """Pages that would be free without any prefix: those that nobody shares with the cache."""
        held = collections.Counter(self.held)
        return sum(self._pool.holders(page) == count for page, count in held.items())

    def end(self, start: int, stop: int, length: int) -> int:
        """Where a chunk that begins at token `start` and may go on to `stop` must end, for a state to be kept there.

        Args:
          start, stop: see above.
          length: of the whole prompt. Its last token is never a part of a prefix: it gives the first one of the text.
        """
        last = self._last_end(length)
        following = (start // self._interval + 1) * self._interval
        return min([end for end in (following, last) if start < end <= stop], default=stop)

    def keeps(self, tokens: int, length: int) -> bool:
        """Whether the state after so many tokens of a prompt is to be kept."""
        return 0 < tokens < length and (tokens % self._interval == 0 or tokens == self._last_end(length))

    def keys(self, tokens: Sequence[int], kind: object) -> list[bytes]:
        """Of a prompt's prefixes of 1, 2, … whole pages that leave it a token to read, each by all of its tokens.

        Args:
          tokens: the prompt.
          kind: what its caches hold; prefixes of another kind do not serve it.
        """
        size, keys = self._pool.page_size, [repr(kind).encode()]
        blocks = np.asarray(tokens, np.int64)
        for begin in range(0, self._last_end(len(tokens)), size):
            block = blocks[begin : begin + size].tobytes()
            keys.append(hashlib.blake2b(keys[-1] + block, digest_size=20).digest())
        return keys[1:]

    def find(self, keys: Sequence[bytes]) -> Prefix | None:
        """The longest kept prefix of the prompt with these keys; it and its own prefixes are used last.

        Its pages are taken for the caller, who releases them.
        """
        found = None
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)
                found = self._kept[key]
        if found is not None:
            self._pool.share(found.pages)
        return found

    def add(self, keys: Sequence[bytes], pages: Sequence[int]) -> int | None:
        """Keeps a prefix of whole pages; the place where its state belongs, None if it is kept already.

        Args:
          keys: of the prompt up to its end, one a page.
          pages: of the request that has read it.
        """
        key, count = keys[-1], len(keys)
        if key in self._kept:
            self._kept.move_to_end(key)
            return None
        if not self._free and not self.evict():
            return None
        prefix = Prefix(count * self._pool.page_size, tuple(pages[:count]), self._free.pop())
        self._pool.share(prefix.pages)
        self._kept[key] = prefix
        self.added += 1
        return prefix.place

    def evict(self) -> bool:
        """Drops the prefix used longest ago; False if there is none. Its pages are free unless somebody shares them."""
        if not self._kept:
            return False
        _, prefix = self._kept.popitem(last=False)
        self._pool.release(list(prefix.pages))
        self._free.append(prefix.place)
        return True

    def clear(self) -> None:
        """Drops all: what the pages hold is no longer so."""
        while self.evict():
            pass

    def _last_end(self, length: int) -> int:
        """End of the longest prefix that a prompt can have: whole pages, and a token left to read."""
        return (length - 1) // self._pool.page_size * self._pool.page_size

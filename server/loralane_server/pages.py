"""KV pages: which are free. Their memory belongs to the device."""

import numpy as np

from loralane_server.device.seam import Int32
from loralane_server.errors import Overloaded

#: Tokens in a KV page.
PAGE_TOKENS = 16


def pages_for(tokens: int) -> int:
    """Return how many pages hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


class PageTable:
    """Owns the free list. A row takes all the pages that it can ever need, once."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        # Popped from the end: low pages first, so that little memory is ever touched.
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, count: int) -> Int32:
        """Return `count` pages, now owned by the caller. Raises `Overloaded`, taking none."""
        if count > len(self._free):
            raise Overloaded(f"no free KV pages: {count} wanted, {len(self._free)} free")
        return np.array([self._free.pop() for _ in range(count)], dtype=np.int32)

    def give_back(self, pages: Int32) -> None:
        """Free pages that `take` returned."""
        self._free.extend(reversed(pages.tolist()))

    def check(self) -> None:
        """Assert that no page is free twice."""
        assert len(set(self._free)) == len(self._free) <= self.total

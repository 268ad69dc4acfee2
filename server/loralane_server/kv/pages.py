"""KV pages: who owns them. Their memory belongs to the device.

A page is in one of three states, and `free` counts the last two:

    owned   one row or more use it
    idle    no row uses it, but the keeper (the prefix cache) could still give it to one
    free    nobody uses it, nothing is remembered of it

`give_back` by the last owner leads from owned to idle or free: the keeper is asked which. `share`
leads from idle to owned, `take` from free to owned; when free pages run short, the keeper gives up
idle ones. So the table alone says who owns a page, and the keeper alone what is worth keeping.
"""

from collections.abc import Collection
from typing import Final, Protocol

import numpy as np

from loralane_server.device.seam import Int32
from loralane_server.errors import Overloaded

#: Tokens in a KV page.
PAGE_TOKENS: Final = 16


def pages_for(tokens: int) -> int:
    """Return how many pages hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


class Keeper(Protocol):
    """Remembers what is in pages, and so decides which ones stay when their last owner leaves."""

    @property
    def idle(self) -> Collection[int]:
        """The pages that it keeps and nobody owns."""

    def let_go(self, page: int) -> bool:
        """The last owner left: return whether the page is kept, and idle from now on."""

    def claim(self, page: int) -> None:
        """An idle page has an owner again."""

    def evict(self) -> int:
        """Forget an idle page, of which there must be one, and return it."""


class PageTable:
    """Owns the free list and the count of owners of each page. Engine's thread only."""

    def __init__(self, pages: int) -> None:
        self.total: Final = pages
        # Popped from the end: low pages first, so that little memory is ever touched.
        self._free = list(range(pages - 1, -1, -1))
        #: By page.
        self._owners = [0] * pages
        self._keeper: Keeper = _NoKeeper()

    @property
    def free(self) -> int:
        """Number of pages that no row owns: so many can be taken."""
        return len(self._free) + self.cached

    @property
    def cached(self) -> int:
        """Number of pages that no row owns and the keeper keeps until they are wanted."""
        return len(self._keeper.idle)

    def owners(self, page: int) -> int:
        """Return how many rows own a page."""
        return self._owners[page]

    def kept_by(self, keeper: Keeper) -> None:
        """Let `keeper` decide what becomes of pages; once, before any is taken."""
        assert not any(self._owners)
        self._keeper = keeper

    def take(self, count: int) -> Int32:
        """Return `count` pages that only the caller owns now. Raises `Overloaded`, taking none."""
        if count > self.free:
            raise Overloaded(f"no free KV pages: {count} wanted, {self.free} free")
        taken = [self._free.pop() if self._free else self._keeper.evict() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return np.array(taken, dtype=np.int32)

    def share(self, pages: Int32) -> None:
        """Make the caller one more owner of pages that are owned or idle, not free."""
        for page in pages.tolist():
            if not self._owners[page]:
                self._keeper.claim(page)
            self._owners[page] += 1

    def give_back(self, pages: Int32) -> None:
        """Make the caller own these pages no more; in the order of the row's tokens.

        The last page is let go first: of a prefix, the end is given up before the beginning.
        """
        for page in reversed(pages.tolist()):
            assert self._owners[page], f"page {page} has no owner"
            self._owners[page] -= 1
            if not self._owners[page] and not self._keeper.let_go(page):
                self._free.append(page)

    def check(self) -> None:
        """Assert that each page is owned, idle or free, and only one of these."""
        unowned = [page for page, owners in enumerate(self._owners) if not owners]
        assert sorted([*self._free, *self._keeper.idle]) == unowned
        assert min(self._owners, default=0) >= 0


class _NoKeeper:
    """Keeps nothing: every page without an owner is free."""

    idle: tuple[int, ...] = ()

    def let_go(self, page: int) -> bool:
        return False

    def claim(self, page: int) -> None:
        raise AssertionError(f"page {page} is free and cannot be shared")

    def evict(self) -> int:
        raise AssertionError("no page is idle")

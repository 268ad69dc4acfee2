"""A priority queue for items whose keys grow while they are in it."""

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LazyHeap(Generic[T]):
    """Items, the one with the least key first.

    A key may grow at any time: that is noticed when its item comes to the front, so growing costs
    nothing. Whoever makes a key fall must `put` its item again. Equal keys: who was put first.
    """

    def __init__(self, key: Callable[[T], Any]) -> None:
        """`key` returns what orders an item now; keys are compared with each other alone."""
        self._key = key
        #: (key when it was put or last seen, number, item), by key and number.
        self._heap: list[tuple[Any, int, T]] = []
        #: The number of the one entry that counts, by item; other entries of it are left over.
        self._entries: dict[T, int] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def put(self, item: T) -> None:
        """Add an item, or note that its key has fallen."""
        number = next(self._numbers)
        self._entries[item] = number
        heappush(self._heap, (self._key(item), number, item))
        if len(self._heap) > 2 * len(self._entries) + 8:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapify(self._heap)

    def remove(self, item: T) -> None:
        """Take out an item. Raises KeyError if it is not there."""
        del self._entries[item]

    def first(self, accept: Callable[[T], bool] | None = None) -> T | None:
        """Return the item with the least key, of those that `accept` takes; None if none is."""
        if accept is None:
            return self._heap[0][2] if self._settle() else None
        return next(iter(self.nearest(1, accept)), None)

    def nearest(self, most: int, accept: Callable[[T], bool] = lambda _: True) -> list[T]:
        """Return so many items with the least keys that `accept` takes, the least key first.

        Looks at no more items than it passes over and returns.
        """
        seen: list[tuple[Any, int, T]] = []
        found: list[T] = []
        while len(found) < most and self._settle():
            seen.append(heappop(self._heap))
            if accept(seen[-1][2]):
                found.append(seen[-1][2])
        for entry in seen:
            heappush(self._heap, entry)
        return found

    def check(self) -> None:
        """Assert that every item has one entry that counts, with a key that is not too great."""
        live = [entry for entry in self._heap if self._counts(entry)]
        assert len(live) == len(self._entries)
        assert all(key <= self._key(item) for key, _, item in live)

    def _counts(self, entry: tuple[Any, int, T]) -> bool:
        return self._entries.get(entry[2]) == entry[1]

    def _settle(self) -> bool:
        """Bring the item whose key is the least now to the front; whether there is one."""
        while self._heap:
            entry = self._heap[0]
            if not self._counts(entry):
                heappop(self._heap)
                continue
            key = self._key(entry[2])
            if key == entry[0]:
                return True
            heapreplace(self._heap, (key, entry[1], entry[2]))
        return False

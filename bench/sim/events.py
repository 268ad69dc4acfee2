"""Simulated time: what happens when, in order."""

import heapq
from collections.abc import Callable


class Events:
    """Calls to come. Those of the same moment are made in the order in which they were set."""

    def __init__(self) -> None:
        #: Seconds.
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Make a call at some time from now on."""
        assert time >= self.now
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, call))

    def step(self) -> bool:
        """Make the next call; return False if there is none."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        call()
        return True

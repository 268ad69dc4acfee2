"""Memory that tensors are read into."""

import threading
from collections import Counter
from typing import Final

import torch
from torch import Tensor

#: Of every dtype that is stored, and of a cache line.
_ALIGNMENT: Final = 64


class Scratch:
    """Memory for tensors that are read, used, and read over by the next layer's.

    Memory that was touched before costs a third of reading into memory that is new.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def clear(self) -> None:
        """Give the same memory out again from now on."""
        self._used = 0

    def room(self, size: int) -> Tensor:
        """Return `size` bytes, aligned for every dtype, that nobody else has until `clear`."""
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        self._used = begin + size
        if self._used > len(self._memory):
            begin, self._used = 0, size
            self._memory = fresh(size)
        return self._memory[begin : self._used]


def fresh(size: int) -> Tensor:
    """Return `size` bytes of new memory."""
    return torch.empty(size, dtype=torch.uint8)  # not zeroed, unlike a bytearray


class Spares:
    """Blocks that were written to before they are needed, for the tensors of the next load.

    The kernel clears a page when it is first written, which takes as long as folding and casting
    what is then written. So as much as the last load took is made ready when nobody waits for it.
    Any thread.
    """

    def __init__(self, most_bytes: int = 32 << 20) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        #: Guarded by the lock; by size.
        self._ready: dict[int, list[Tensor]] = {}
        #: Guarded by the lock; how many of each size were taken since the last refill.
        self._taken: Counter[int] = Counter()

    @property
    def ready_bytes(self) -> int:
        """What is ready now."""
        with self._lock:
            return sum(size * len(blocks) for size, blocks in self._ready.items())

    def room(self, size: int) -> Tensor:
        """Return `size` bytes that nobody else has, ready if there are such."""
        with self._lock:
            self._taken[size] += 1
            ready = self._ready.get(size)
            if ready:
                return ready.pop()
        return fresh(size)

    def refill(self) -> None:
        """Make ready what was taken since the last time, and let go what is left of other sizes."""
        with self._lock:
            if not self._taken:
                return
            taken, self._taken = self._taken, Counter()
            before, self._ready = self._ready, {}  # so that no block is given away meanwhile
        ready: dict[int, list[Tensor]] = {}
        left = self._most_bytes
        for size, count in taken.items():
            kept = min(count, left // max(1, size))
            left -= kept * size
            have = before.get(size, [])[:kept]
            ready[size] = have + [fresh(size).zero_() for _ in range(kept - len(have))]
        with self._lock:
            self._ready = ready

"""Memory that tensors are read into."""

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

"""Host memory that costs nothing until it is written, or after it is freed."""

import mmap
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros whose pages the kernel provides on first write (torch.zeros writes them all)."""
    bytes_ = prod(shape) * torch.empty(0, dtype=dtype).element_size()
    buffer = np.zeros(max(1, bytes_), dtype=np.uint8)  # an empty one could not be viewed
    return torch.from_numpy(buffer)[:bytes_].view(dtype).view(*shape)


def mapped(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor in a mapping of its own, given back to the kernel when the tensor is freed.

    The allocator would keep freed blocks of this size, in pieces, for allocations that never come.
    """
    size = torch.empty(0, dtype=dtype).element_size() * prod(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)

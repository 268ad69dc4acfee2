"""Host memory that costs nothing until it is written."""

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

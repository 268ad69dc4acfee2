"""A step's numbers to the device, and its tokens back, by torch_xla's shortest way.

`Tensor.to` and `Tensor.cpu` do the same by way of torch's dispatcher, for 40 us more of the host's
time in a step of 230 (bench/XLA.md). They serve where this torch_xla lacks the names.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
import torch_xla
from torch import Tensor

#: On the host, of any shape.
Values = np.ndarray[tuple[int, ...], np.dtype[Any]]

_C = torch_xla._XLAC
_PRIVATE: Final = ("_xla_get_cpu_tensors", "_xla_tensors_from_aten")
_DIRECT: Final = all(hasattr(_C, name) for name in _PRIVATE)


def bring(values: Values, *, direct: bool = _DIRECT) -> Tensor:
    """Return a device tensor of the values, which nobody writes to from now on.

    For a compiled graph to run on; what a graph is traced with takes `Tensor.to`.
    """
    tensor = torch.from_numpy(values)
    if not direct:
        return tensor.to(torch_xla.device())
    brought: list[Tensor] = _C._xla_tensors_from_aten([tensor], [_device()])
    return brought[0]


def fetch(tensors: Sequence[Tensor], *, direct: bool = _DIRECT) -> list[Values]:
    """Return what device tensors hold, waiting until it is computed.

    Raises `RuntimeError` if a graph that computes it failed.
    """
    found = _C._xla_get_cpu_tensors(list(tensors)) if direct else [part.cpu() for part in tensors]
    return [part.numpy() for part in found]


@cache
def _device() -> str:
    return str(torch_xla.device())

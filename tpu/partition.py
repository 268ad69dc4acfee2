"""A mesh for placeholders: they cannot be cut, so it is written down how they would be.

A placeholder holds nothing that torch_xla could lay out over devices. Which parameter is cut along
which dimension is kept here, and told to the compiler with the graph. What is computed from them is
marked as in serving.
"""

from typing import Final

import torch_xla
from loralane_server.device.xla.mesh import Mesh
from torch import Tensor

_C: Final = torch_xla._XLAC


class PlaceholderMesh(Mesh):
    """Remembers how placeholders are to be cut."""

    def __init__(self, devices: int) -> None:
        super().__init__(devices)
        #: By the handle of the parameter's memory: the dimension.
        self._cut: dict[int, int] = {}
        #: Bytes that each device is spared.
        self.spared = 0

    def place(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """See `Mesh.place`."""
        if self.devices == 1 or not _C._is_placecholder(tensor):
            return super().place(tensor, dim)
        if dim is not None:
            self._cut[_handle(tensor)] = dim
            size = tensor.numel() * tensor.element_size()
            self.spared += size - size // self.devices
        return tensor

    def cut_of(self, tensor: Tensor) -> int | None:
        """Return the dimension along which a parameter is cut; None = it is whole everywhere."""
        return self._cut.get(_handle(tensor))


def sharding(rank: int, dim: int | None, devices: int) -> str:
    """Return how XLA writes that an array is cut into equal parts along one dimension, or whole."""
    if dim is None:
        return "{replicated}"
    sizes = ",".join(str(devices if at == dim else 1) for at in range(rank))
    return f"{{devices=[{sizes}]<=[{devices}]}}"


def _handle(tensor: Tensor) -> int:
    (handle,) = _C._get_tensors_handle([tensor])
    return int(handle)

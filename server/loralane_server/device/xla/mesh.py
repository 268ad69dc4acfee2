"""Tensor parallelism: one program for all devices, weights and KV heads cut once at load (SPMD).

Linears that read the residual stream (qkv, gate_up) are cut by outputs, those that write it
(o, down) by inputs. Outputs of linears that lie side by side are ordered by device, so that each
device holds its heads of q, k and v:

    one device    q0 q1 q2 q3 | k0 k1 | v0 v1
    two devices   q0 q1 k0 v0 | q2 q3 k1 v1

A product over cut inputs is a sum over devices. It stays in *parts* [devices, tokens, out] until
LoRA's delta, a sum over the same inputs, is added to it: so each such linear takes one all-reduce
with LoRA as without. (Left to itself, XLA reduces LoRA's shrink on its own, because of the mask.)
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla.distributed.spmd.xla_sharding import unwrap_sharded_tensor

_AXIS: Final = "devices"
#: Groups whose linears are cut by inputs; the others are by outputs.
CUT_BY_INPUTS: Final = frozenset({"o", "down"})


class Mesh:
    """All devices of this process in one line; of one device, it does nothing."""

    def __init__(self, devices: int = 1) -> None:
        """More than one: SPMD must be on, and exactly so many devices there (see hardware.py)."""
        self.devices = devices
        self._mesh: xs.Mesh | None = None
        if devices > 1:
            assert xr.is_spmd()
            self._mesh = xs.Mesh(np.arange(devices), (devices,), (_AXIS,))

    def place(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """Cut a tensor of the device along `dim`, or copy it to every device; returns it."""
        if self._mesh is not None:
            xs.mark_sharding(tensor, self._mesh, _spec(tensor, dim))
        return tensor

    def apart(
        self,
        fn: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        dims: Sequence[int | None],
        dim: int,
    ) -> Tensor:
        """Return fn(*tensors), computed by each device on its own parts alone.

        For what XLA cannot cut by itself: a kernel, for which it would gather all that it reads.
        `dims`: along which each tensor is cut, None = whole everywhere; `dim`: the same of the
        result.
        """
        if self._mesh is None:
            return fn(*tensors)
        own = fn(*(self._own(tensor, at) for tensor, at in zip(tensors, dims, strict=True)))
        shape = torch.Size(
            size * self.devices if at == dim else size for at, size in enumerate(own.shape)
        )
        joined = xs.disable_manual_sharding(own, _spec(own, dim), shape, mesh=self._mesh)
        whole: Tensor = unwrap_sharded_tensor(joined)
        return whole

    def _own(self, tensor: Tensor, dim: int | None) -> Tensor:
        marked = xs.enable_manual_sharding(tensor, _spec(tensor, dim), mesh=self._mesh)
        part: Tensor = unwrap_sharded_tensor(marked)
        return part

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return a tensor that is computed in parts along `dim`, whole on every device."""
        # Two places need two operations; without the first, what it is made of is gathered.
        return self.place(self.place(tensor, dim) * 1)

    def interleave(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Order rows [sum of sizes, ...] of linears that lie side by side by device."""
        parts = [part.unflatten(0, (self.devices, -1)) for part in rows.split(list(sizes))]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def split(self, y: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Take apart what lies side by side, ordered by device, in dimension 1 of y."""
        by_device = y.unflatten(1, (self.devices, -1))
        parts = by_device.split([size // self.devices for size in sizes], dim=2)
        return [part.flatten(1, 2) for part in parts]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Lay side by side, ordered by device, what `split` would take apart: [tokens, sum]."""
        by_device = [part.unflatten(1, (self.devices, -1)) for part in parts]
        return torch.cat(by_device, dim=2).flatten(1, 2)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x [tokens, in] times weight [in, out], both cut by inputs, in parts."""
        cut = x.unflatten(1, (self.devices, -1)).transpose(0, 1)
        return torch.bmm(cut, weight.unflatten(0, (self.devices, -1)))

    def sum(self, parts: Tensor) -> Tensor:
        """Return parts [devices, tokens, out] as one tensor, the same on every device."""
        return self.place(self.place(parts, 0).sum(0))


def _spec(tensor: Tensor, dim: int | None) -> tuple[str | None, ...]:
    """Name what each dimension is cut by."""
    return tuple(_AXIS if at == dim else None for at in range(tensor.dim()))

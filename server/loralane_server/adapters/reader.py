"""The tensors of one layer, read when it is needed: by range, scaled in float32, checked, cast.

Masks multiply, and 0 x NaN would poison every row of a batch, so nothing that is not finite passes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from loralane_server.adapters.files import Reads, opened, read_into
from loralane_server.adapters.headers import TensorRef
from loralane_server.adapters.index import AdapterIndex
from loralane_server.errors import AdapterCorrupt

_STORED: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """One layer of one adapter, ready for the lanes: CPU tensors in the shard's dtype.

    targets: module -> (A [rank, in], B [rank, out]), contiguous, the scale folded into B. Nobody
    may write to them.
    """

    layer: int
    targets: dict[str, tuple[Tensor, Tensor]]
    nbytes: int


class Reader:
    """Reads layers for a shard that computes in `dtype`."""

    def __init__(self, dtype: torch.dtype, reads: Reads) -> None:
        self._dtype = dtype
        self._reads = reads

    def read_layer(
        self, index: AdapterIndex, open_file: Callable[[str], Path], layer: int
    ) -> LayerTensors:
        """Read exactly this layer's tensors; a layer without targets reads nothing.

        `open_file` is asked before and after, so that a file replaced meanwhile is noticed.

        Raises:
            AdapterCorrupt: truncated, changed since it was resolved, or not finite.
            AdapterNotFound, SourceUnavailable: as `open_file` and the disk.
        """
        targets: dict[str, tuple[Tensor, Tensor]] = {}
        for target in index.layer(layer):
            a = self._read(target.a, open_file)
            b = self._read(target.b, open_file).mul(target.scale).T
            targets[target.module] = (self._served(a, target.a), self._served(b, target.b))
        for file in sorted({ref.file for t in index.layer(layer) for ref in (t.a, t.b)}):
            open_file(file)
        nbytes = sum(half.nbytes for pair in targets.values() for half in pair)
        return LayerTensors(layer, targets, nbytes)

    def _read(self, ref: TensorRef, open_file: Callable[[str], Path]) -> Tensor:
        buffer = bytearray(ref.end - ref.begin)
        with opened(open_file(ref.file)) as descriptor:
            read_into(descriptor, buffer, ref.begin, ref.file)
        self._reads.add_tensor(len(buffer))
        stored = torch.frombuffer(buffer, dtype=_STORED[ref.dtype])
        return stored.reshape(ref.shape).to(torch.float32)

    def _served(self, half: Tensor, ref: TensorRef) -> Tensor:
        served = half.to(self._dtype).contiguous()
        if not bool(torch.isfinite(served).all()):
            raise AdapterCorrupt(
                f"{ref.name!a} is not finite: it holds NaN or Inf, or {self._dtype} cannot hold it",
                tensors=[ref.name],
            )
        return served

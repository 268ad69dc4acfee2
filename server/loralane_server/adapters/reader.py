"""The tensors of one layer, read when it is needed: by range, scaled in float32, checked, cast.

Masks multiply, and 0 x NaN would poison every row of a batch, so nothing that is not finite passes.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite, prod
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from loralane_server.adapters.files import Reads, opened, read_into
from loralane_server.adapters.headers import TensorRef
from loralane_server.adapters.index import AdapterIndex, Target
from loralane_server.device.seam import ENDS, TableRows, TargetTensors
from loralane_server.errors import AdapterCorrupt

_STORED: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Milliseconds that reading took."""

    #: Until the files were open; on the hub this is the download.
    open_ms: float = 0.0
    read_ms: float = 0.0
    #: Scaling, checking, casting.
    cast_ms: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """One layer of one adapter, ready for the lanes: CPU tensors in the shard's dtype.

    By module name; contiguous; nobody may write to them.
    """

    #: `ENDS` for the embedding and the head.
    layer: int
    targets: dict[str, TargetTensors]
    nbytes: int
    #: Of the `ENDS` only.
    tables: dict[str, TableRows] = field(default_factory=dict)
    #: Zero when it came from memory.
    times: ReadTimes = field(default_factory=ReadTimes)


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
        targets_here = () if layer == ENDS else index.layer(layer)
        began = time.perf_counter()
        stored, open_ms = self._read(targets_here, open_file)
        read = time.perf_counter()
        targets: dict[str, TargetTensors] = {}
        for target in targets_here:
            b = stored[target.b.name].to(torch.float32).mul(target.scale).T
            targets[target.module] = TargetTensors(
                self._served(stored[target.a.name], target.a),
                self._served(b, target.b),
            )
        nbytes = sum(target.nbytes for target in targets.values())
        cast_ms = (time.perf_counter() - read) * 1e3
        times = ReadTimes(open_ms, (read - began) * 1e3 - open_ms, cast_ms)
        return LayerTensors(layer, targets, nbytes, times=times)

    def _read(
        self, targets: Sequence[Target], open_file: Callable[[str], Path]
    ) -> tuple[dict[str, Tensor], float]:
        """Return the tensors by name, as stored, and how long opening took, in ms.

        Neighbours in a file are one read.
        """
        refs = sorted(
            (ref for target in targets for ref in (target.a, target.b)),
            key=lambda ref: (ref.file, ref.begin),
        )
        tensors: dict[str, Tensor] = {}
        open_s = 0.0
        for name, of_file in groupby(refs, key=lambda ref: ref.file):
            began = time.perf_counter()
            with opened(open_file(name)) as descriptor:
                open_s += time.perf_counter() - began
                for run in _runs(of_file):
                    tensors |= self._read_run(descriptor, run)
            open_file(name)
        return tensors, open_s * 1e3

    def _read_run(self, descriptor: int, run: Sequence[TensorRef]) -> dict[str, Tensor]:
        begin = run[0].begin
        buffer = bytearray(run[-1].end - begin)
        read_into(descriptor, buffer, begin, run[0].file)
        self._reads.add_tensor(len(buffer))
        return {
            ref.name: torch.frombuffer(
                buffer, dtype=_STORED[ref.dtype], count=prod(ref.shape), offset=ref.begin - begin
            ).view(ref.shape)
            for ref in run
        }

    def _served(self, half: Tensor, ref: TensorRef) -> Tensor:
        served = torch.empty(half.shape, dtype=self._dtype).copy_(half)
        # A sum is finite only if all it adds is: one pass, and no mask to allocate.
        if not isfinite(served.sum(dtype=torch.float32).item()) and not served.isfinite().all():
            raise AdapterCorrupt(
                f"{ref.name!a} is not finite: it holds NaN or Inf, or {self._dtype} cannot hold it",
                tensors=[ref.name],
            )
        return served


def _runs(refs: Iterable[TensorRef]) -> Iterator[list[TensorRef]]:
    """Split refs of one file, in order, where bytes lie between them or the dtype changes.

    Within a run every tensor is aligned to its own width.
    """
    run: list[TensorRef] = []
    for ref in refs:
        if run and (run[-1].end != ref.begin or run[-1].dtype != ref.dtype):
            yield run
            run = []
        run.append(ref)
    if run:
        yield run

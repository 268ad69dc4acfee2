"""Tensors by byte range: exactly those that are asked for, neighbours in one read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from loralane_server.adapters.formats.headers import TensorRef
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.scratch import fresh
from loralane_server.adapters.sources.files import Reads, read_into

_STORED: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_BLOCK_BYTES: Final = 8 << 20


def read_tensors(
    refs: Iterable[TensorRef],
    files: LoadFiles,
    reads: Reads,
    room: Callable[[int], Tensor] = fresh,
) -> dict[str, Tensor]:
    """Return the tensors by name, as stored, in memory that `room` gives.

    Raises:
        AdapterCorrupt: truncated, or changed since it was resolved.
        AdapterNotFound, SourceUnavailable: as `files`.
    """
    ordered = sorted({ref.name: ref for ref in refs}.values(), key=lambda r: (r.file, r.begin))
    tensors: dict[str, Tensor] = {}
    for name, of_file in groupby(ordered, key=lambda ref: ref.file):
        with files.opened(name) as descriptor:
            for run in _runs(of_file):
                tensors |= _read_run(descriptor, run, reads, room)
    return tensors


def read_blocks(ref: TensorRef, files: LoadFiles, reads: Reads) -> Iterator[tuple[int, Tensor]]:
    """Yield a matrix in blocks of whole rows, as stored, each with its first row's number.

    For tensors too large to be held whole. Raises as `read_tensors`; whoever stops early does not
    learn whether the file was replaced meanwhile.
    """
    rows, columns = ref.shape
    row_bytes = (ref.end - ref.begin) // max(1, rows)
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    with files.opened(ref.file) as descriptor:
        for first in range(0, rows, step):
            count = min(step, rows - first)
            begin = ref.begin + first * row_bytes
            end = begin + count * row_bytes
            block = TensorRef(ref.file, ref.name, ref.dtype, (count, columns), begin, end)
            yield first, _read_run(descriptor, [block], reads, fresh)[ref.name]


def _read_run(
    descriptor: int, run: Sequence[TensorRef], reads: Reads, room: Callable[[int], Tensor]
) -> dict[str, Tensor]:
    begin = run[0].begin
    content = room(run[-1].end - begin)
    read_into(descriptor, content.numpy().data, begin, run[0].file)
    reads.add_tensor(content.nbytes)
    dtype = _STORED[run[0].dtype]
    parts = content.view(dtype).split([(ref.end - ref.begin) // dtype.itemsize for ref in run])
    return {ref.name: part.view(ref.shape) for ref, part in zip(run, parts, strict=True)}


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

"""Lanes written where XLA:CPU reads them: straight into its memory, which is the host's.

For one CPU device only. A graph that places a layer there takes 0.4 to 0.7 ms for what a copy does
in 0.2, and has to be given a copy first (bench/XLA.md). Elsewhere, and on a TPU, graphs write: see
`writers.py`.

DLPack makes the pool's tensors known to torch as what they are, host memory. XLA knows nothing of
what is written there, so it is for this module to see that no graph runs meanwhile: `write` waits
until all have ended. No graph updates lanes, so the memory stays the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torch_xla.utils.dlpack import to_dlpack

from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.seam import GROUPS, TargetTensors
from loralane_server.device.xla.graphs import Graphs
from loralane_server.device.xla.lanes import LayerCells, Part, Segment, XlaLanes

_NOTHING: Final[frozenset[str]] = frozenset()


class Run(NamedTuple):
    """Lane pages side by side in one segment, which are written together."""

    #: Which segment.
    segment: int
    #: The first page's place among the segment's.
    begin: int
    #: The pages, numbered in the pool.
    pages: Sequence[int]
    #: The adapter's lane that comes first.
    lane: int


class Rows(NamedTuple):
    """One linear's lanes in a layer of a segment, as the host sees them."""

    #: [lanes, in], by columns in memory.
    a: Tensor
    #: [lanes, out]
    b: Tensor


class HostWriter:
    """Implements `LaneWriter` without a graph."""

    #: Nothing is compiled.
    declared = 0

    def __init__(self, lanes: XlaLanes) -> None:
        self._segments = lanes.segments
        #: By segment and layer: every linear's lanes.
        self._rows = [
            [_rows_of(layer, segment) for layer in segment.layers] for segment in lanes.segments
        ]
        #: By layer and lane page: the linears whose lanes may not be zero.
        self._filled: dict[tuple[int, int], frozenset[str]] = {}

    def compile(self, graphs: Graphs) -> None:
        """See `LaneWriter.compile`."""

    def write(
        self, layer: int, lane_pages: Sequence[int], targets: Mapping[str, TargetTensors]
    ) -> None:
        """See `LaneWriter.write`. Waits until the device is idle."""
        to: list[Tensor] = []
        values: list[Tensor] = []
        zero: list[Tensor] = []
        for run in _runs(lane_pages, self._segments):
            dirty = self._fill(layer, run.pages, frozenset(targets))
            begin, room = run.begin * LANE_PAGE, len(run.pages) * LANE_PAGE
            for module, rows in self._rows[run.segment][layer].items():
                count = 0
                if (target := targets.get(module)) is not None:
                    own = _lanes_of(target, run.lane, room)
                    count = own[0].size(0)
                    to += (rows.a[begin : begin + count], rows.b[begin : begin + count])
                    values += own
                if count < room and module in dirty:
                    zero += (part[begin + count : begin + room] for part in rows)
        xm.wait_device_ops()
        # One call for all: each gives the interpreter away, and may wait until it comes back.
        if to:
            torch._foreach_copy_(to, values)
        if zero:
            torch._foreach_zero_(zero)

    def _fill(self, layer: int, pages: Sequence[int], modules: frozenset[str]) -> frozenset[str]:
        """Note which linears' lanes are filled from now on; return those that were before."""
        before = _NOTHING.union(*(self._filled.get((layer, page), _NOTHING) for page in pages))
        self._filled.update({(layer, page): modules for page in pages})
        return before


def _lanes_of(target: TargetTensors, first: int, room: int) -> tuple[Tensor, Tensor]:
    """Return A and B of lanes [first, first + room), as far as there are such."""
    if not first and target.a.size(0) <= room:
        return target.a, target.b
    return target.a[first : first + room], target.b[first : first + room]


def _runs(pages: Sequence[int], segments: Sequence[Segment]) -> Iterator[Run]:
    """Cut an adapter's pages into runs."""
    at = 0
    while at < len(pages):
        which = next(i for i, segment in enumerate(segments) if pages[at] < segment.end)
        end = at + 1
        while end < len(pages) and pages[end] == pages[end - 1] + 1 < segments[which].end:
            end += 1
        yield Run(which, pages[at] - segments[which].begin, pages[at:end], at * LANE_PAGE)
        at = end


def _rows_of(layer: LayerCells, segment: Segment) -> dict[str, Rows]:
    """Return the memory of a layer's cells, by linear."""
    rows = {}
    for group, modules in GROUPS.items():
        columns = _on_host(layer.a[group]).split(segment.lanes, dim=1)
        for module, own in zip(modules, columns, strict=True):
            rows[module] = Rows(own.T, _on_host(layer.b[module]))
    return rows


def _on_host(part: Part) -> Tensor:
    """Return the memory behind a part of a cell of XLA:CPU, not a copy."""
    memory: Tensor = from_dlpack(to_dlpack(part.cell.tensor))
    return memory[part.layer]

"""Lanes written in place, without compiling: one graph for all layers and pages of a segment.

A write takes one lane page (8 lanes) of one layer: all its linears travel in one vector, padded
with zeros, and which page it is is a number in another. So the same graph serves every rank and any
subset of targets. It is compiled for cells that stand for a layer's; to write a layer they take its
tensors and give them back.

How a page is placed differs. A is updated by columns: XLA:CPU scatters them in place, but would
copy the whole pool for a slice; on a TPU scattering goes element by element, and a slice is in
place.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import torch
import torch_xla.core.xla_op_registry as registry
from torch import Tensor

from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.seam import GROUPS, TargetTensors
from loralane_server.device.xla.graphs import Cell, Graph, Graphs
from loralane_server.device.xla.lanes import LayerCells, Segment, XlaLanes

_update_slice: Final = registry.register(
    "loralane_update_slice",
    lambda memory, update, row, column: memory.dynamic_update_slice(
        update, [row.reshape([]), column.reshape([])]
    ),
)


class LaneWriter:
    """Fills lane pages. Compiled at warm-up; never afterwards."""

    def __init__(
        self, lanes: XlaLanes, dtype: torch.dtype, device: torch.device, *, slices: bool
    ) -> None:
        """`slices`: whether columns are placed as slices (a TPU) or scattered (a CPU)."""
        self._lanes = lanes
        self._device = device
        self._slices = slices
        self._graphs: list[tuple[Graph, LayerCells]] = []
        #: Where each linear's A [8, in] and B [8, out] begin in the vector, in numbers.
        self._bounds = _bounds(lanes.shapes)
        #: The vector on the host: filled anew for every page, and copied by the transfer.
        self._staged = torch.zeros(self._bounds[-1][-1], dtype=dtype)
        self._places = {
            module: (
                self._staged[a:b].view(LANE_PAGE, -1),
                self._staged[b:end].view(LANE_PAGE, -1),
            )
            for module, (a, b, end) in zip(lanes.shapes, self._bounds, strict=True)
        }
        self._page = torch.zeros(1, dtype=torch.int32)

    @property
    def declared(self) -> int:
        """How many graphs `compile` makes."""
        return len(self._lanes.segments)

    def compile(self, graphs: Graphs) -> None:
        """Compile a graph for each segment."""
        for segment in self._lanes.segments:
            self._graphs.append(self._compiled(graphs, segment))

    def write(
        self, layer: int, lane_pages: Sequence[int], targets: Mapping[str, TargetTensors]
    ) -> None:
        """Fill lane pages of a layer, zeros where targets have no lanes; `Device.write_lanes`."""
        for place, page in enumerate(lane_pages):
            self._stage(targets, place * LANE_PAGE)
            which = next(i for i, s in enumerate(self._lanes.segments) if page < s.end)
            segment = self._lanes.segments[which]
            self._page[0] = page - segment.begin
            graph, stand_ins = self._graphs[which]
            self._run(graph, stand_ins, segment.layers[layer])

    def _stage(self, targets: Mapping[str, TargetTensors], first: int) -> None:
        """Lay out lanes [first, first + 8) of every target, cast and padded."""
        for module, (a, b) in self._places.items():
            target = targets.get(module)
            lanes = 0
            if target is not None:
                lanes = min(max(target.a.shape[0] - first, 0), LANE_PAGE)
                a[:lanes] = target.a[first : first + lanes]
                b[:lanes] = target.b[first : first + lanes]
            if lanes < LANE_PAGE:
                a[lanes:].zero_()
                b[lanes:].zero_()

    def _run(self, graph: Graph, stand_ins: LayerCells, layer: LayerCells) -> None:
        for stand_in, cell in zip(stand_ins.cells, layer.cells, strict=True):
            stand_in.tensor = cell.tensor
        graph.run([self._page.to(self._device), self._staged.to(self._device)])
        for stand_in, cell in zip(stand_ins.cells, layer.cells, strict=True):
            cell.tensor = stand_in.tensor

    def _compiled(self, graphs: Graphs, segment: Segment) -> tuple[Graph, LayerCells]:
        first = segment.layers[0]
        cells = LayerCells(
            {group: Cell(cell.tensor) for group, cell in first.a.items()},
            {module: Cell(cell.tensor) for module, cell in first.b.items()},
        )

        def write(page: Tensor, lanes: Tensor) -> list[Tensor]:
            self._place(cells, segment.lanes, page * LANE_PAGE, lanes)
            return []

        graph = graphs.compile(
            f"write-l{segment.begin * LANE_PAGE}-l{segment.end * LANE_PAGE}",
            write,
            [self._page.to(self._device), self._staged.to(self._device)],
            updated=cells.cells,
        )
        for stand_in, cell in zip(cells.cells, first.cells, strict=True):
            cell.tensor = stand_in.tensor
        return graph, cells

    def _place(self, cells: LayerCells, width: int, lane: Tensor, lanes: Tensor) -> None:
        """Write one page's lanes, from number `lane` [1] on, to the cells of a layer."""
        rows = {
            module: (lanes[a:b].view(LANE_PAGE, -1), lanes[b:end].view(LANE_PAGE, -1))
            for module, (a, b, end) in zip(self._lanes.shapes, self._bounds, strict=True)
        }
        for group, modules in GROUPS.items():
            columns = torch.cat([rows[module][0] for module in modules]).T
            begins = [place * width for place in range(len(modules))]
            self._place_columns(cells.a[group], columns, lane, begins)
        for module, cell in cells.b.items():
            self._place_rows(cell, rows[module][1], lane)

    def _place_columns(
        self, cell: Cell, columns: Tensor, lane: Tensor, begins: Sequence[int]
    ) -> None:
        """Write columns [in, linears * 8], eight at lane + each of `begins`."""
        if self._slices:
            for begin, part in zip(begins, columns.split(LANE_PAGE, dim=1), strict=True):
                cell.tensor = _update_slice(cell.tensor, part, torch.zeros_like(lane), lane + begin)
            return
        first = torch.tensor(begins, device="cpu").to(lane.device)
        eight = torch.arange(LANE_PAGE).to(lane.device)
        at = (first[:, None] + eight[None, :] + lane).flatten()
        cell.tensor.scatter_(1, at[None, :].expand(columns.shape), columns)

    def _place_rows(self, cell: Cell, rows: Tensor, lane: Tensor) -> None:
        """Write rows [8, out] from `lane` on."""
        if self._slices:
            cell.tensor = _update_slice(cell.tensor, rows, lane, torch.zeros_like(lane))
        else:
            cell.tensor.index_copy_(0, torch.arange(LANE_PAGE).to(lane.device) + lane, rows)


def _bounds(shapes: Mapping[str, tuple[int, int]]) -> list[tuple[int, int, int]]:
    sizes = [size * LANE_PAGE for out, in_ in shapes.values() for size in (in_, out)]
    edges = [0, *accumulate(sizes)]
    return list(zip(edges[::2], edges[1::2], edges[2::2], strict=False))

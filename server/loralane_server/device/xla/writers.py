"""Lanes written in place, without compiling: one graph for all layers and pages of a segment.

A write takes one lane page (8 lanes) of one layer: all its linears travel in one vector, padded
with zeros, and which layer and page it is are numbers in another. So the same graph serves every
rank and any subset of targets. It is compiled for cells that stand for a layer's; to write a layer
they take its tensors and give them back.

Pages are placed as slices, which a TPU does in place. XLA:CPU copies the lanes of the layer within
the graph, so where it can it does without one: see `host_writer.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch
import torch_xla.core.xla_op_registry as registry
from torch import Tensor

from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.seam import GROUPS, TargetTensors
from loralane_server.device.xla.graphs import Cell, Graph, Graphs
from loralane_server.device.xla.lanes import LayerCells, Segment, XlaLanes, layer_of

_update_slice: Final = registry.register(
    "loralane_update_slice",
    lambda memory, update, *begin: memory.dynamic_update_slice(
        update, [one.reshape([]) for one in begin]
    ),
)


class LaneWriter(Protocol):
    """Fills lane pages. Compiled at warm-up; never afterwards."""

    @property
    def declared(self) -> int:
        """How many graphs `compile` makes."""

    def compile(self, graphs: Graphs) -> None:
        """Compile what writes will need."""

    def write(
        self, layer: int, lane_pages: Sequence[int], targets: Mapping[str, TargetTensors]
    ) -> None:
        """Fill lane pages of a layer, zeros where targets have no lanes; `Device.write_lanes`.

        Raises `RuntimeError` if the device fails.
        """


class GraphWriter:
    """Implements `LaneWriter` on any device and mesh."""

    def __init__(self, lanes: XlaLanes, dtype: torch.dtype, device: torch.device) -> None:
        self._lanes = lanes
        self._device = device
        self._graphs: list[tuple[Graph, LayerCells]] = []
        numbers = LANE_PAGE * sum(map(sum, lanes.shapes.values()))
        #: The vector on the host: filled anew for every page, and copied by the transfer.
        self._staged = torch.zeros(numbers, dtype=dtype)
        a, self._b = _parts(self._staged, lanes.shapes)
        #: By linear, [8, in]: as adapters have it, over columns of the vector.
        self._a = {
            module: part.T
            for group, modules in GROUPS.items()
            for module, part in zip(modules, a[group].split(LANE_PAGE, dim=1), strict=True)
        }
        #: The layer among those of its cells, and the page.
        self._where = torch.zeros(2, dtype=torch.int32)

    @property
    def declared(self) -> int:
        """See `LaneWriter.declared`: one for each segment."""
        return len(self._lanes.segments)

    def compile(self, graphs: Graphs) -> None:
        """See `LaneWriter.compile`."""
        for segment in self._lanes.segments:
            self._graphs.append(self._compiled(graphs, segment))

    def write(
        self, layer: int, lane_pages: Sequence[int], targets: Mapping[str, TargetTensors]
    ) -> None:
        """See `LaneWriter.write`."""
        for place, page in enumerate(lane_pages):
            self._stage(targets, place * LANE_PAGE)
            which = next(i for i, s in enumerate(self._lanes.segments) if page < s.end)
            segment = self._lanes.segments[which]
            cells = segment.layers[layer]
            self._where[0], self._where[1] = cells.layer, page - segment.begin
            graph, stand_ins = self._graphs[which]
            self._run(graph, stand_ins, cells)

    def _stage(self, targets: Mapping[str, TargetTensors], first: int) -> None:
        """Lay out lanes [first, first + 8) of every target, cast and padded."""
        for module, a in self._a.items():
            b, target = self._b[module], targets.get(module)
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
        graph.run([self._where.to(self._device), self._staged.to(self._device)])
        for stand_in, cell in zip(stand_ins.cells, layer.cells, strict=True):
            cell.tensor = stand_in.tensor

    def _compiled(self, graphs: Graphs, segment: Segment) -> tuple[Graph, LayerCells]:
        first = segment.layers[0]
        cells = layer_of(
            {group: Cell(part.cell.tensor) for group, part in first.a.items()},
            {module: Cell(part.cell.tensor) for module, part in first.b.items()},
            0,
        )

        def write(where: Tensor, lanes: Tensor) -> list[Tensor]:
            self._place(cells, segment.lanes, where[:1], where[1:] * LANE_PAGE, lanes)
            return []

        graph = graphs.compile(
            f"write-l{segment.begin * LANE_PAGE}-l{segment.end * LANE_PAGE}",
            write,
            [self._where.to(self._device), self._staged.to(self._device)],
            updated=cells.cells,
        )
        for stand_in, cell in zip(cells.cells, first.cells, strict=True):
            cell.tensor = stand_in.tensor
        return graph, cells

    def _place(
        self, cells: LayerCells, width: int, layer: Tensor, lane: Tensor, lanes: Tensor
    ) -> None:
        """Write one page's lanes, from number `lane` [1] on, to the cells of layer `layer` [1]."""
        a, b = _parts(lanes, self._lanes.shapes)
        none = torch.zeros_like(lane)

        def put(cell: Cell, values: Tensor, row: Tensor, column: Tensor) -> None:
            cell.tensor = _update_slice(cell.tensor, values[None], layer, row, column)

        for group, to in cells.a.items():
            for place, columns in enumerate(a[group].split(LANE_PAGE, dim=1)):
                put(to.cell, columns, none, lane + place * width)
        for module, to in cells.b.items():
            put(to.cell, b[module], lane, none)


def _parts(
    vector: Tensor, shapes: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take a page's vector apart: A by group [in, linears * 8], B by linear [8, out]."""
    begin = 0

    def take(rows: int, columns: int) -> Tensor:
        nonlocal begin
        begin += rows * columns
        return vector[begin - rows * columns : begin].view(rows, columns)

    a = {
        group: take(shapes[modules[0]][1], len(modules) * LANE_PAGE)
        for group, modules in GROUPS.items()
    }
    return a, {module: take(LANE_PAGE, out) for module, (out, _) in shapes.items()}

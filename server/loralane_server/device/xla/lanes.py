"""The adapter pool's memory on XLA, and the LoRA arithmetic of a traced step.

The pool is cut into *segments* at the window sizes that graphs are compiled for, so a graph reads
the segments of its window whole. By segment, for one layer or for several together:

    a   by group    [layers, in, linears * lanes]   each linear's lanes side by side: one shrink
    b   by linear   [layers, lanes, out]

A TPU multiplies by a layer's slice where it lies, so there layers are together and a step hands
over few tensors. XLA:CPU would copy the slice in every step, so there each layer has its own.

A's lanes are columns because XLA:CPU multiplies by [in, out] five times faster than by [out, in]
(bench/XLA.md). Every lane of the window is multiplied and those of others are masked: a dense
product over a window that fits beats gathering each row's own lanes, in time on XLA:CPU and in
bytes moved on a TPU. What is masked is replaced, not multiplied: `adapters/lanes.py` says why. So
the delta of a base row is exactly zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.seam import GROUPS
from loralane_server.device.xla.graphs import Cell
from loralane_server.device.xla.mesh import CUT_BY_INPUTS, Mesh
from loralane_server.device.xla.tracing import CELL_BYTES

#: For each segment of the window: whether the token owns the lane, [tokens, lanes] bool.
Masks = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One layer's part of a cell [layers, rows, columns]."""

    cell: Cell
    #: Its place among the cell's layers.
    layer: int

    @property
    def tensor(self) -> Tensor:
        """What it holds, [rows, columns]."""
        return self.cell.tensor[self.layer]


@dataclass(frozen=True, slots=True)
class LayerCells:
    """One layer's part of a segment."""

    #: By group, [in, linears * lanes].
    a: Mapping[str, Part]
    #: By linear, [lanes, out].
    b: Mapping[str, Part]
    #: Which of the cells' layers it is.
    layer: int

    @property
    def cells(self) -> list[Cell]:
        """All of them, A before B."""
        return [part.cell for part in (*self.a.values(), *self.b.values())]


@dataclass(frozen=True, slots=True)
class Segment:
    """Lane pages [begin, end) of the pool."""

    begin: int
    end: int
    layers: Sequence[LayerCells]

    @property
    def lanes(self) -> int:
        """How many lanes."""
        return (self.end - self.begin) * LANE_PAGE


class XlaLanes:
    """Owns the pool's tensors: allocated once, updated in place, never resized."""

    def __init__(
        self,
        layers: int,
        shapes: Mapping[str, tuple[int, int]],
        windows: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        mesh: Mesh,
        together: bool = False,
    ) -> None:
        """`shapes`: (out, in) by linear; `windows`: lanes, ascending, the last holds the pool.

        `together`: whether layers share cells, as many as one may hold.
        """
        ends = sorted({window // LANE_PAGE for window in windows} | {0})
        self.shapes = shapes
        self._mesh = mesh

        def segment(begin: int, end: int) -> Segment:
            lanes = (end - begin) * LANE_PAGE
            held = _held(layers, lanes, shapes, dtype) if together else 1
            stacks = [
                _stack(held, shapes, lanes, dtype, device, mesh) for _ in range(0, layers, held)
            ]
            return Segment(begin, end, [layer for stack in stacks for layer in stack])

        self.segments = tuple(segment(begin, end) for begin, end in pairwise(ends))

    def cells(self, window: int) -> list[Cell]:
        """Return the cells that a graph of this window reads."""
        return [
            cell
            for segment in self.segments
            if segment.end * LANE_PAGE <= window
            for layer in segment.layers
            if layer.layer == 0
            for cell in layer.cells
        ]

    def masks(self, adapter_of: Tensor, page_owner: Tensor) -> Masks:
        """Return which lanes are whose, once for all layers of a step.

        adapter_of [tokens] and page_owner [lane pages of the window] name an adapter by its first
        lane page. A base token must equal no owner, nor may a page that nobody owns.
        """
        tokens, pages = adapter_of.shape[0], page_owner.shape[0]
        own = (adapter_of[:, None] == page_owner[None, :]).unsqueeze(-1)
        own = own.expand(tokens, pages, LANE_PAGE).reshape(tokens, pages * LANE_PAGE)
        return tuple(
            own[:, segment.begin * LANE_PAGE : segment.end * LANE_PAGE]
            for segment in self.segments
            if segment.end <= pages
        )

    def add(self, y: Tensor, x: Tensor, layer: int, group: str, masks: Masks) -> None:
        """Add the adapters' deltas to y, in place; x [tokens, in].

        y [tokens, outs of the group], or in parts where the group is cut by inputs (see mesh.py).
        """
        for segment, mine in zip(self.segments, masks, strict=False):
            cells = segment.layers[layer]
            a = cells.a[group].tensor
            # [tokens, linears * lanes], or parts of that.
            shrunk = x @ a if y.dim() == 2 else self._mesh.product(x, a)
            deltas = [
                _masked(own, mine) @ cells.b[module].tensor
                for module, own in zip(
                    GROUPS[group], shrunk.split(segment.lanes, dim=-1), strict=True
                )
            ]
            y.add_(deltas[0] if len(deltas) == 1 else self._mesh.join(deltas))


def _masked(shrunk: Tensor, mine: Tensor) -> Tensor:
    return shrunk.masked_fill(~mine, 0.0)


def _held(
    layers: int,
    lanes: int,
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
) -> int:
    """Return how many layers a cell holds; as many in each, so that one writer serves them all."""
    widest = max(len(modules) * shapes[modules[0]][1] for modules in GROUPS.values())
    widest = max(widest, *(out for out, _ in shapes.values()))
    most = max(CELL_BYTES // (widest * lanes * dtype.itemsize), 1)
    return max(held for held in range(1, min(most, layers) + 1) if layers % held == 0)


def _stack(
    layers: int,
    shapes: Mapping[str, tuple[int, int]],
    lanes: int,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
) -> list[LayerCells]:
    """Return layers that share their cells."""

    def cell(cut: int | None, *shape: int) -> Cell:
        memory = torch.zeros(layers, *shape, dtype=dtype).to(device)
        return Cell(mesh.place(memory, None if cut is None else cut + 1))

    a, b = {}, {}
    for group, modules in GROUPS.items():
        by_inputs = group in CUT_BY_INPUTS
        inside = shapes[modules[0]][1]
        a[group] = cell(0 if by_inputs else None, inside, len(modules) * lanes)
        for module in modules:
            b[module] = cell(None if by_inputs else 1, lanes, shapes[module][0])
    return [layer_of(a, b, layer) for layer in range(layers)]


def layer_of(a: Mapping[str, Cell], b: Mapping[str, Cell], layer: int) -> LayerCells:
    """Return one layer of these cells."""
    return LayerCells(
        {group: Part(cell, layer) for group, cell in a.items()},
        {module: Part(cell, layer) for module, cell in b.items()},
        layer,
    )

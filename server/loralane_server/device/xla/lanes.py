"""The adapter pool's memory on XLA, and the LoRA arithmetic of a traced step.

The pool is cut into *segments* at the window sizes that graphs are compiled for, so a graph reads
the segments of its window whole: a slice of a larger tensor would be copied in every step. By
segment and layer:

    a   by group    [in, linears * lanes]   each linear's lanes side by side: one shrink
    b   by linear   [lanes, out]

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

#: For each segment of the window: whether the token owns the lane, [tokens, lanes] bool.
Masks = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class LayerCells:
    """One layer's part of a segment."""

    #: By group, [in, linears * lanes].
    a: Mapping[str, Cell]
    #: By linear, [lanes, out].
    b: Mapping[str, Cell]

    @property
    def cells(self) -> list[Cell]:
        """All of them, A before B."""
        return [*self.a.values(), *self.b.values()]


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
    ) -> None:
        """`shapes`: (out, in) by linear; `windows`: lanes, ascending, the last holds the pool."""
        ends = sorted({window // LANE_PAGE for window in windows} | {0})
        self.shapes = shapes
        self._mesh = mesh
        self.segments = tuple(
            Segment(
                begin,
                end,
                [
                    _layer(shapes, (end - begin) * LANE_PAGE, dtype, device, mesh)
                    for _ in range(layers)
                ],
            )
            for begin, end in pairwise(ends)
        )

    def cells(self, window: int) -> list[Cell]:
        """Return the cells that a graph of this window reads."""
        return [
            cell
            for segment in self.segments
            if segment.end * LANE_PAGE <= window
            for layer in segment.layers
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


def _layer(
    shapes: Mapping[str, tuple[int, int]],
    lanes: int,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
) -> LayerCells:
    def cell(cut: int | None, *shape: int) -> Cell:
        return Cell(mesh.place(torch.zeros(shape, dtype=dtype).to(device), cut))

    a, b = {}, {}
    for group, modules in GROUPS.items():
        by_inputs = group in CUT_BY_INPUTS
        inside = shapes[modules[0]][1]
        a[group] = cell(0 if by_inputs else None, inside, len(modules) * lanes)
        for module in modules:
            b[module] = cell(None if by_inputs else 1, lanes, shapes[module][0])
    return LayerCells(a, b)

"""The adapter pool's memory on a CPU, and how a step reads it.

    a   per layer and group   [lanes, linears of the group, in]   linears side by side: one shrink
    b   per layer and linear  [lanes, out]

Decode rows share one masked product over the lanes of the adapters present; each prefill chunk, all
of whose tokens have one adapter, takes that adapter's lanes alone. Lanes that nobody present owns
are neither read nor multiplied: see `plan_lanes`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loralane_server.adapters.lanes import add_lanes
from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.memory import lazy_zeros
from loralane_server.device.seam import GROUPS, Span, TargetTensors

#: Small products are computed in float32, the lanes cast on the way: in bfloat16 each has a fixed
#: cost that is more than that of the whole, and rounds once more (bench/README.md). Small is fewer
#: tokens of one adapter than this,
FEW_TOKENS = 16
#: or so many tokens x lanes of several adapters.
FEW_PRODUCTS = 128


@dataclass(frozen=True, slots=True)
class LaneBlock:
    """Tokens [begin, end) of a step and the lanes that they may use."""

    begin: int
    end: int
    #: A range where the lanes lie side by side (a view, no copy), else their ids [lanes].
    lanes: slice | Tensor
    #: [tokens of the block, lanes]; None when every token owns every lane.
    mine: Tensor | None


def plan_lanes(spans: Sequence[Span]) -> tuple[LaneBlock, ...]:
    """Group a step's tokens into blocks that share one product.

    Spans come single tokens first, adapters before base, so decode rows form one block.
    """
    blocks: list[LaneBlock] = []
    singles = [s for s in spans if s.length == 1 and s.lane_pages]
    if singles:
        blocks.append(_masked_block(singles))
    begin = 0
    for span in spans:
        end = begin + span.length
        if span.length > 1 and span.lane_pages:
            blocks.append(LaneBlock(begin, end, _lanes_of(span.lane_pages), None))
        begin = end
    return tuple(blocks)


def _masked_block(singles: Sequence[Span]) -> LaneBlock:
    """Return the block of single-token spans, which lie at the step's beginning."""
    pages = sorted({page for span in singles for page in span.lane_pages})
    low, high = pages[0], pages[-1] + 1
    owned_pages = len(pages)
    # A view over a few idle lanes beats copying the busy ones together.
    if high - low <= max(2 * owned_pages, 4):
        pages = list(range(low, high))
    column = {page: i for i, page in enumerate(pages)}
    mine = np.zeros((len(singles), len(pages)), dtype=np.float32)
    for row, span in enumerate(singles):
        mine[row, [column[page] for page in span.lane_pages]] = 1.0
    whole = bool(mine.all())
    spread = torch.from_numpy(mine.repeat(LANE_PAGE, axis=1))
    return LaneBlock(0, len(singles), _lanes_of(pages), None if whole else spread)


def _lanes_of(pages: Sequence[int]) -> slice | Tensor:
    low, high = min(pages), max(pages) + 1
    if high - low == len(pages):
        return slice(low * LANE_PAGE, high * LANE_PAGE)
    first = torch.tensor(pages, dtype=torch.int64) * LANE_PAGE
    return (first[:, None] + torch.arange(LANE_PAGE)).flatten()


class CpuLanes:
    """Owns the pool's tensors: allocated once, written in place, never resized."""

    def __init__(
        self, layers: int, shapes: Mapping[str, tuple[int, int]], lanes: int, dtype: torch.dtype
    ) -> None:
        self._a = [
            {
                group: lazy_zeros((lanes, len(modules), shapes[modules[0]][1]), dtype)
                for group, modules in GROUPS.items()
            }
            for _ in range(layers)
        ]
        self._b = [
            {module: lazy_zeros((lanes, out), dtype) for module, (out, _) in shapes.items()}
            for _ in range(layers)
        ]
        self._columns = {group: _columns(modules, shapes) for group, modules in GROUPS.items()}

    def write(
        self,
        layer: int,
        lane_pages: Sequence[int],
        targets: Mapping[str, TargetTensors],
    ) -> None:
        """Fill the lane pages of one layer for every target; see `Device.write_lanes`."""
        lanes = _lanes_of(lane_pages)
        for group, modules in GROUPS.items():
            for place, module in enumerate(modules):
                target = targets.get(module)
                a, b = (None, None) if target is None else (target.a, target.b)
                _fill(self._a[layer][group][:, place], lanes, a)
                _fill(self._b[layer][module], lanes, b)

    def add(
        self, y: Tensor, x: Tensor, layer: int, group: str, blocks: Sequence[LaneBlock]
    ) -> None:
        """Add the deltas of all blocks to y; see `Device.add_lora`."""
        a, b = self._a[layer][group], self._b[layer]
        for block in blocks:
            tokens = slice(block.begin, block.end)
            shrink = a[block.lanes]
            dtype = torch.float32 if _is_small(block, shrink.shape[0]) else y.dtype
            parts = [
                (columns, b[module][block.lanes].to(dtype))
                for module, columns in self._columns[group]
            ]
            add_lanes(y[tokens], x[tokens], shrink.to(dtype), parts, block.mine)


def _is_small(block: LaneBlock, lanes: int) -> bool:
    tokens = block.end - block.begin
    return tokens < FEW_TOKENS if block.mine is None else tokens * lanes <= FEW_PRODUCTS


def _columns(
    modules: Sequence[str], shapes: Mapping[str, tuple[int, int]]
) -> tuple[tuple[str, slice], ...]:
    begin, columns = 0, []
    for module in modules:
        end = begin + shapes[module][0]
        columns.append((module, slice(begin, end)))
        begin = end
    return tuple(columns)


def _fill(pool: Tensor, lanes: slice | Tensor, rows: Tensor | None) -> None:
    """Write rows to the first of `lanes` and zero the rest, so that nothing old is left."""
    if rows is None:
        pool[lanes] = 0
    elif isinstance(lanes, slice):
        end = lanes.start + rows.shape[0]
        pool[lanes.start : end] = rows
        pool[end : lanes.stop] = 0
    else:
        pool[lanes[: rows.shape[0]]] = rows
        pool[lanes[rows.shape[0] :]] = 0

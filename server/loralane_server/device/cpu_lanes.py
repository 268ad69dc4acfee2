"""The adapter pool's memory on a CPU, and how a step reads it.

    a   per layer and group   [lanes, linears of the group, in]   linears side by side: one shrink
    b   per layer and linear  [lanes, out]

and per layer and group what is not in lanes: gain and shift (`CpuGains`).

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
from loralane_server.device.cpu_gains import CpuGains, Plan
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
    #: [tokens of the block, lanes] bool; None when every token owns every lane.
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
            blocks.append(LaneBlock(begin, end, lanes_of(span.lane_pages), None))
        begin = end
    return tuple(blocks)


def _masked_block(singles: Sequence[Span]) -> LaneBlock:
    """Return the block of single-token spans, which lie at the step's beginning."""
    lanes, mine = lanes_and_mask([span.lane_pages for span in singles])
    return LaneBlock(0, len(singles), lanes, mine)


def lanes_and_mask(owners: Sequence[tuple[int, ...]]) -> tuple[slice | Tensor, Tensor | None]:
    """Return the lanes that rows need among them, and which are whose: [rows, lanes] bool.

    owners: each row's lane pages. No mask: every row owns every lane returned.
    """
    pages = sorted({page for own in owners for page in own})
    low, high = pages[0], pages[-1] + 1
    # A view over a few idle lanes beats copying the busy ones together.
    if high - low <= max(2 * len(pages), 4):
        pages = list(range(low, high))
    column = {page: i for i, page in enumerate(pages)}
    mine = np.zeros((len(owners), len(pages)), dtype=np.bool_)
    for row, own in enumerate(owners):
        mine[row, [column[page] for page in own]] = True
    if mine.all():
        return lanes_of(pages), None
    return lanes_of(pages), torch.from_numpy(mine.repeat(LANE_PAGE, axis=1))


def lanes_of(pages: Sequence[int]) -> slice | Tensor:
    """Return what selects the lanes of these pages, in order: a slice where they adjoin."""
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
        # Written at once, not lazily: the first write to a page costs more than what is written,
        # and an adapter that is loaded for a request that waits should not pay for it.
        self._a = [
            {
                group: torch.zeros(lanes, len(modules), shapes[modules[0]][1], dtype=dtype)
                for group, modules in GROUPS.items()
            }
            for _ in range(layers)
        ]
        self._b = [
            {module: torch.zeros(lanes, out, dtype=dtype) for module, (out, _) in shapes.items()}
            for _ in range(layers)
        ]
        self._columns = {group: _columns(modules, shapes) for group, modules in GROUPS.items()}
        self._gains = [
            {
                group: CpuGains(lanes // LANE_PAGE, columns[-1][1].stop)
                for group, columns in self._columns.items()
            }
            for _ in range(layers)
        ]

    def write(
        self,
        layer: int,
        lane_pages: Sequence[int],
        targets: Mapping[str, TargetTensors],
    ) -> None:
        """Fill the lane pages of one layer for every target; see `Device.write_lanes`."""
        lanes = lanes_of(lane_pages)
        for group, modules in GROUPS.items():
            for place, module in enumerate(modules):
                target = targets.get(module)
                a, b = (None, None) if target is None else (target.a, target.b)
                fill_lanes(self._a[layer][group][:, place], lanes, a)
                fill_lanes(self._b[layer][module], lanes, b)
            parts = [(columns, targets.get(module)) for module, columns in self._columns[group]]
            self._gains[layer][group].write(lane_pages, parts)

    def add(
        self,
        y: Tensor,
        x: Tensor,
        layer: int,
        group: str,
        blocks: Sequence[LaneBlock],
        plan: Plan,
    ) -> None:
        """Apply gain and shift, and add the deltas of all blocks to y; see `Device.add_lora`."""
        gains = self._gains[layer][group]
        if gains.carriers:
            gains.apply(y, plan(gains.carriers))
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


def fill_lanes(pool: Tensor, lanes: slice | Tensor, rows: Tensor | None) -> None:
    """Write rows to the first of `lanes` and zero the rest, so that nothing old is left."""
    if rows is None:
        pool[lanes] = 0
    elif isinstance(lanes, slice):
        end = lanes.start + rows.shape[0]
        pool[lanes.start : end] = rows
        if end < lanes.stop:
            pool[end : lanes.stop] = 0
    else:
        pool[lanes[: rows.shape[0]]] = rows
        pool[lanes[rows.shape[0] :]] = 0

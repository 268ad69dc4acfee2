"""Gain and shift on a CPU: y becomes (1 + gain) y + shift for the rows of one adapter.

    factor, shift   [lane pages, out]   an adapter's first lane page carries its row

Few adapters have either (DoRA, biases). A page carries them for one tensor of outputs or it does
not; rows of pages that do not are never read, so they need not be cleared, and a pool without such
adapters never touches this memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loralane_server.device.cpu_rows import Owned, row_index, tokens_owned
from loralane_server.device.memory import lazy_zeros
from loralane_server.device.seam import Span, TargetTensors

#: From the pages that carry gain or shift to the blocks of a step that have one of them.
Plan = Callable[[frozenset[int]], "tuple[GainBlock, ...]"]


@dataclass(frozen=True, slots=True)
class GainBlock:
    """Rows of y, and whose gain and shift each of them has."""

    rows: slice | Tensor
    #: First lane pages: [rows], or [1] when all have the same.
    pages: Tensor


def plan_gains(owned: Sequence[Owned]) -> tuple[GainBlock, ...]:
    """Group rows into blocks: single ones together, each longer stretch (a prompt) alone.

    A stretch reads its adapter's row once instead of once a token.
    """
    singles = [item for item in owned if item.rows == 1]
    blocks = [
        GainBlock(slice(item.begin, item.end), torch.tensor([item.page]))
        for item in owned
        if item.rows > 1
    ]
    if singles:
        pages = torch.tensor([item.page for item in singles])
        blocks.append(GainBlock(row_index(singles), pages))
    return tuple(blocks)


def plan_token_gains(spans: Sequence[Span], pages: frozenset[int]) -> tuple[GainBlock, ...]:
    """Plan for all tokens of a step; `pages` are those that carry gain or shift."""
    return plan_gains(tokens_owned(spans, pages))


class CpuGains:
    """Owns gain and shift of one tensor of outputs: a group's, or a table's."""

    def __init__(self, pages: int, out: int) -> None:
        # float32: rounded to bfloat16, 1 + gain would lose most of a gain of 0.01.
        self._factor = lazy_zeros((pages, out), torch.float32)
        self._shift = lazy_zeros((pages, out), torch.float32)
        #: First lane pages of the adapters that have gain or shift here.
        self.carriers: frozenset[int] = frozenset()

    def write(
        self, lane_pages: Sequence[int], parts: Sequence[tuple[slice, TargetTensors | None]]
    ) -> None:
        """Take what an adapter does here, by columns of the output; its pages held others before.

        parts: the columns of each linear, together all columns.
        """
        self.forget(frozenset(lane_pages))
        targets = [target for _, target in parts if target is not None]
        if all(target.gain is None and target.shift is None for target in targets):
            return
        page = lane_pages[0]
        self._factor[page], self._shift[page] = 1, 0
        for columns, target in parts:
            if target is not None and target.gain is not None:
                self._factor[page, columns] += target.gain
            if target is not None and target.shift is not None:
                self._shift[page, columns] = target.shift
        self.carriers |= {page}

    def forget(self, pages: frozenset[int]) -> None:
        """Drop what the owner of these pages does here."""
        if not pages.isdisjoint(self.carriers):
            self.carriers -= pages

    def apply(self, y: Tensor, blocks: Sequence[GainBlock]) -> None:
        """Change y [rows, out] in place, computed in float32 and rounded once.

        y is the base's product alone: LoRA is added after this. No row outside the blocks changes.
        """
        for block in blocks:
            factor, shift = self._factor[block.pages], self._shift[block.pages]
            if isinstance(block.rows, slice):
                own = y[block.rows]
                torch.addcmul(shift, own, factor, out=own)
            else:
                y[block.rows] = torch.addcmul(shift, y[block.rows], factor).to(y.dtype)

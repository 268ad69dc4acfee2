"""Which rows of a tensor belong to which adapter: pure functions of a step's spans.

An adapter is known here by its first lane page, which nobody shares with it.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from loralane_server.device.seam import Int32, Span


@dataclass(frozen=True, slots=True)
class Owned:
    """Rows [begin, end) of a tensor, all of one adapter."""

    begin: int
    end: int
    #: Not empty.
    lane_pages: tuple[int, ...]

    @property
    def page(self) -> int:
        """The first lane page: it stands for the adapter."""
        return self.lane_pages[0]

    @property
    def rows(self) -> int:
        """How many."""
        return self.end - self.begin


def tokens_owned(spans: Sequence[Span], pages: AbstractSet[int]) -> list[Owned]:
    """Return the tokens of a step whose adapter is one of `pages`, in order."""
    owned, begin = [], 0
    for span in spans:
        end = begin + span.length
        if span.lane_pages and span.lane_pages[0] in pages:
            owned.append(Owned(begin, end, span.lane_pages))
        begin = end
    return owned


def samples_owned(spans: Sequence[Span], sample_at: Int32, pages: AbstractSet[int]) -> list[Owned]:
    """Return the samples of a step (rows of its logits) whose adapter is one of `pages`."""
    ends = np.cumsum([span.length for span in spans])
    owners = np.searchsorted(ends, sample_at, side="right").tolist()
    return [
        Owned(sample, sample + 1, spans[owner].lane_pages)
        for sample, owner in enumerate(owners)
        if spans[owner].lane_pages and spans[owner].lane_pages[0] in pages
    ]


def by_adapter(owned: Iterable[Owned]) -> dict[int, list[Owned]]:
    """Group by first lane page."""
    groups: dict[int, list[Owned]] = {}
    for item in owned:
        groups.setdefault(item.page, []).append(item)
    return groups


def row_ids(owned: Sequence[Owned]) -> Tensor:
    """Return the rows' ids, [rows] int64, in the order given."""
    return torch.cat([torch.arange(item.begin, item.end) for item in owned])


def row_index(owned: Sequence[Owned]) -> slice | Tensor:
    """Return what selects the rows, in the order given: a slice (a view) where they adjoin."""
    if all(left.end == right.begin for left, right in pairwise(owned)):
        return slice(owned[0].begin, owned[-1].end)
    return row_ids(owned)

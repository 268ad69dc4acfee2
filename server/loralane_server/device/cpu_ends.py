"""What adapters do to the embedding and the head, on a CPU.

    a   [lanes, in]    embedding: in is the vocabulary;  head: hidden
    b   [lanes, out]   embedding: out is hidden;         head: the vocabulary

Few adapters change these tables. One that does is remembered by its first lane page; the lanes of
others are masked out, so they are written only for those that do, and a pool without any touches
none of this memory. Rows that replace a table's are kept as they came, not copied, until the
adapter's pages are written again or it is forgotten.

Where an adapter both has LoRA on a table and replaces rows of it, the replaced rows are final: they
are the trained rows themselves; LoRA's delta goes to the others. (PEFT makes no such adapter.)
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.cpu_gains import CpuGains, plan_gains
from loralane_server.device.cpu_lanes import fill_lanes, lanes_and_mask, lanes_of
from loralane_server.device.cpu_rows import (
    Owned,
    by_adapter,
    row_ids,
    row_index,
    samples_owned,
    tokens_owned,
)
from loralane_server.device.memory import lazy_zeros
from loralane_server.device.seam import Int32, Span, TableRows, TargetTensors


class ReplacedRows:
    """One adapter's rows of a table [vocab, hidden], and how to find them."""

    def __init__(self, table: TableRows) -> None:
        self._ids, self._rows = table.ids, table.rows
        if table.ids is not None:
            #: The ids ascending, and where each one's row lies.
            self._sorted, self._order = table.ids.sort()

    def embed(self, x: Tensor, tokens: Tensor) -> None:
        """Put the replaced rows into x [n, hidden], in place, where tokens [n] have one."""
        if self._ids is None:
            x.copy_(self._rows[tokens])
            return
        at = torch.searchsorted(self._sorted, tokens).clamp_(max=self._sorted.numel() - 1)
        hit = self._sorted[at] == tokens
        x[hit] = self._rows[self._order[at[hit]]]

    def score(self, logits: Tensor, x: Tensor, samples: Tensor) -> None:
        """Recompute what the replaced rows score: logits [all, vocab] at `samples`, in place."""
        scores = F.linear(x[samples], self._rows)
        if self._ids is None:
            logits[samples] = scores
        else:
            logits[samples[:, None], self._ids] = scores


class CpuEnd:
    """Owns what adapters do to one table: its lanes, gains and replaced rows."""

    def __init__(self, inside: int, out: int, lanes: int, dtype: torch.dtype) -> None:
        self.a = lazy_zeros((lanes, inside), dtype)
        self.b = lazy_zeros((lanes, out), dtype)
        self.gains = CpuGains(lanes // LANE_PAGE, out)
        #: By first lane page.
        self.replaced: dict[int, ReplacedRows] = {}
        #: First lane pages of the adapters that have LoRA here.
        self.adapted: frozenset[int] = frozenset()
        #: First lane pages of the adapters that do anything here.
        self.carriers: frozenset[int] = frozenset()

    def write(
        self, lane_pages: Sequence[int], target: TargetTensors | None, rows: TableRows | None
    ) -> None:
        """Take what the new owner of the pages does to the table; forget what an old one did."""
        self.forget(lane_pages)
        page = lane_pages[0]
        self.gains.write(lane_pages, [(slice(None), target)])
        if target is not None and target.a.shape[0]:
            fill_lanes(self.a, lanes_of(lane_pages), target.a)
            fill_lanes(self.b, lanes_of(lane_pages), target.b)
            self.adapted |= {page}
        if rows is not None:
            self.replaced[page] = ReplacedRows(rows)
        self.carriers = self.adapted | self.gains.carriers | self.replaced.keys()

    def forget(self, lane_pages: Sequence[int]) -> None:
        """Drop what the owner of these pages does to the table."""
        pages = frozenset(lane_pages)
        if pages.isdisjoint(self.carriers):
            return
        self.gains.forget(pages)
        self.adapted -= pages
        self.carriers -= pages
        for page in pages & self.replaced.keys():
            del self.replaced[page]


class CpuEnds:
    """The embedding and the head: applies what the adapters of a step do to them."""

    def __init__(self, vocab: int, hidden: int, lanes: int, dtype: torch.dtype) -> None:
        self.embedding = CpuEnd(vocab, hidden, lanes, dtype)
        self.head = CpuEnd(hidden, vocab, lanes, dtype)

    def write(
        self,
        lane_pages: Sequence[int],
        targets: Mapping[str, TargetTensors],
        tables: Mapping[str, TableRows],
    ) -> None:
        """Take what an adapter does to either; see `Device.write_lanes`."""
        for module, end in (("embed_tokens", self.embedding), ("lm_head", self.head)):
            end.write(lane_pages, targets.get(module), tables.get(module))

    def forget(self, lane_pages: Sequence[int]) -> None:
        """See `Device.forget`."""
        self.embedding.forget(lane_pages)
        self.head.forget(lane_pages)

    def adapt_embedding(self, x: Tensor, tokens: Tensor, spans: Sequence[Span]) -> None:
        """Change x [tokens, hidden] in place; see `Device.adapt_embedding`."""
        end = self.embedding
        owned = tokens_owned(spans, end.carriers)
        end.gains.apply(x, plan_gains(_of(owned, end.gains.carriers)))
        adapted = _of(owned, end.adapted)
        if adapted:
            rows = row_index(adapted)
            lanes, mine = _lanes_of_rows(adapted)
            _add(x, rows, _columns(end.a, lanes, tokens[rows]).T, mine, end.b[lanes])
        for item in owned:
            if item.page in end.replaced:
                part = slice(item.begin, item.end)
                end.replaced[item.page].embed(x[part], tokens[part])

    def adapt_logits(
        self, logits: Tensor, x: Tensor, spans: Sequence[Span], sample_at: Int32
    ) -> None:
        """Change logits [samples, vocab] in place; see `Device.adapt_logits`."""
        end = self.head
        owned = samples_owned(spans, sample_at, end.carriers)
        end.gains.apply(logits, plan_gains(_of(owned, end.gains.carriers)))
        adapted = _of(owned, end.adapted)
        if adapted:
            rows = row_index(adapted)
            lanes, mine = _lanes_of_rows(adapted)
            shrunk = F.linear(x[rows].float(), end.a[lanes].float())
            _add(logits, rows, shrunk, mine, end.b[lanes])
        for page, items in by_adapter(owned).items():
            if page in end.replaced:
                end.replaced[page].score(logits, x, row_ids(items))


def _of(owned: Sequence[Owned], pages: frozenset[int]) -> list[Owned]:
    return [item for item in owned if item.page in pages]


def _lanes_of_rows(owned: Sequence[Owned]) -> tuple[slice | Tensor, Tensor | None]:
    """Return the lanes that the rows need and which are whose: [rows, lanes]."""
    lanes, mine = lanes_and_mask([item.lane_pages for item in owned])
    if mine is None:
        return lanes, None
    lengths = torch.tensor([item.rows for item in owned])
    return lanes, mine.repeat_interleave(lengths, dim=0)


def _columns(a: Tensor, lanes: slice | Tensor, tokens: Tensor) -> Tensor:
    """Return the tokens' columns of some lanes, [lanes, tokens], without copying whole lanes."""
    if isinstance(lanes, slice):
        return a[lanes][:, tokens]
    return a[lanes[:, None], tokens]


def _add(y: Tensor, rows: slice | Tensor, shrunk: Tensor, mine: Tensor | None, b: Tensor) -> None:
    """Add shrunk [rows, lanes] b to some rows of y, in float32 and rounded once."""
    h = shrunk.float()
    delta = (h if mine is None else torch.where(mine, h, 0.0)) @ b.float()
    y[rows] = (y[rows] + delta).to(y.dtype)

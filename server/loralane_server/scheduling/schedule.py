"""The rows of a shard in order of arrival: who computes next, on which KV pages.

What is decided here is decided by pure functions (see preemption.py); this carries it out.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from loralane_server.kv.row_pages import RowPages, claim_of, lacking
from loralane_server.rows import Row
from loralane_server.scheduling.preemption import beginners, plan_rows
from loralane_server.steps import Part

log = logging.getLogger(__name__)


class Turn(NamedTuple):
    """What the next step computes."""

    parts: list[Part]
    #: Whether a row waits for room to begin: nobody younger may.
    held: bool


class Schedule:
    """Owns the rows and their pages. Touched only by the engine's thread.

    step_tokens, doubling: as `Limits`.
    drop_wave: ends the wave of a digest where it is, and returns the rows that were in it.
    """

    def __init__(
        self,
        pages: RowPages,
        step_tokens: int,
        drop_wave: Callable[[str], list[Row]],
        doubling: int | None = None,
    ) -> None:
        self._pages = pages
        self._step_tokens = step_tokens
        self._doubling = doubling
        self._drop_wave = drop_wave
        #: In order of arrival.
        self._rows: list[Row] = []
        #: How often a row gave its pages back for an older one.
        self.preemptions = 0

    @property
    def rows(self) -> Sequence[Row]:
        """All rows."""
        return self._rows

    @property
    def pages(self) -> RowPages:
        """The books of their pages."""
        return self._pages

    @property
    def pages_free(self) -> int:
        """Pages that no row owns and that the rows' tokens so far do not need."""
        return max(0, self._pages.free - sum(map(lacking, self._rows)))

    @property
    def pending_tokens(self) -> int:
        """Tokens still to be computed before every row can be sampled."""
        return sum(row.pending for row in self._rows)

    def add(self, row: Row) -> None:
        """Let a row in, behind all others. It begins when there is room for it."""
        self._pages.find(row)
        self._rows.append(row)

    def remove(self, row: Row) -> None:
        """Take a row out and its pages back."""
        self._rows.remove(row)
        row.ended = True
        self._free(row)

    def next_turn(self, *, may_stop: bool = True) -> Turn:
        """Return what the next step computes; who has to be stopped for it, is.

        may_stop: whether rows may be; if one would have to be and may not, nothing is computed.
        """
        while True:
            claims = [claim_of(row) for row in self._rows]
            plan = plan_rows(claims, self._step_tokens, self._pages.free, self._doubling)
            parts = [(row, n) for row, n in zip(self._rows, plan.counts, strict=True) if n]
            if plan.stop is not None and not may_stop:
                return Turn([], plan.held)
            if plan.stop is not None:
                self._stop(self._rows[plan.stop])
            elif not self._find_more(row for row, _ in parts):
                return Turn(parts, plan.held)

    def beginners(self, rows: Sequence[Row]) -> list[Row]:
        """Return which of the rows, of which no step computes any yet, have room to begin."""
        claims = [claim_of(row) for row in self._rows]
        asking = [i for i, row in enumerate(self._rows) if row in rows]
        found = [self._rows[i] for i in beginners(claims, asking, self._pages.free)]
        self._find_more(found)
        return found

    def cover(self, parts: Iterable[Part]) -> None:
        """Give rows the pages for what they compute next, as it was planned."""
        for row, n in parts:
            self._pages.cover(row, n)

    def advance(self, parts: Iterable[Part]) -> None:
        """Note that a step which computes these parts is done, or under way."""
        for row, n in parts:
            row.computed += n
            self._pages.keep(row)

    def extend(self, row: Row) -> None:
        """Note that a row knows one more of its tokens."""
        self._pages.keep(row)

    def check(self) -> None:
        """Assert that every page belongs to the rows that say so."""
        self._pages.check(self._rows)
        assert all(row.pending > 0 for row in self._rows)
        assert self._rows == sorted(self._rows, key=lambda row: row.arrived)

    def _find_more(self, rows: Iterable[Row]) -> bool:
        """Look once more, as they begin, for what others have computed since rows were let in.

        Returns whether anything was found.
        """
        found = [self._pages.find(row) for row in rows if not row.begun]
        return any(found)

    def _stop(self, row: Row) -> None:
        """Take a row's pages for an older one; it keeps its tokens, its adapter and its place."""
        log.debug("request %d is stopped: no free KV pages", row.admission.request_id)
        self.preemptions += 1
        self._free(row)

    def _free(self, row: Row) -> None:
        """Take a row's pages; those of a wave, which would write to them, end with it."""
        if row.in_wave:
            for other in self._drop_wave(row.admission.digest):
                self._pages.release(other)
        self._pages.release(row)

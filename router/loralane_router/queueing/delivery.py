"""From the shard's steps to the requests: tokens, ends, refusals, lost adapters."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.errors import RequestError
from loralane_router.fleet.shards import unavailable
from loralane_router.metrics.counters import Metrics
from loralane_router.queueing.entry import Entry
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.ledger import Ledger
from loralane_router.queueing.roster import Roster
from loralane_router.text.generation import Generation

_log = logging.getLogger(__name__)

#: Seconds before a request that the shard refused is sent again: doubled each time, up to the last.
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0


class Delivery:
    """Hands out what the shard made. Keeps nothing: who is here is the roster's."""

    def __init__(
        self, roster: Roster, shares: FairShares, metrics: Metrics, wake: Callable[[], None]
    ) -> None:
        self._roster = roster
        self._shares = shares
        self._metrics = metrics
        self._wake = wake

    def apply(self, step: pb.StepReply, ledger: Ledger, now: float) -> None:
        """Take over one step; `ledger`: that of the connection which it came by."""
        ledger.observe(step.capacity, step.admitted)
        for row in step.rows:
            entry = self._roster.find(row.request_id)
            if entry is None:
                continue
            if entry.falls_back:
                self._end_before_base(entry, row, ledger)
                continue
            if row.tokens and entry.wait is not None:
                self._roster.waits.drop(row.request_id)
                entry.wait = None
            if row.tokens:
                self._shares.charge(entry.ask.flow, generated=len(row.tokens))
            entry.measure(row, self._metrics, now)
            if row.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
                self._go_on(entry, row)
            else:
                ledger.release(entry.ask)
                self._end(entry, row, now)

    def _end_before_base(self, entry: Entry, row: pb.Row, ledger: Ledger) -> None:
        """Ask the base once the adapter's row has ended; what that still made came too late."""
        if row.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            return
        ledger.release(entry.ask)
        if entry.generation.finished:
            self._roster.end(row.request_id)
        else:
            entry.fall_back()
            self._roster.enqueue(entry)

    def _go_on(self, entry: Entry, row: pb.Row) -> None:
        had_finished = entry.generation.finished
        _feed(entry.generation, row)
        if entry.generation.finished and not had_finished:
            self._roster.stop(row.request_id)

    def _end(self, entry: Entry, row: pb.Row, now: float) -> None:
        if entry.was_refused(row):
            self._put_back(entry, now)
            return
        if entry.lost_its_adapter(row):
            self._roster.search(entry)
            return
        self._roster.end(row.request_id)
        _feed(entry.generation, row)
        if row.finish_reason == pb.FINISH_REASON_ERROR:
            entry.generation.fail(RequestError.from_proto(row.error))
        elif row.finish_reason == pb.FINISH_REASON_CANCELLED:
            entry.generation.fail(unavailable("the shard gave up this request"))

    def _put_back(self, entry: Entry, now: float) -> None:
        pause = min(_FIRST_PAUSE_S * 2**entry.refusals, _LONGEST_PAUSE_S)
        entry.refusals += 1
        self._roster.put_back(entry, now + pause)
        asyncio.get_running_loop().call_later(pause, self._wake)


def _feed(generation: Generation, row: pb.Row) -> None:
    try:
        generation.accept(row)
    except Exception:  # one request's text must not end the loop that serves all
        _log.exception("request %d: its tokens cannot be decoded", row.request_id)
        generation.fail(RequestError(pb.ERROR_KIND_INTERNAL, "the tokens cannot be decoded"))

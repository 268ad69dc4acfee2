"""Requests whose shard went away, until another one has them.

A request goes on where it was cut: its tokens so far become part of its prompt
(`Entry.leave_shard`) and its reader sees one unbroken stream. Every request that is handed over
here comes to another shard, ends with one error, or is cancelled by its reader.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import AdapterFacts
from loralane_router.errors import RequestError
from loralane_router.fleet.link import Link
from loralane_router.fleet.shards import unavailable
from loralane_router.metrics.counters import Metrics
from loralane_router.queueing.deadlines import AdapterWait
from loralane_router.queueing.entry import Entry
from loralane_router.requests import Merge

_log = logging.getLogger(__name__)


class Placed(Protocol):
    """A shard that was chosen, and what the adapter is there."""

    @property
    def link(self) -> Link:
        """The shard."""
        ...

    @property
    def adapter(self) -> AdapterFacts:
        """The adapter as that shard described it."""
        ...

    @property
    def is_fallback(self) -> bool:
        """Whether it is the base in an adapter's place."""
        ...


class Shards(Protocol):
    """What is needed of a fleet."""

    @property
    def ready_links(self) -> Sequence[Link]:
        """The shards that answer."""
        ...

    async def place_in_time(
        self,
        asked: str | Merge,
        token: str | None,
        wait: AdapterWait | None,
        avoid: frozenset[str],
        tokens: int,
    ) -> Placed:
        """Choose a shard whose address is not in `avoid`, and resolve the adapter there in time.

        `tokens`: of the prompt.
        """
        ...


class Replays:
    """The requests between two shards. Owned by the fleet, on the router's event loop."""

    def __init__(self, shards: Shards, metrics: Metrics) -> None:
        self._shards = shards
        self._metrics = metrics
        #: By request id; a request is here from when its shard gave it back until another has it.
        self._moving: dict[int, tuple[Entry, asyncio.Task[None]]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._moving)

    def take_over(self, entries: Sequence[Entry], lost: RequestError) -> None:
        """Give each of these requests to another shard, in this order.

        `lost`: why the connection to theirs ended. Without another they fail (503): whatever broke
        the connection, nothing is wrong with them.
        """
        if entries and not self._closed:
            _log.warning("%d requests lose their shard: %s", len(entries), lost.message)
        for entry in entries:
            if self._closed or not self._shards.ready_links:
                self._end(entry, "no_shard", _no_other(lost.message))
                continue
            entry.generation.belongs_to(self._cancel)
            moving = asyncio.create_task(self._move(entry), name="replay")
            self._moving[entry.ask.request_id] = entry, moving

    def close(self) -> None:
        """End all requests that are here or come from now on. Idempotent."""
        self._closed = True
        for entry, task in self._moving.values():
            task.cancel()
            self._end(entry, "no_shard", _no_other("the router was closed"))
        self._moving.clear()

    def check(self) -> None:
        """Assert that whoever is here is still waited for."""
        assert all(not entry.generation.finished for entry, _ in self._moving.values())

    async def _move(self, entry: Entry) -> None:
        try:
            link = await self._readdressed(entry)
        except RequestError as error:
            outcome = "refused" if self._shards.ready_links else "no_shard"
            self._end(entry, outcome, error)
        except Exception:  # it may not stay here for ever, whatever it was
            _log.exception("request %d cannot be moved", entry.ask.request_id)
            failed = RequestError(pb.ERROR_KIND_INTERNAL, "moving to another shard failed")
            self._end(entry, "refused", failed)
        else:
            self._metrics.replays.labels("moved").inc()
            link.resume(entry)
        self._moving.pop(entry.ask.request_id, None)

    async def _readdressed(self, entry: Entry) -> Link:
        """Return the shard that a request is made to fit. Raises RequestError if none takes it."""
        avoid = frozenset[str]()
        while True:
            # What was answered by the base once is the base's for good, whatever was asked for.
            asked = entry.asked if entry.ask.digest else ""
            tokens = len(entry.admission.prompt)
            placed = await self._shards.place_in_time(asked, entry.token, entry.wait, avoid, tokens)
            link, adapter = placed.link, placed.adapter
            if placed.is_fallback:
                entry.fall_back()
            try:
                entry.readdress(adapter, link.dispatcher.needed_pages(*entry.tokens, adapter))
                return link
            except RequestError:
                avoid |= {link.address}
                if not any(link.address not in avoid for link in self._shards.ready_links):
                    raise

    def _cancel(self, request_id: int) -> None:
        _, task = self._moving.pop(request_id)
        task.cancel()
        self._metrics.replays.labels("cancelled").inc()

    def _end(self, entry: Entry, outcome: str, error: RequestError) -> None:
        self._metrics.replays.labels(outcome).inc()
        entry.generation.fail(error)


def _no_other(why: str) -> RequestError:
    return unavailable(f"the shard went away ({why}) and no other is ready")

"""Every request that one shard has and that has not ended: it waits, searches its adapter, or runs.

Wherever a request goes, it goes through here, so that it is in one place and ends once.
"""

from collections.abc import Callable, Iterator

from loralane_router.errors import RequestError
from loralane_router.metrics.snapshots import Work
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.crowd import Crowd
from loralane_router.queueing.deadlines import AdapterWaits
from loralane_router.queueing.entry import Entry
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.queues import Queues
from loralane_router.queueing.searches import NeededPages, Searches


class Roster:
    """Owned by the dispatcher, on its event loop."""

    def __init__(
        self,
        shares: FairShares,
        crowd: Crowd,
        needed_pages: NeededPages,
        wake: Callable[[], None],
    ) -> None:
        """`wake` makes the loop look again."""
        self._crowd = crowd
        #: Those who wait. Who is admitted is taken out of them, and runs from then on.
        self.queues = Queues(shares)
        #: Those who wait for their adapters no longer than they said, waiting or running.
        self.waits = AdapterWaits()
        self._entries: dict[int, Entry] = {}
        self._searches = Searches(needed_pages, self._found)
        #: Running requests of which the shard must be told that they are given up.
        self._cancels: list[int] = []
        self._wake = wake
        #: Whether somebody has begun to wait since that was last looked at for prefetching.
        self.changed = False

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, request_id: int) -> Entry | None:
        """Return a request; None if it has ended."""
        return self._entries.get(request_id)

    def add(self, entry: Entry) -> None:
        """Take a request, which waits from here on."""
        entry.generation.belongs_to(self.cancel)
        self._entries[entry.ask.request_id] = entry
        self.enqueue(entry)

    def enqueue(self, entry: Entry) -> None:
        """Put a request in its adapter's queue, and watch how long it waits for that adapter."""
        request_id = entry.ask.request_id
        self.waits.drop(request_id)
        if entry.wait is not None:
            self.waits.add(request_id, entry.ask.digest, entry.wait)
        self.queues.append(entry.ask, paid=entry.is_paid)
        if not entry.is_paid:
            self._crowd.enter(entry.ask, self.refuse)
        self.changed = True
        self._wake()

    def begin(self, ask: Ask) -> Entry:
        """Return a request that was admitted; from here on it runs."""
        entry = self._entries[ask.request_id]
        self._crowd.leave(ask)
        entry.is_paid = True
        return entry

    def put_back(self, entry: Entry, until: float) -> None:
        """Let a request that the shard refused wait again, and its adapter's queue until then."""
        self.queues.put_back(entry.ask, until)

    def search(self, entry: Entry) -> None:
        """Resolve the adapter of a request once more; it waits again when that is there."""
        self._searches.begin(entry)

    def withdraw(self, request_id: int) -> bool:
        """Take a request out from where it waits; return whether it did, instead of running."""
        if request_id in self.queues:
            self.queues.remove(request_id)
            self._crowd.leave(self._entries[request_id].ask)
            return True
        return self._searches.give_up(request_id)

    def stop(self, request_id: int) -> None:
        """Give up the row of a running request: the shard is told next, and says when it ended."""
        self._cancels.append(request_id)

    def cancel(self, request_id: int) -> None:
        """Give up a request: at once if it waits, by telling the shard if it runs."""
        if self.withdraw(request_id):
            del self._entries[request_id]
        elif request_id in self._entries:
            self.stop(request_id)
        self.waits.drop(request_id)
        self._wake()

    def refuse(self, request_id: int, error: RequestError) -> None:
        """End a request that waits with an error, which makes place for another."""
        self._entries[request_id].generation.fail(error)
        self.cancel(request_id)

    def end(self, request_id: int) -> None:
        """Forget a request that neither waits nor runs any more."""
        del self._entries[request_id]
        self.waits.drop(request_id)

    def drop(self, digest: str) -> list[Entry]:
        """Take out and return all who wait for an adapter."""
        dropped = [self._entries[request_id] for request_id in self.queues.drop(digest)]
        for entry in dropped:
            self._crowd.leave(entry.ask)
            self.end(entry.ask.request_id)
        return dropped

    @property
    def cancels(self) -> bool:
        """Whether `take_cancels` may return any."""
        return bool(self._cancels)

    def take_cancels(self) -> list[int]:
        """Return whose rows are given up, of those that have not ended, once."""
        running = [request_id for request_id in self._cancels if request_id in self._entries]
        self._cancels.clear()
        return running

    def wants(self, digest: str) -> bool:
        """Whether a request that does not run refers to this adapter."""
        return self._searches.look_for(digest) or self.queues.waits_for(digest)

    def work(self) -> Work:
        """Return how many requests run and wait, and for which adapters."""
        running, waiting = set[str](), set[str]()
        for request_id, entry in self._entries.items():
            (waiting if request_id in self.queues else running).add(entry.generation.adapter)
        count = len(self.queues)
        names = frozenset(running - {""}), frozenset(waiting - {""})
        return Work(len(self._entries) - count, count, *names)

    def clear(self) -> list[tuple[Entry, bool]]:
        """Forget everybody; return all, each with whether it ran."""
        left = [
            (entry, not self._is_idle(request_id)) for request_id, entry in self._entries.items()
        ]
        for request_id, entry in self._entries.items():
            self._searches.give_up(request_id)
            self._crowd.leave(entry.ask)
        self.queues.clear()
        self.waits.clear()
        self._cancels.clear()
        self._entries.clear()
        return left

    def check(self) -> None:
        """Assert that nobody is in two places, and that only those who are here are anywhere."""
        waiting = sum(request_id in self.queues for request_id in self._entries)
        searching = sum(request_id in self._searches for request_id in self._entries)
        assert (waiting, searching) == (len(self.queues), len(self._searches))
        assert not any(id in self.queues and id in self._searches for id in self._entries)
        for request_id, entry in self._entries.items():
            is_new = request_id in self.queues and not entry.is_paid
            assert (entry.ask in self._crowd) == is_new
        assert self.waits.request_ids <= self._entries.keys()
        self.waits.check()
        self.queues.check()

    def _is_idle(self, request_id: int) -> bool:
        return request_id in self.queues or request_id in self._searches

    def _found(self, entry: Entry) -> None:
        """Let a request whose adapter was resolved again wait, unless that was its end."""
        if entry.generation.finished:
            self.end(entry.ask.request_id)
        else:
            self.enqueue(entry)

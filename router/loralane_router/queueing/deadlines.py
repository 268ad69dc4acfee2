"""How long a request waits for its adapter: pure, and the book of those that still wait.

A request may say how long it waits at most. What counts is the time from its arrival until its
adapter is ready: resolved, downloaded, given lanes and loaded. A wait for rows or pages beside a
resident adapter is no wait for the adapter, and nobody gives up after the first token.
"""

from collections.abc import Callable, KeysView
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.errors import RequestError
from loralane_router.requests import AdapterWaitPolicy, TextRequest

#: Seconds after which whoever gave up may come back: meanwhile the load goes on for others.
_RETRY_S: Final = 1.0
#: Ends of waits that are over may be kept, but not many more than there are waits.
_SPARE_ENDS: Final = 64


@dataclass(frozen=True, slots=True)
class AdapterWait:
    """How long one request waits for its adapter, and what giving up means."""

    #: Seconds, on the same clock as every `now`.
    arrived: float
    at_most_s: float
    policy: AdapterWaitPolicy

    @property
    def ends(self) -> float:
        """When it is over unless the adapter is ready."""
        return self.arrived + self.at_most_s

    def is_over(self, now: float, *, ready: bool, started: bool) -> bool:
        """Whether the request gives up now; `started`: its first token came."""
        return now >= self.ends and not ready and not started

    def error(self, adapter: str, now: float) -> RequestError:
        """Return what the client is told (503) when giving up is to fail."""
        return RequestError(
            pb.ERROR_KIND_LOADING,
            f"adapter {adapter!r} was not ready {now - self.arrived:.3f} s after the request, "
            f"which allowed max_wait_for_adapter_ms={self.at_most_s * 1000:.0f}; send it again, or "
            "let it wait longer",
            retry_after_s=_RETRY_S,
        )


def wait_of(request: TextRequest, arrived: float) -> AdapterWait | None:
    """Return how long a request waits for its adapter; None = as long as it takes."""
    if request.max_wait_for_adapter_s is None:
        return None
    return AdapterWait(arrived, request.max_wait_for_adapter_s, request.adapter_wait_policy)


class AdapterWaits:
    """The bounded waits of one dispatcher's requests, from submission to the first token.

    Owned by the dispatcher. Each look costs what became due, and one question for each adapter
    whose requests are past their ends and wait for rows.
    """

    def __init__(self) -> None:
        self._waits: dict[int, tuple[str, AdapterWait]] = {}
        #: (end, request id), the next first; also of waits that were dropped.
        self._ends: list[tuple[float, int]] = []
        #: Request ids by digest: past their ends, and still here since the adapter was ready.
        self._overdue: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def request_ids(self) -> KeysView[int]:
        """Those who still wait."""
        return self._waits.keys()

    @property
    def next_end(self) -> float | None:
        """When `due` may give something that it does not give yet, by time alone."""
        self._forget_ended()
        return self._ends[0][0] if self._ends else None

    def add(self, request_id: int, digest: str, wait: AdapterWait) -> None:
        """Note that a request waits for this adapter."""
        assert request_id not in self._waits
        self._waits[request_id] = (digest, wait)
        heappush(self._ends, (wait.ends, request_id))

    def drop(self, request_id: int) -> None:
        """Forget a request: it was answered, ended or asks for something else. Idempotent."""
        digest, _ = self._waits.pop(request_id, ("", None))
        if request_id in (overdue := self._overdue.get(digest, set())):
            overdue.remove(request_id)
            if not overdue:
                del self._overdue[digest]
        if len(self._ends) > 2 * len(self._waits) + _SPARE_ENDS:
            self._ends = [(end, id) for end, id in self._ends if self._waits_until(id) == end]
            heapify(self._ends)

    def due(self, now: float, is_ready: Callable[[str], bool]) -> list[tuple[int, AdapterWait]]:
        """Take out and return the requests that give up now, and what they said.

        `is_ready` says of a digest whether the adapter is resident.
        """
        while self._ends and self._ends[0][0] <= now:
            end, request_id = heappop(self._ends)
            if self._waits_until(request_id) == end:
                self._overdue.setdefault(self._waits[request_id][0], set()).add(request_id)
        over = [
            (request_id, self._waits[request_id][1])
            for digest, overdue in self._overdue.items()
            for ready in [is_ready(digest)]
            for request_id in sorted(overdue)
            if self._waits[request_id][1].is_over(now, ready=ready, started=False)
        ]
        for request_id, _ in over:
            self.drop(request_id)
        return over

    def clear(self) -> None:
        """Forget everybody."""
        self._waits.clear()
        self._ends.clear()
        self._overdue.clear()

    def check(self) -> None:
        """Assert what must hold between calls: every wait is watched, by its end or as overdue."""
        watched = {id for end, id in self._ends if self._waits_until(id) == end}
        overdue = [id for ids in self._overdue.values() for id in ids]
        assert len(overdue) == len(set(overdue))
        assert watched | set(overdue) == set(self._waits)
        assert not watched & set(overdue)
        assert all(self._overdue.values()), "an adapter without overdue requests is kept"
        assert len(self._ends) <= 2 * len(self._waits) + _SPARE_ENDS + 1

    def _waits_until(self, request_id: int) -> float | None:
        found = self._waits.get(request_id)
        return None if found is None else found[1].ends

    def _forget_ended(self) -> None:
        while self._ends and self._waits_until(self._ends[0][1]) != self._ends[0][0]:
            heappop(self._ends)

"""Who waits at the shards of one router, by flow: those who may have to make place in a full queue.

A request is here from its acceptance until it is admitted for the first time. One that was begun,
and goes on after its shard went away, is not: what it was given is not thrown away.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from loralane_router.errors import RequestError
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.lazy_heap import LazyHeap
from loralane_router.queueing.overload import Standing, is_owed, may_join, most_beyond

#: Ends a waiting request, by its id, with an error.
Refuse = Callable[[int, RequestError], None]


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that has not begun, and how it is ended."""

    ask: Ask
    refuse: Refuse


class _Flow:
    """The requests of one flow. In use it is never empty."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        #: Requests that are being opened.
        self.coming = 0
        self.waiting: dict[int, Waiting] = {}
        self.newest: LazyHeap[int] = LazyHeap(self._age)

    @property
    def size(self) -> int:
        return self.coming + len(self.waiting)

    def _age(self, request_id: int) -> tuple[float, int]:
        return -self.waiting[request_id].ask.arrived, -request_id


class Crowd:
    """All flows that have a request waiting or being opened. Owned by the fleet.

    Routers say who is being opened, rosters who waits.
    """

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        """`weight_of` says what a flow weighs; it is asked when the flow comes."""
        self._weight_of = weight_of
        self._flows: dict[str, _Flow] = {}
        #: Of all flows.
        self._weight = 0.0
        self._size = 0
        self._coming = 0

    def __contains__(self, ask: Ask) -> bool:
        flow = self._flows.get(ask.flow)
        return flow is not None and ask.request_id in flow.waiting

    @property
    def coming(self) -> int:
        """How many requests are being opened."""
        return self._coming

    @property
    def may_yield(self) -> bool:
        """Whether anybody can be asked to make place: some flow has more than one request."""
        return self._size > len(self._flows)

    def expect(self, flow: str) -> None:
        """Count a request that is being opened; `flow`: as far as it is known then."""
        self._enter(flow).coming += 1
        self._coming += 1

    def expect_no_more(self, flow: str) -> None:
        """Forget one that was expected, under the same flow."""
        self._flows[flow].coming -= 1
        self._coming -= 1
        self._leave(flow)

    def enter(self, ask: Ask, refuse: Refuse) -> None:
        """Count a request that waits and has not begun."""
        flow = self._enter(ask.flow)
        flow.waiting[ask.request_id] = Waiting(ask, refuse)
        flow.newest.put(ask.request_id)

    def leave(self, ask: Ask) -> None:
        """Forget a request that waits no more, if it is here."""
        if ask not in self:
            return
        flow = self._flows[ask.flow]
        flow.newest.remove(ask.request_id)
        del flow.waiting[ask.request_id]
        self._leave(ask.flow)

    @property
    def size(self) -> int:
        """How many there are, waiting or being opened."""
        return self._size

    def may_join(self, flow: str, places: float, *, counted: int = 0) -> bool:
        """Whether one more request of a flow may join, with so many places left for all.

        `counted`: how many of those that count are that request. Costs the same however many wait.
        """
        standing, everybody, weight = self._standing(flow, counted)
        return may_join(standing, everybody, weight, places)

    def is_within(self, flow: str, *, counted: int = 0) -> bool:
        """Whether one more request of a flow is within its share, which is one at least."""
        return is_owed(*self._standing(flow, counted))

    def yielding(self, flow: str, tokens: int, *, counted: int = 0) -> list[Waiting]:
        """Return who makes place for one more request of a flow; empty = nobody, it is refused.

        The newest of the flow that has most beyond its share: one, and as many more as it takes
        until so many tokens of prompts are gone, none within that share. Costs a look at each flow
        if this one is within its share. `counted`: as for `may_join`.
        """
        standing, everybody, weight = self._standing(flow, counted)
        if not self.may_yield or not is_owed(standing, everybody, weight):
            return []
        standings = {
            name: Standing(other.size, other.weight)
            for name, other in self._flows.items()
            if other.waiting and name != flow
        }
        found = most_beyond(standings, everybody, weight)
        if found is None:
            return []
        name, most = found
        other = self._flows[name]
        newest = [other.waiting[id] for id in other.newest.nearest(most if tokens else 1)]
        freed = accumulate(waiting.ask.tokens for waiting in newest)
        enough = next((count for count, sum in enumerate(freed, 1) if sum >= tokens), 0)
        return newest[:enough]

    def check(self) -> None:
        """Assert that the sums are right, and that no flow is kept without a request."""
        assert all(flow.size > 0 and flow.coming >= 0 for flow in self._flows.values())
        assert self._size == sum(flow.size for flow in self._flows.values())
        assert self._coming == sum(flow.coming for flow in self._flows.values())
        weight = sum(flow.weight for flow in self._flows.values())
        assert abs(self._weight - weight) <= 1e-6 * max(1.0, weight)
        for name, flow in self._flows.items():
            flow.newest.check()
            assert len(flow.newest) == len(flow.waiting)
            assert all(waiting.ask.flow == name for waiting in flow.waiting.values())

    def _standing(self, flow: str, counted: int) -> tuple[Standing, int, float]:
        """Return a flow, how many there are in all, and what all flows weigh with this one.

        `counted` of its requests do not count: they are the one that asks.
        """
        found = self._flows.get(flow)
        if found is None:
            weight = self._weight_of(flow)
            return Standing(0, weight), self._size, self._weight + weight
        return Standing(found.size - counted, found.weight), self._size - counted, self._weight

    def _enter(self, name: str) -> _Flow:
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(self._weight_of(name))
            self._weight += flow.weight
        self._size += 1
        return flow

    def _leave(self, name: str) -> None:
        """Take one request off the count; forget its flow with its last."""
        self._size -= 1
        if not self._flows[name].size:
            self._weight -= self._flows.pop(name).weight
        if not self._flows:
            self._weight = 0.0  # what rounding left

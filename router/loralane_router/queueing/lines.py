"""Who waits for one adapter: a line for each flow, in two orders."""

import math
from typing import Any, TypeVar

from loralane_router.queueing.admission import Ask
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.lazy_heap import LazyHeap

T = TypeVar("T")


class Line:
    """The requests of one flow for one adapter. In use it is never empty."""

    def __init__(self, flow: str, shares: FairShares) -> None:
        self.flow = flow
        self._shares = shares
        self._asks: dict[int, Ask] = {}
        self._by_rank: LazyHeap[int] = LazyHeap(self._rank)
        self._by_age: LazyHeap[int] = LazyHeap(self._age)
        #: When the one that had waited longest was last admitted.
        self._served = -math.inf

    def __len__(self) -> int:
        return len(self._asks)

    @property
    def asks(self) -> dict[int, Ask]:
        """All requests by id. To be read only."""
        return self._asks

    @property
    def head(self) -> Ask:
        """Who goes next by share: the best priority, then the longest wait."""
        return self._asks[_known(self._by_rank.first())]

    @property
    def oldest(self) -> Ask:
        """Who has waited longest, whatever its priority."""
        return self._asks[_known(self._by_age.first())]

    @property
    def turn(self) -> float:
        """Since when the turn of the one that has waited longest is outstanding."""
        return max(self._served, self.oldest.arrived)

    @property
    def age(self) -> tuple[float, float]:
        """What orders lines by age, the least first: who was never served before who just was."""
        return self.turn, self._served

    @property
    def share(self) -> tuple[int, float, float, int]:
        """What orders lines by share, the least first. It grows as the flow is served."""
        head = self.head
        return head.priority, self.counter, head.arrived, head.request_id

    @property
    def counter(self) -> float:
        """What its flow was served, in weighted tokens."""
        return self._shares.counter(self.flow)

    def add(self, ask: Ask) -> None:
        """Let one more request wait, in its place by arrival and by priority."""
        self._asks[ask.request_id] = ask
        self._by_rank.put(ask.request_id)
        self._by_age.put(ask.request_id)

    def remove(self, request_id: int) -> Ask:
        """Take out a request, wherever it stands."""
        self._by_rank.remove(request_id)
        self._by_age.remove(request_id)
        return self._asks.pop(request_id)

    def serve(self, ask: Ask, now: float) -> None:
        """Take out a request that is admitted now."""
        if ask is self.oldest:
            self._served = now
        self.remove(ask.request_id)

    def check(self) -> None:
        """Assert that both orders have everybody."""
        self._by_rank.check()
        self._by_age.check()
        assert len(self._by_rank) == len(self._by_age) == len(self._asks) > 0
        assert all(ask.flow == self.flow for ask in self._asks.values())

    def _rank(self, request_id: int) -> tuple[int, float, int]:
        ask = self._asks[request_id]
        return ask.priority, ask.arrived, request_id

    def _age(self, request_id: int) -> tuple[float, int]:
        return self._asks[request_id].arrived, request_id


class Group:
    """All lines for one adapter. In use it is never empty."""

    def __init__(self, digest: str, lanes: int) -> None:
        self.digest = digest
        self.lanes = lanes
        #: No admission before this time: the shard refused one.
        self.held_until = -math.inf
        self.lines: dict[str, Line] = {}
        #: Without those that are passed over for now.
        self.by_share: LazyHeap[Line] = LazyHeap(lambda line: line.share)
        self.by_age: LazyHeap[Line] = LazyHeap(lambda line: line.age)

    @property
    def best(self) -> Line:
        """The line that goes next by share; there must be one that is not passed over."""
        return _known(self.by_share.first())

    @property
    def eldest(self) -> Line:
        """The line whose turn has been outstanding longest."""
        return _known(self.by_age.first())

    @property
    def share(self) -> Any:
        """As of its best line."""
        return self.best.share

    @property
    def turn(self) -> float:
        """As of its eldest line."""
        return self.eldest.turn

    @property
    def age(self) -> tuple[float, float]:
        """As of its eldest line."""
        return self.eldest.age

    def put(self, line: Line) -> None:
        """Add a line, or note that it may go earlier than before."""
        self.lines[line.flow] = line
        self.by_share.put(line)
        self.by_age.put(line)

    def remove(self, line: Line) -> None:
        """Take out a line that has become empty."""
        del self.lines[line.flow]
        self.by_age.remove(line)
        if line in self.by_share:
            self.by_share.remove(line)

    def check(self) -> None:
        """Assert that each line is in both orders, and that all are for this adapter."""
        assert self.lines
        assert len(self.by_share) == len(self.by_age) == len(self.lines)
        self.by_share.check()
        self.by_age.check()
        for line in self.lines.values():
            line.check()
            assert all(ask.digest == self.digest for ask in line.asks.values())


def _known(found: T | None) -> T:
    assert found is not None, "an empty line must not be kept"
    return found

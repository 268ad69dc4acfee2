"""One run: a trace played to a cluster of shards, and what its requests saw."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from loralane_router.queueing.fairness import FairShares

from bench.figures import percentile
from bench.sim.costs import Costs
from bench.sim.events import Events
from bench.sim.front import Front
from bench.sim.policies import Policy
from bench.sim.shard import Report, Row
from bench.sim.traces import Arrival

SHARDS: Final = 16
#: Of the requests, those that only warm the caches.
WARM: Final = 1 / 3


@dataclass(slots=True)
class Late:
    """Counts requests that are late. A run ends as soon as more are than may be."""

    #: Time to first token that is still in time, seconds.
    limit_s: float
    allowed: float

    def see(self, seconds: float) -> None:
        """Take note of a time to first token."""
        if seconds > self.limit_s:
            self.allowed -= 1

    @property
    def too_many(self) -> bool:
        """Whether more were late than may be."""
        return self.allowed < 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was seen of the requests after the warm ones. Seconds."""

    requests: int
    p50: float
    p99: float
    #: Fetches from the store and copies to a device, for each request, warm ones included.
    fetches: float
    copies: float
    #: Tokens given to the busiest shard over the mean.
    imbalance: float


class Cluster:
    """Shards, and a policy in front of them. One run each."""

    def __init__(self, policy: Policy, costs: Costs, shards: int) -> None:
        self._events = Events()
        self._policy = policy
        self._shares = FairShares()
        self.fronts = [Front(self._events, costs, self._shares, self._heard) for _ in range(shards)]
        self._tokens = [0] * shards
        self._warm = 0
        self._late: Late | None = None
        #: Requests of which it is not yet said whether they are late, in order.
        self._open: deque[int] = deque()
        #: When requests came, got their first token and ended; by number.
        self.arrived: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}

    def play(self, arrivals: Sequence[Arrival], rate: float, late: Late | None = None) -> None:
        """Let requests come at so many per second, until all have ended or too many are late."""
        self._warm = int(WARM * len(arrivals))
        self._late = late
        for number, arrival in enumerate(arrivals):
            self._events.at(arrival.at / rate, partial(self._arrive, number, arrival))
        while self._events.step():
            if late is not None and late.too_many:
                return
        self._judge(math.inf)

    def outcome(self) -> Outcome:
        """Return what was seen. Every request has ended."""
        assert len(self.ended) == len(self.arrived)
        waits = [self.first[i] - at for i, at in self.arrived.items() if i >= self._warm]
        stores = [front.shard.store for front in self.fronts]
        return Outcome(
            requests=len(waits),
            p50=percentile(waits, 0.5),
            p99=percentile(waits, 0.99),
            fetches=sum(store.fetches for store in stores) / len(self.arrived),
            copies=sum(store.copies for store in stores) / len(self.arrived),
            imbalance=max(self._tokens) * len(self._tokens) / sum(self._tokens),
        )

    def check(self) -> None:
        """Assert what must hold between events."""
        for front in self.fronts:
            front.check()
        running = sum(front.requests for front in self.fronts)
        assert len(self.ended) + running == len(self.arrived)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        row = Row(number, arrival.adapter, arrival.rank, arrival.prompt, arrival.answer)
        shard = self._policy(self.fronts, row, self._events.now)
        self.arrived[number] = self._events.now
        self._tokens[shard] += arrival.prompt + arrival.answer
        self.fronts[shard].submit(row)
        if number >= self._warm:
            self._open.append(number)
        self._judge(self._events.now)

    def _judge(self, now: float) -> None:
        """Count who is late; that is known when the limit has passed, before the first token."""
        late = self._late
        while late and self._open and now - self.arrived[self._open[0]] > late.limit_s:
            number = self._open.popleft()
            late.see(self.first.get(number, math.inf) - self.arrived[number])

    def _heard(self, report: Report) -> None:
        now = self._events.now
        for row in report.first:
            assert row.request_id not in self.first
            self.first[row.request_id] = now
        for row in report.ended:
            assert row.request_id not in self.ended
            self.ended[row.request_id] = now

"""The router's decisions in front of a shard that is cranked by hand: no clock, no network.

Every step makes one token for every row that has its pages. What the shard is sent arrives when
`deliver` is called, so that reports can be late. The shard asserts that it is never given too much.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count

from loralane_proto import shard_pb2 as pb
from loralane_router.adapters.facts import AdapterFacts
from loralane_router.queueing.admission import Ask, admit
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.ledger import HEADROOM_PAGES, Ledger
from loralane_router.queueing.queues import Queues
from loralane_router.queueing.weights import Weights

PAGE_TOKENS = 4
LANES = 8


class CountedShares(FairShares):
    """Fair shares that also count what they were charged."""

    def __init__(self, weights: Weights | None = None) -> None:
        super().__init__(weights)
        #: Tokens by flow, an answer's twice; not divided by weights.
        self.charged: Counter[str] = Counter()

    def charge(self, flow: str, *, prompt: int = 0, generated: int = 0) -> None:
        self.charged[flow] += prompt + 2 * generated
        super().charge(flow, prompt=prompt, generated=generated)


class WatchedQueues(Queues):
    """Queues that also note who went by age."""

    def __init__(self, shares: FairShares) -> None:
        super().__init__(shares)
        self.aged: set[int] = set()

    def take(self, ask: Ask, now: float, *, by_age: bool = False) -> None:
        if by_age:
            self.aged.add(ask.request_id)
        super().take(ask, now, by_age=by_age)


@dataclass(eq=False)
class Row:
    """One request on the shard."""

    ask: Ask
    #: Of the answer.
    missing: int
    made: int = 0
    pages: int = 0


@dataclass
class Cranked:
    """One shard, and queues, shares and ledger of the router in front of it."""

    rows_total: int = 8
    pages_total: int = 1000
    lanes_total: int = 1000
    shares: CountedShares = field(default_factory=CountedShares)
    #: Seconds that a step takes.
    step_s: float = 1.0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        self.inbox: deque[Row] = deque()
        self.pinned: dict[str, int] = {}
        self.queues = WatchedQueues(self.shares)
        self.ledger = Ledger(self.capacity())
        self.answers: dict[int, int] = {}
        self.submitted: dict[int, Ask] = {}
        #: In order, by request id.
        self.admitted: list[int] = []
        self.ended: list[int] = []
        #: Tokens that each request was served, an answer's twice.
        self.served: Counter[int] = Counter()
        self._arrived = 0
        self._ids = count()

    def submit(
        self,
        digest: str = "a",
        flow: str | None = None,
        prompt: int = 1,
        answer: int = 1,
        lanes: int = LANES,
        priority: int = 0,
    ) -> int:
        """Let a request wait; return its id."""
        total = -(-(prompt + answer) // PAGE_TOKENS)
        ask = Ask(
            next(self._ids),
            digest,
            pages=min(total, -(-prompt // PAGE_TOKENS) + HEADROOM_PAGES),
            lanes=lanes if digest else 0,
            arrived=self.now,
            flow=digest if flow is None else flow,
            tokens=prompt,
            priority=priority,
        )
        self.queues.append(ask)
        self.submitted[ask.request_id] = ask
        self.answers[ask.request_id] = answer
        return ask.request_id

    def admit(self) -> list[int]:
        """Decide who is admitted now, and send them; return their ids."""
        found = admit(self.queues, self.ledger.room(), self.now)
        for ask in found:
            self.ledger.take(ask, self.now)
            self.inbox.append(Row(ask, self.answers[ask.request_id]))
            self.served[ask.request_id] = ask.tokens  # also if it was refused before
        ids = [ask.request_id for ask in found]
        self.admitted += ids
        return ids

    def deliver(self) -> None:
        """Let what was sent arrive."""
        while self.inbox:
            self._arrived += 1
            self.rows.append(self.inbox.popleft())
        assert self.capacity().lanes_in_use <= self.lanes_total, "too many lanes"

    def step(self) -> list[int]:
        """Make one token for every row that has its pages, and report; return who ended."""
        self.now += self.step_s
        self._share_pages()
        ended = []
        for row in [row for row in self.rows if row.pages]:
            row.made, row.missing = row.made + 1, row.missing - 1
            self.shares.charge(row.ask.flow, generated=1)
            self.served[row.ask.request_id] += 2
            if not row.missing:
                ended.append(row)
        for row in ended:
            self._end(row)
        self.report()
        self.ended += [row.ask.request_id for row in ended]
        return [row.ask.request_id for row in ended]

    def report(self) -> None:
        """Tell the ledger what the shard holds."""
        self.ledger.observe(self.capacity(), self._arrived)

    def cancel(self, request_id: int) -> None:
        """Give up a request: who waits is gone at once, a row that has arrived by the next step."""
        if request_id in self.queues:
            self.queues.remove(request_id)
        else:
            (row,) = [row for row in self.rows if row.ask.request_id == request_id]
            self._end(row)
            self.report()
        self.ended.append(request_id)

    def refuse(self, pause: float) -> int:
        """Refuse the row that came last, for lack of room; return its id."""
        row = self.rows[-1]
        assert not row.made
        self._end(row)
        self.report()
        self.admitted.remove(row.ask.request_id)
        self.queues.put_back(row.ask, self.now + pause)
        return row.ask.request_id

    def pin(self, digest: str, lanes: int, pinned: bool) -> None:
        """Pin an adapter, or no longer, as the shard says; it must have room for it."""
        if pinned:
            self.pinned[digest] = lanes
        else:
            self.pinned.pop(digest, None)
        self.ledger.pin(AdapterFacts(digest=digest, lanes=lanes, pinned=pinned, tier="device"))
        self.report()

    def round(self) -> list[int]:
        """Admit, deliver, step once; return who was admitted."""
        admitted = self.admit()
        self.deliver()
        self.step()
        return admitted

    def capacity(self) -> pb.Capacity:
        """Return what the shard reports."""
        lanes = self.pinned | {r.ask.digest: r.ask.lanes for r in self.rows if r.ask.lanes}
        assert len(self.rows) <= self.rows_total, "too many rows"
        return pb.Capacity(
            rows_total=self.rows_total,
            rows_free=self.rows_total - len(self.rows),
            pages_total=self.pages_total,
            pages_free=self.pages_total - sum(row.pages for row in self.rows),
            page_tokens=PAGE_TOKENS,
            lanes_total=self.lanes_total,
            lanes_in_use=sum(lanes.values()),
            pending_tokens=sum(1 if r.pages else r.ask.tokens + r.made for r in self.rows),
        )

    def check(self) -> None:
        """Assert that every request waits, is on its way, runs or has ended: one of them, once."""
        self.queues.check()
        self.ledger.check()
        waiting = [i for i in self.submitted if i in self.queues]
        running = [row.ask.request_id for row in (*self.inbox, *self.rows)]
        assert sorted(waiting + running + self.ended) == sorted(self.submitted)
        assert sorted(running) == sorted(set(self.admitted) - set(self.ended))
        assert len(set(self.admitted)) == len(self.admitted)
        served = Counter[str]()
        for request_id, tokens in self.served.items():
            served[self.submitted[request_id].flow] += tokens
        assert +served == +self.shares.charged

    def _end(self, row: Row) -> None:
        self.rows.remove(row)
        self.ledger.release(row.ask)

    def _share_pages(self) -> None:
        free = self.pages_total
        for row in self.rows:
            needed = -(-(row.ask.tokens + row.made) // PAGE_TOKENS)
            row.pages = needed if needed <= free else 0
            free = free - needed if row.pages else 0

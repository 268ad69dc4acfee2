"""The router's decisions in front of a shard that is cranked by hand: no clock, no network.

Every step takes one second and makes one token for every row. What the shard is sent arrives when
`deliver` is called, so that reports can be late. The shard asserts that it is never given too much.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from loralane_proto import shard_pb2 as pb
from loralane_router.admission import Ask, admit
from loralane_router.facts import AdapterFacts
from loralane_router.fairness import FairShares
from loralane_router.ledger import HEADROOM_PAGES, Ledger
from loralane_router.queues import Queues

PAGE_TOKENS = 4
LANES = 8


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
    shares: FairShares = field(default_factory=FairShares)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        self.inbox: deque[Row] = deque()
        self.pinned: dict[str, int] = {}
        self.queues = Queues(self.shares)
        self.ledger = Ledger(self.capacity())
        self.answers: dict[int, int] = {}
        self.submitted: dict[int, Ask] = {}
        #: In order, by request id.
        self.admitted: list[int] = []
        self.ended: list[int] = []
        #: Weighted tokens that each request was served.
        self.served: dict[int, int] = {}
        #: Requests that were admitted by age.
        self.aged: set[int] = set()
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
            self.served[ask.request_id] = ask.tokens
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
        self.now += 1.0
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
        everybody = sorted(waiting + running + self.ended)
        assert everybody == sorted(self.submitted)
        assert sorted(self.admitted) == sorted(running + self.ended)

    def _end(self, row: Row) -> None:
        self.rows.remove(row)
        self.ledger.release(row.ask)

    def _share_pages(self) -> None:
        free = self.pages_total
        for row in self.rows:
            needed = -(-(row.ask.tokens + row.made) // PAGE_TOKENS)
            row.pages = needed if needed <= free else 0
            free = free - needed if row.pages else 0

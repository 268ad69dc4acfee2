"""The router's end of one simulated shard: the product's own queues, ledger and admission."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from loralane_proto import shard_pb2 as pb
from loralane_router.fleet.load import Load, load_of
from loralane_router.fleet.routing import ShardView
from loralane_router.queueing.admission import Ask, admit
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.ledger import Ledger
from loralane_router.queueing.queues import Queues

from bench.sim.costs import Costs
from bench.sim.events import Events
from bench.sim.shard import Report, Row, SimShard
from bench.sim.store import DEVICE, REMOTE

#: Of one token each: they never run short here.
_PAGES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class _Seen:
    load: Load
    #: Of the adapters that requests refer to, those that are not resident.
    cold: frozenset[str]


class Front:
    """One shard as the router knows it: by its reports and by what was sent to it."""

    def __init__(
        self, events: Events, costs: Costs, shares: FairShares, heard: Callable[[Report], None]
    ) -> None:
        """`heard` is called with every report, after its room was counted."""
        self._events = events
        self._shares = shares
        self._costs = costs
        self._heard = heard
        self.shard = SimShard(events, costs, self._observe, self._moved)
        self._queues = Queues(shares)
        self._ledger = Ledger(self._capacity())
        self._admitted = 0
        self._asks: dict[int, Ask] = {}
        self._rows: dict[int, Row] = {}
        #: What the shard said of adapters; those not in it are remote.
        self._tiers: dict[str, str] = {}
        #: What `_known` returned last, None when something has happened since.
        self._seen: _Seen | None = None

    @property
    def requests(self) -> int:
        """Waiting and running ones."""
        return len(self._asks)

    @property
    def adapters(self) -> int:
        """How many adapters are on the device or on their way there."""
        resident = sum(tier == DEVICE for tier in self._tiers.values())
        return resident + len(self._known().cold)

    @property
    def slots(self) -> int:
        """How many adapters the device holds."""
        return self._costs.slots

    @property
    def has_free_rows(self) -> bool:
        """Whether one more request could be a row now."""
        return len(self._asks) < self._costs.rows

    def metrics(self) -> tuple[frozenset[str], frozenset[str], int, int]:
        """Return what vLLM would export.

        The adapters of running and of waiting requests, the length of the queue, tokens in the KV
        cache. What waits for its adapter is in the queue there.
        """
        queued = [row for i, row in self._rows.items() if i in self._queues]
        blocked = self.shard.blocked
        running = self._rows.keys() - {row.request_id for row in (*queued, *blocked)}
        return (
            frozenset(self._rows[i].adapter for i in running),
            frozenset(row.adapter for row in (*queued, *blocked)),
            len(queued) + len(blocked),
            self.shard.kv_tokens,
        )

    def holds(self, adapter: str) -> bool:
        """Whether an adapter is on the device, or on its way there."""
        return self._tiers.get(adapter) == DEVICE or adapter in self._known().cold

    def view(self, adapter: str) -> ShardView:
        """Return what the product's policy is given."""
        known = self._known()
        tier = "loading" if adapter in known.cold else self._tiers.get(adapter, REMOTE)
        return replace(known.load.view, loads=len(known.cold), tier=tier)

    def submit(self, row: Row) -> None:
        """Give a request to this shard."""
        ask = Ask(
            request_id=row.request_id,
            digest=row.adapter,
            pages=1,
            lanes=1,
            arrived=self._events.now,
            flow=row.adapter,
            tokens=row.prompt,
        )
        self._asks[row.request_id] = ask
        self._rows[row.request_id] = row
        self._queues.append(ask)
        self.shard.store.read(row.adapter)
        self._admit()

    def check(self) -> None:
        """Assert what must hold between events."""
        self.shard.check()
        self._ledger.check()
        self._queues.check()
        assert len(self._queues) + self.shard.rows == len(self._asks)

    def _known(self) -> "_Seen":
        if self._seen is None:
            load = load_of(self._queues, self._ledger)
            cold = frozenset(a for a in load.wanted if self._tiers.get(a) != DEVICE)
            self._seen = _Seen(load, cold)
        return self._seen

    def _admit(self) -> None:
        self._seen = None
        if not len(self._queues):
            return
        now = self._events.now
        admitted = admit(self._queues, self._ledger.room(), now)
        for ask in admitted:
            self._ledger.take(ask, now)
        if admitted:
            self._admitted += len(admitted)
            self.shard.accept([self._rows[ask.request_id] for ask in admitted])

    def _observe(self, report: Report) -> None:
        self._ledger.observe(self._capacity(), self._admitted)
        for row in report.ended:
            self._shares.charge(row.adapter, generated=row.answer)
            self._ledger.release(self._asks.pop(row.request_id))
            del self._rows[row.request_id]
        self._seen = None
        self._heard(report)
        self._admit()

    def _moved(self, adapter: str, tier: str) -> None:
        if tier == REMOTE:
            self._tiers.pop(adapter, None)
        else:
            self._tiers[adapter] = tier
        self._seen = None

    def _capacity(self) -> pb.Capacity:
        costs, shard = self._costs, self.shard
        return pb.Capacity(
            rows_total=costs.rows,
            rows_free=costs.rows - shard.rows,
            pages_total=_PAGES,
            pages_free=_PAGES,
            page_tokens=1,
            lanes_total=costs.slots,
            lanes_in_use=shard.store.adapters_in_use,
            pending_tokens=shard.pending,
            step_ms=shard.step_s * 1e3,
            token_ms=costs.token_s * 1e3,
        )

"""The router's one loop: waiting requests to the shard, the shard's steps to the requests.

State is touched only on its event loop, so there are no locks. What is admitted next is decided by
`admission.admit`, without clock or network. What the loop carries out is in a file for each stage:
`roster` (who is here), `delivery` (steps), `searches` (adapters that went), `giving_up` (those that
are late), `lookahead` (those that are needed next).
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import AdapterFacts
from loralane_router.errors import RequestError
from loralane_router.fleet.load import Load, load_of
from loralane_router.fleet.shards import RunStream, unavailable
from loralane_router.metrics.counters import Metrics
from loralane_router.metrics.snapshots import Work
from loralane_router.queueing.admission import admit
from loralane_router.queueing.crowd import Crowd
from loralane_router.queueing.delivery import Delivery
from loralane_router.queueing.entry import Entry
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.giving_up import GivingUp
from loralane_router.queueing.ledger import Ledger
from loralane_router.queueing.lookahead import Prefetches
from loralane_router.queueing.overload import DrainRate
from loralane_router.queueing.roster import Roster

#: Takes over who has lost their shard, in order of arrival, and what ended its connection.
HandBack = Callable[[Sequence[Entry], RequestError], None]


def fail_all(entries: Sequence[Entry], error: RequestError) -> None:
    """End requests with the error that ended their shard's connection."""
    for entry in entries:
        entry.generation.fail(error)


def nowhere(digest: str) -> bool:
    """Return that an adapter is not resident, for want of anybody who knows."""
    return False


class Dispatcher:
    """One shard's requests and the count of its room."""

    def __init__(
        self,
        metrics: Metrics,
        hand_back: HandBack = fail_all,
        clock: Callable[[], float] = time.monotonic,
        shares: FairShares | None = None,
        is_resident: Callable[[str], bool] = nowhere,
        crowd: Crowd | None = None,
    ) -> None:
        """`shares`, `crowd`: those of the router; None = its own, for a shard that is alone.

        `is_resident`: whether the shard has said that an adapter's lanes are in its pool.
        """
        self._metrics = metrics
        self._hand_back = hand_back
        self._clock = clock
        shares = FairShares() if shares is None else shares
        #: Accepted and not ended, waiting or running.
        crowd = Crowd(shares.weight_of) if crowd is None else crowd
        self._roster = Roster(shares, crowd, self.needed_pages, self.wake)
        self._delivery = Delivery(self._roster, shares, metrics, self.wake)
        self._giving_up = GivingUp(self._roster, metrics, is_resident, self.wake, clock)
        self._prefetches = Prefetches(self._roster.queues)
        #: Whether other adapters are pinned since those who wait were last compared with them.
        self._repinned = False
        self._drain = DrainRate()
        #: None while the shard is not connected.
        self._ledger: Ledger | None = None
        self._wake = asyncio.Event()
        #: What `load` returned last, None when something has happened since.
        self._load: Load | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait for admission."""
        return len(self._roster.queues)

    @property
    def waiting_tokens(self) -> int:
        """How many tokens the prompts of those have."""
        return self._roster.queues.tokens

    @property
    def tokens_per_s(self) -> float:
        """How many prompt tokens leave the queues in a second lately; 0 = not known."""
        return self._drain.tokens_per_s

    @property
    def free_rows(self) -> int:
        """How many requests could start now, as far as rows go."""
        return 0 if self._ledger is None else max(0, self._ledger.free_rows)

    @property
    def capacity(self) -> pb.Capacity | None:
        """What the shard reported last; None while it is not connected."""
        return None if self._ledger is None else self._ledger.capacity

    def load(self) -> Load:
        """Return how busy the shard is. Raises RequestError while it is not connected."""
        if self._load is None or self._wake.is_set():
            self._load = load_of(self._roster.queues, self._connected())
        return self._load

    def work(self) -> Work:
        """Return how many requests run and wait, and for which adapters."""
        return self._roster.work()

    def wake(self) -> None:
        """Let the loop look at its state again."""
        self._wake.set()

    def needed_pages(self, prompt: int, max_tokens: int, adapter: AdapterFacts) -> int:
        """Return `Ask.pages` for so many tokens. Raises RequestError as `Ledger` does."""
        return self._connected().needed_pages(prompt, max_tokens, adapter)

    def check_lanes(self, adapter: AdapterFacts) -> None:
        """Raise RequestError if an adapter has no place here, as `Ledger` does."""
        self._connected().check_lanes(adapter)

    def submit(self, entry: Entry) -> None:
        """Put a request that was just accepted in its adapter's queue."""
        self._metrics.usage.begin(entry.ask.digest, entry.generation.adapter)
        self._roster.add(entry)

    def resume(self, entry: Entry) -> None:
        """Put a request that another dispatcher handed back in its adapter's queue."""
        self._roster.add(entry)

    def cancel(self, request_id: int) -> None:
        """Give up a request: at once if it waits, by telling the shard if it runs."""
        self._roster.cancel(request_id)

    def needs(self, digest: str) -> bool:
        """Whether a waiting or running request refers to this adapter."""
        running = self._ledger is not None and self._ledger.uses(digest)
        return running or self._roster.wants(digest)

    def note_pins(self, adapters: Iterable[AdapterFacts]) -> None:
        """Take over what the shard said about pinned adapters."""
        if self._ledger is not None:
            for adapter in adapters:
                self._repinned |= self._ledger.pin(adapter)
        self.wake()

    def note_unloaded(self, digest: str) -> None:
        """Take over that the shard has forgotten an adapter."""
        if self._ledger is not None:
            self._repinned |= self._ledger.unpin(digest)
        self.wake()

    def connect(self, capacity: pb.Capacity) -> None:
        """Accept requests from here on, for the stream that `serve` gets next."""
        self._ledger = Ledger(capacity)

    async def serve(self, stream: RunStream, observer: Callable[[pb.StepReply], None]) -> None:
        """Dispatch until the stream breaks (RequestError) or the task is cancelled.

        Afterwards it has no request: those that were left are handed back. `observer` sees every
        step.
        """
        error = unavailable("the connection to the shard was closed")
        ledger = self._connected()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for step in stream.take():
                    self._delivery.apply(step, ledger, self._clock())
                    observer(step)
                self._giving_up.act(self._clock())
                batch = self._batch(ledger)
                self._load = None
                self._giving_up.set_alarm()
                if batch is not None:
                    await stream.write(batch)
        except RequestError as exc:
            error = exc
            raise
        finally:
            self._hand_back(self._release_all(), error)

    def check(self) -> None:
        """Assert that nothing is lost: what is neither queued nor running has ended."""
        self._roster.check()
        if self._ledger is not None:
            self._ledger.check()

    def _connected(self) -> Ledger:
        """Return the count of the shard's room. Raises RequestError while it is not connected."""
        if self._ledger is None:
            raise unavailable("the shard is not connected")
        return self._ledger

    def _batch(self, ledger: Ledger) -> pb.RunRequest | None:
        """Return what to send now, None if nothing; admissions count as running from here on."""
        now = self._clock()
        if self._repinned:
            self._refuse_kept_out(ledger)
        admitted = self._admit(ledger, now)
        left = sum(len(admission.prompt) for admission in admitted)
        self._drain.note(now, left, waiting=self.waiting > 0)
        ahead: list[str] = []
        if admitted or self._roster.changed:
            self._roster.changed = False
            ahead = self._prefetches.due(ledger, now)
        if not admitted and not self._roster.cancels and not ahead:
            return None
        return pb.RunRequest(admit=admitted, cancel=self._roster.take_cancels(), prefetch=ahead)

    def _admit(self, ledger: Ledger, now: float) -> list[pb.Admission]:
        if not self.waiting:
            return []
        admitted = []
        for ask in admit(self._roster.queues, ledger.room(), now):
            ledger.take(ask, now)
            entry = self._roster.begin(ask)
            if not entry.last_tokens:
                entry.generation.queue_s = now - ask.arrived
            admitted.append(entry.admission)
        return admitted

    def _refuse_kept_out(self, ledger: Ledger) -> None:
        """End who would wait in vain: adapters that were pinned meanwhile hold too many lanes."""
        self._repinned = False
        for digest, lanes in self._roster.queues.wanted_lanes().items():
            try:
                ledger.check_pins(digest, lanes)
            except RequestError as error:
                fail_all(self._roster.drop(digest), error)

    def _release_all(self) -> list[Entry]:
        """Forget the connection; return whose requests go on elsewhere, in order of arrival."""
        left = [entry for entry, ran in self._roster.clear() if _can_go_on(entry, ran)]
        self._ledger = None
        self._prefetches.clear()
        self._giving_up.set_alarm()
        self._drain.note(self._clock(), 0, waiting=False)
        return sorted(left, key=lambda entry: entry.ask.arrived)


def _can_go_on(entry: Entry, ran: bool) -> bool:
    """Whether a request that lost its shard can go on; one that cannot has ended then."""
    try:
        entry.leave_shard(ran=ran)
    except RequestError as error:
        entry.generation.fail(error)
    return not entry.generation.finished

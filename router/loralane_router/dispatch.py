"""The router's one loop: waiting requests to the shard, the shard's steps to the requests.

State lives in `Dispatcher` and is touched only on its event loop, so there are no locks. What is
admitted next is decided by `admission.admit`, without clock or network.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from loralane_proto import shard_pb2 as pb

from loralane_router.admission import PATIENCE_S, admit
from loralane_router.alarm import Alarm
from loralane_router.deadlines import AdapterWaits
from loralane_router.entry import Entry
from loralane_router.errors import RequestError
from loralane_router.facts import AdapterFacts
from loralane_router.fairness import FairShares
from loralane_router.generation import Generation
from loralane_router.ledger import Ledger
from loralane_router.load import Load, load_of
from loralane_router.lookahead import LOOK_AHEAD, to_prefetch
from loralane_router.metrics import Metrics
from loralane_router.overload import DrainRate
from loralane_router.queues import Queues
from loralane_router.shards import RunStream, unavailable
from loralane_router.snapshots import Work

_log = logging.getLogger(__name__)

#: Seconds before a request that the shard refused is sent again: doubled each time, up to the last.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0

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
    """Queues, running rows and the count of the shard's room."""

    def __init__(
        self,
        metrics: Metrics,
        hand_back: HandBack = fail_all,
        clock: Callable[[], float] = time.monotonic,
        shares: FairShares | None = None,
        is_resident: Callable[[str], bool] = nowhere,
    ) -> None:
        """`shares`: those of the router; None = its own, for a shard that is alone.

        `is_resident`: whether the shard has said that an adapter's lanes are in its pool.
        """
        self._metrics = metrics
        self._hand_back = hand_back
        self._clock = clock
        self._is_resident = is_resident
        #: Accepted and not ended, waiting or running.
        self._entries: dict[int, Entry] = {}
        self._shares = FairShares() if shares is None else shares
        self._queues = Queues(self._shares)
        self._cancels: list[int] = []
        #: Whether the queues changed since they were last looked at for prefetching.
        self._changed = False
        #: Whether other adapters are pinned since those who wait were last compared with them.
        self._repinned = False
        #: Digests that the shard was told to prefetch and that still wait.
        self._prefetched: set[str] = set()
        #: Requests whose adapter is resolved once more, by id.
        self._lost: dict[int, asyncio.Task[None]] = {}
        #: Those of the entries that wait for their adapters no longer than they said.
        self._waits = AdapterWaits()
        #: Rings when the next of these is over.
        self._alarm = Alarm(self.wake, clock)
        self._drain = DrainRate()
        self._ledger: Ledger | None = None
        self._wake = asyncio.Event()
        #: What `load` returned last, None when something has happened since.
        self._load: Load | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait for admission."""
        return len(self._queues)

    @property
    def waiting_tokens(self) -> int:
        """How many tokens the prompts of those have."""
        return self._queues.tokens

    @property
    def tokens_per_s(self) -> float:
        """How many prompt tokens leave the queues in a second lately; 0 = not known."""
        return self._drain.tokens_per_s

    @property
    def rows(self) -> int:
        """How many requests run at once, at most."""
        return 0 if self._ledger is None else self._ledger.capacity.rows_total

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
        if self._ledger is None:
            raise unavailable("the shard is not connected")
        if self._load is None or self._wake.is_set():
            self._load = load_of(self._queues, self._ledger)
        return self._load

    def work(self) -> Work:
        """Return how many requests run and wait, and for which adapters."""
        running, waiting = set[str](), set[str]()
        for request_id, entry in self._entries.items():
            (waiting if request_id in self._queues else running).add(entry.generation.adapter)
        count = len(self._queues)
        names = frozenset(running - {""}), frozenset(waiting - {""})
        return Work(len(self._entries) - count, count, *names)

    def now(self) -> float:
        """Return the dispatcher's time, seconds."""
        return self._clock()

    def wake(self) -> None:
        """Let the loop look at its state again."""
        self._wake.set()

    def needed_pages(self, prompt: int, max_tokens: int, adapter: AdapterFacts) -> int:
        """Return `Ask.pages` for so many tokens. Raises RequestError as `Ledger` does."""
        if self._ledger is None:
            raise unavailable("the shard is not connected")
        return self._ledger.needed_pages(prompt, max_tokens, adapter)

    def submit(self, entry: Entry) -> None:
        """Put a request that was just accepted in its adapter's queue."""
        self._metrics.usage.begin(entry.ask.digest, entry.generation.adapter)
        self.resume(entry)

    def resume(self, entry: Entry) -> None:
        """Put a request that another dispatcher handed back in its adapter's queue."""
        entry.generation.belongs_to(self.cancel)
        self._entries[entry.ask.request_id] = entry
        self._enqueue(entry)

    def cancel(self, request_id: int) -> None:
        """Give up a request: at once if it waits, by telling the shard if it runs."""
        if self._withdraw(request_id):
            del self._entries[request_id]
        elif request_id in self._entries:
            self._cancels.append(request_id)
        self._waits.drop(request_id)
        self._wake.set()

    def _enqueue(self, entry: Entry) -> None:
        """Put a request in its adapter's queue, and watch how long it waits for that adapter."""
        request_id = entry.ask.request_id
        self._waits.drop(request_id)
        if entry.wait is not None:
            self._waits.add(request_id, entry.ask.digest, entry.wait)
        self._queues.append(entry.ask, paid=entry.is_paid)
        self._changed = True
        self._wake.set()

    def _withdraw(self, request_id: int) -> bool:
        """Take a request out from where it waits; return whether it did, instead of running."""
        if request_id in self._queues:
            self._queues.remove(request_id)
            return True
        if (task := self._lost.pop(request_id, None)) is not None:
            task.cancel()
            return True
        return False

    def needs(self, digest: str) -> bool:
        """Whether a waiting or running request refers to this adapter."""
        running = self._ledger is not None and self._ledger.uses(digest)
        lost = any(self._entries[request_id].ask.digest == digest for request_id in self._lost)
        return running or lost or self._queues.waits_for(digest)

    def note_pins(self, adapters: Iterable[AdapterFacts]) -> None:
        """Take over what the shard said about pinned adapters."""
        if self._ledger is not None:
            for adapter in adapters:
                self._repinned |= self._ledger.pin(adapter)
        self._wake.set()

    def note_unloaded(self, digest: str) -> None:
        """Take over that the shard has forgotten an adapter."""
        if self._ledger is not None:
            self._repinned |= self._ledger.unpin(digest)
        self._wake.set()

    def connect(self, capacity: pb.Capacity) -> None:
        """Accept requests from here on, for the stream that `serve` gets next."""
        self._ledger = Ledger(capacity)

    async def serve(self, stream: RunStream, observer: Callable[[pb.StepReply], None]) -> None:
        """Dispatch until the stream breaks (RequestError) or the task is cancelled.

        Afterwards it has no request: those that were left are handed back. `observer` sees every
        step.
        """
        error = unavailable("the connection to the shard was closed")
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for step in stream.take():
                    self._apply(step)
                    observer(step)
                self._give_up(self._clock())
                batch = self._batch()
                self._load = None
                self._alarm.set(self._waits.next_end)
                if batch is not None:
                    await stream.write(batch)
        except RequestError as exc:
            error = exc
            raise
        finally:
            self._hand_back(self._release_all(), error)

    def check(self) -> None:
        """Assert that nothing is lost: what is neither queued nor running has ended."""
        assert len(self._queues) <= len(self._entries)
        assert self._waits.request_ids <= self._entries.keys()
        self._waits.check()
        self._queues.check()
        if self._ledger is not None:
            self._ledger.check()

    def _batch(self) -> pb.RunRequest | None:
        """Return what to send now, None if nothing; admissions count as running from here on."""
        now = self._clock()
        if self._repinned:
            self._refuse_kept_out()
        admitted = self._admit(now)
        left = sum(len(admission.prompt) for admission in admitted)
        self._drain.note(now, left, waiting=len(self._queues) > 0)
        ahead = self._look_ahead(now) if admitted or self._changed else []
        if not admitted and not self._cancels and not ahead:
            return None
        running = [request_id for request_id in self._cancels if request_id in self._entries]
        self._cancels.clear()
        return pb.RunRequest(admit=admitted, cancel=running, prefetch=ahead)

    def _look_ahead(self, now: float) -> list[str]:
        assert self._ledger is not None
        self._changed = False
        self._prefetched = {d for d in self._prefetched if self._queues.waits_for(d)}
        if not len(self._queues):
            return []
        held = self._ledger.room().holders.keys()
        upcoming = self._queues.upcoming(LOOK_AHEAD, overdue=now - PATIENCE_S)
        ahead = to_prefetch(upcoming, held, self._prefetched)
        self._prefetched.update(ahead)
        return ahead

    def _refuse_kept_out(self) -> None:
        """End who would wait in vain: adapters that were pinned meanwhile hold too many lanes."""
        assert self._ledger is not None
        self._repinned = False
        for digest, lanes in self._queues.wanted_lanes().items():
            try:
                self._ledger.check_pins(digest, lanes)
            except RequestError as error:
                for request_id in self._queues.drop(digest):
                    self._waits.drop(request_id)
                    self._entries.pop(request_id).generation.fail(error)

    def _admit(self, now: float) -> list[pb.Admission]:
        assert self._ledger is not None
        if not len(self._queues):
            return []
        admitted = []
        for ask in admit(self._queues, self._ledger.room(), now):
            self._ledger.take(ask, now)
            entry = self._entries[ask.request_id]
            entry.is_paid = True
            if not entry.last_tokens:
                entry.generation.queue_s = now - ask.arrived
            admitted.append(entry.admission)
        return admitted

    def _apply(self, step: pb.StepReply) -> None:
        assert self._ledger is not None
        now = self._clock()
        self._ledger.observe(step.capacity, step.admitted)
        for row in step.rows:
            entry = self._entries.get(row.request_id)
            if entry is None:
                continue
            if entry.falls_back:
                self._end_before_base(entry, row)
                continue
            if row.tokens and entry.wait is not None:
                self._waits.drop(row.request_id)
                entry.wait = None
            if row.tokens:
                self._shares.charge(entry.ask.flow, generated=len(row.tokens))
            entry.measure(row, self._metrics, now)
            self._deliver(entry, row, now)

    def _give_up(self, now: float) -> None:
        """Do as those said whose adapters were not ready in time."""
        for request_id, wait in self._waits.due(now, self._is_resident):
            self._metrics.adapter_waits_ended.labels(wait.policy).inc()
            entry = self._entries[request_id]
            if wait.policy == "base":
                self._fall_back(entry)
            else:
                entry.generation.fail(wait.error(entry.generation.adapter, now))
                self.cancel(request_id)

    def _fall_back(self, entry: Entry) -> None:
        """Ask the base instead: now if the request waits, when its row has ended if it runs."""
        if self._withdraw(entry.ask.request_id):
            entry.fall_back()
            self._enqueue(entry)
        else:
            entry.falls_back = True
            self._cancels.append(entry.ask.request_id)

    def _end_before_base(self, entry: Entry, row: pb.Row) -> None:
        """Ask the base once the adapter's row has ended; what that still made came too late."""
        if row.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            return
        assert self._ledger is not None
        self._ledger.release(entry.ask)
        if entry.generation.finished:
            del self._entries[row.request_id]
        else:
            entry.fall_back()
            self._enqueue(entry)

    def _deliver(self, entry: Entry, row: pb.Row, now: float) -> None:
        generation = entry.generation
        if row.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            had_finished = generation.finished
            self._feed(generation, row)
            if generation.finished and not had_finished:
                self._cancels.append(row.request_id)
            return
        assert self._ledger is not None
        self._ledger.release(entry.ask)
        if entry.was_refused(row):
            self._put_back(entry, now)
            return
        if entry.lost_its_adapter(row):
            self._lost[row.request_id] = asyncio.create_task(self._find_again(entry))
            return
        del self._entries[row.request_id]
        self._waits.drop(row.request_id)
        self._feed(generation, row)
        if row.finish_reason == pb.FINISH_REASON_ERROR:
            generation.fail(RequestError.from_proto(row.error))
        elif row.finish_reason == pb.FINISH_REASON_CANCELLED:
            generation.fail(unavailable("the shard gave up this request"))

    def _feed(self, generation: Generation, row: pb.Row) -> None:
        try:
            generation.accept(row)
        except Exception:  # one request's text must not end the loop that serves all
            _log.exception("request %d: its tokens cannot be decoded", row.request_id)
            generation.fail(RequestError(pb.ERROR_KIND_INTERNAL, "the tokens cannot be decoded"))

    async def _find_again(self, entry: Entry) -> None:
        """Resolve a request's adapter once more and queue it again; what fails now is its end."""
        request_id = entry.ask.request_id
        try:
            facts = await entry.find_adapter_again()
            entry.readdress(facts, self.needed_pages(*entry.tokens, facts))
        except RequestError as error:
            entry.generation.fail(error)
        except Exception:
            _log.exception("request %d: its adapter cannot be resolved again", request_id)
            entry.generation.fail(RequestError(pb.ERROR_KIND_INTERNAL, "resolving again failed"))
        del self._lost[request_id]
        if entry.generation.finished:
            del self._entries[request_id]
            self._waits.drop(request_id)
        else:
            self._enqueue(entry)

    def _put_back(self, entry: Entry, now: float) -> None:
        pause = min(_FIRST_PAUSE_S * 2**entry.refusals, _LONGEST_PAUSE_S)
        entry.refusals += 1
        self._queues.put_back(entry.ask, now + pause)
        asyncio.get_running_loop().call_later(pause, self._wake.set)

    def _release_all(self) -> list[Entry]:
        """Forget the connection; return whose requests go on elsewhere, in order of arrival."""
        left = [entry for entry in self._entries.values() if self._release(entry)]
        self._ledger = None
        for task in self._lost.values():
            task.cancel()
        self._lost.clear()
        self._prefetched.clear()
        self._queues.clear()
        self._cancels.clear()
        self._entries.clear()
        self._waits.clear()
        self._alarm.set(None)
        self._drain.note(self._clock(), 0, waiting=False)
        return sorted(left, key=lambda entry: entry.ask.arrived)

    def _release(self, entry: Entry) -> bool:
        """Whether a request can go on; one that cannot has ended then."""
        request_id = entry.ask.request_id
        try:
            entry.leave_shard(ran=request_id not in self._queues and request_id not in self._lost)
        except RequestError as error:
            entry.generation.fail(error)
        return not entry.generation.finished

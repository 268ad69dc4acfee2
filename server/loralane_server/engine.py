"""The engine: one thread that runs step after step, and the way in for all other threads.

Whatever they ask for (admit, cancel, load, ...) is put into the inbox; the engine's thread carries
it out between two steps. What happens there is in loop.py.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from loralane_server.adapters.pool import AdapterPool, Tenant
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.device.seam import LaneMemory, StepRunner
from loralane_server.device.threads import use_threads
from loralane_server.errors import ShardError
from loralane_server.inbox import Inbox, promise
from loralane_server.kv.pages import PageTable
from loralane_server.limits import Limits
from loralane_server.loop import StepLoop
from loralane_server.residency import Freed
from loralane_server.rows import Admission, Capacity, Sink
from loralane_server.scheduling.waves import Progress
from loralane_server.usage import LoadTimes, UsageBook

log = logging.getLogger(__name__)


class Engine:
    """Owns the thread. Every method may be called from any other.

    `adapter_ttl`: seconds after which an unused adapter expires unless it has a time of its own,
    0 = never; `clock` gives unix seconds.
    """

    def __init__(
        self,
        runner: StepRunner,
        lanes: LaneMemory,
        store: AdapterStore,
        *,
        pool: AdapterPool,
        pages: PageTable,
        limits: Limits,
        threads: int,
        prefix_cache: bool = True,
        adapter_ttl: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._threads = threads
        self._inbox = Inbox()
        self._usage = UsageBook(adapter_ttl, clock)
        self._loop = StepLoop(
            runner,
            lanes,
            store,
            pool=pool,
            pages=pages,
            limits=limits,
            usage=self._usage,
            post=self._inbox.put,
            prefix_cache=prefix_cache,
        )
        self._residency = self._loop.residency
        # The turn that this brings about tells it, if no step does before.
        store.watch_host(lambda: self._inbox.put(_next_turn))
        self._closed = False
        #: Completes when the loop has ended; with an exception if it should not have.
        self.stopped: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to run steps."""
        self._thread.start()

    def close(self) -> None:
        """End the loop after the current step; rows still running are dropped."""
        self._inbox.put(self._stop)
        self._thread.join()

    def listen(self, sink: Sink) -> None:
        """Send every step's event to `sink` from now on, beginning with the capacity."""
        self._inbox.put(lambda: self._loop.add_sink(sink))

    def leave(self, sink: Sink) -> None:
        """Send `sink` nothing more, and cancel its rows."""
        self._inbox.put(lambda: self._loop.drop_sink(sink))

    def admit(self, admission: Admission, sink: Sink) -> None:
        """Start a row. What becomes of it, refusal included, is told to `sink`."""
        self._inbox.put(lambda: self._loop.admit(admission, sink))

    def cancel(self, request_id: int, sink: Sink) -> None:
        """End a row of `sink` if it still runs; its resources are free before the next step."""
        self._inbox.put(lambda: self._loop.cancel(request_id, sink))

    def load(self, digest: str) -> "Future[None]":
        """Bring an adapter into the pool; the future completes when it is resident."""
        done: Future[None] = promise()

        def begin() -> None:
            try:
                self._residency.load(digest, done)
            except ShardError as error:
                done.set_exception(error)

        self._inbox.put(begin)
        return done

    def unload(self, digest: str) -> "Future[Freed]":
        """Forget an adapter; the future gives what that freed, or `AdapterInUse`."""
        return self._inbox.ask(lambda: self._residency.unload(digest))

    def pin(self, digest: str, pinned: bool) -> "Future[bool]":
        """Pin or unpin an adapter that owns lanes; the future tells whether it does."""
        return self._inbox.ask(lambda: self._residency.pin(digest, pinned))

    def set_ttl(self, digest: str, seconds: float) -> "Future[None]":
        """Let an adapter expire when it is unused for so long, from now on; 0 = never."""
        return self._inbox.ask(lambda: self._usage.set_ttl(digest, seconds))

    def expire(self) -> "Future[list[str]]":
        """Forget the adapters whose time to live is over; the future gives their digests.

        Those that own no lanes are among them. One in use, pinned or being loaded never expires.
        """
        return self._inbox.ask(self._residency.expire)

    def tenants(self) -> Mapping[str, Tenant]:
        """Return who owns lanes, by digest; does not wait for the step that is running."""
        return self._residency.pool.tenants()

    def loading(self) -> "Future[list[Progress]]":
        """Return how far the loads in flight, and the rows that wait for them, have come."""
        return self._inbox.ask(self._loop.progress)

    def load_ms(self, digest: str) -> float:
        """Return how long the adapter's last load took; 0 if it never was loaded."""
        return self._usage.get(digest).load_ms

    def load_times(self, digest: str) -> LoadTimes:
        """Return what the adapter's last load was spent on; zeros if it never was loaded."""
        return self._usage.get(digest).times

    def last_used(self, digest: str) -> float:
        """Return the unix time of the adapter's last use; 0 if never."""
        return self._usage.get(digest).last_used

    def ttl(self, digest: str) -> float:
        """Return after how many unused seconds the adapter expires; 0 = never."""
        return self._usage.ttl(digest)

    @property
    def preemptions(self) -> int:
        """How often a row gave its KV pages back for an older one, since the start."""
        return self._loop.preemptions

    def capacity(self) -> "Future[Capacity]":
        """Return what the shard can still take."""
        return self._inbox.ask(self._loop.capacity)

    def check(self) -> None:
        """Assert that pages, lanes and waves belong to rows and adapters, each to one."""
        self._inbox.ask(self._loop.check).result()

    def _run(self) -> None:
        try:
            use_threads(self._threads)
            with torch.inference_mode():
                while not self._closed:
                    self._inbox.carry_out(self._loop.patience)
                    self._loop.turn()
            self.stopped.set_result(None)
        except BaseException as exc:
            log.exception("the engine failed")
            self.stopped.set_exception(exc)

    def _stop(self) -> None:
        self._closed = True


def _next_turn() -> None:
    """Nothing is asked but that the engine looks around."""

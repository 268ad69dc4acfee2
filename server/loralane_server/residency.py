"""From a digest to lanes: loads adapters layer by layer, between the engine's steps.

The store reads layers on its own threads and hands each to `post`, which brings it to the engine's
thread; here it is written to the lanes of the pool. At most `LANE_BYTES_PER_STEP` enter between two
steps, so that a load never stalls the rows that are running.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from loralane_server.adapters.pool import AdapterPool, Tenant
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.device.seam import ENDS, LaneMemory
from loralane_server.errors import ShardError
from loralane_server.rows import Residency, Row
from loralane_server.usage import LoadTimes, UsageBook

#: A few layers of most adapters, some milliseconds of copying. A load always advances by one.
LANE_BYTES_PER_STEP = 4 << 20

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Load:
    """An adapter on its way into the pool, and who waits for it."""

    digest: str
    started: float
    #: Layers 0 .. written - 1 are in their lanes, and so are the ends; `ENDS` = nothing is yet.
    written: int = ENDS
    #: Whether it has ended well: every layer is written, and what was read was found sound.
    complete: bool = False
    times: LoadTimes = field(default_factory=LoadTimes)
    rows: list[Row] = field(default_factory=list)
    futures: list[Future[None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Staged:
    """A layer that waits for the end of a step."""

    load: Load
    #: None = the load has ended.
    layer: LayerTensors | None
    #: When it was handed over, on the clock of `time.perf_counter`.
    since: float


class Freed(NamedTuple):
    """What unloading an adapter made free."""

    lanes: int
    host_bytes: int


class ResidencyManager:
    """Owns the pool's books and the loads in flight. Touched only by the engine's thread."""

    def __init__(
        self,
        pool: AdapterPool,
        store: AdapterStore,
        lanes: LaneMemory,
        *,
        usage: UsageBook,
        post: Callable[[Callable[[], None]], None],
        fail: Callable[[Row, ShardError], None],
    ) -> None:
        self.pool = pool
        self._store = store
        self._write_lanes = lanes.write_lanes
        self._forget_lanes = lanes.forget
        self._usage = usage
        self._post = post
        self._fail = fail
        self._loads: dict[str, Load] = {}
        #: In order of arrival.
        self._staged: deque[Staged] = deque()
        #: Who entered or left the pool, not yet reported; in order.
        self._moved: dict[str, None] = {}

    @property
    def has_staged(self) -> bool:
        """Whether layers wait to be written."""
        return bool(self._staged)

    @property
    def loads(self) -> Collection[Load]:
        """The loads in flight, in order of their beginning."""
        return self._loads.values()

    def attach(self, row: Row) -> None:
        """Make a row refer to its adapter, loading that if it is not resident.

        Raises `ShardError` (unknown, too large, no lanes) and then nothing has changed.
        """
        digest = row.admission.digest
        self._ensure(digest)
        self.pool.acquire(digest)
        self._usage.used(digest)
        row.lane_pages = self._tenant(digest).pages
        if digest in self._loads:
            self._loads[digest].rows.append(row)
        else:
            row.ready = True

    def detach(self, row: Row) -> None:
        """Make a row that ends refer to its adapter no longer."""
        digest = row.admission.digest
        load = self._loads.get(digest)
        if load is not None and row in load.rows:
            load.rows.remove(row)
        self.pool.release(digest)
        self._usage.used(digest)

    def load(self, digest: str, done: Future[None]) -> None:
        """Bring an adapter into the pool and complete `done` when it is resident."""
        self._ensure(digest)
        self._usage.wanted(digest)
        if digest in self._loads:
            self._loads[digest].futures.append(done)
        else:
            done.set_result(None)

    def unload(self, digest: str) -> Freed:
        """Free an adapter's lanes and its host copy, and list it no more. Raises `AdapterInUse`.

        One act, since loads begin on this thread too: who owns lanes is always listed.
        """
        lanes = self._free_lanes(digest)
        self._usage.forget(digest)
        return Freed(lanes, self._store.unload(digest))

    def pin(self, digest: str, pinned: bool) -> bool:
        """Keep an adapter's lanes and its host copy, or let them go; return whether it owns lanes.

        One that owns none cannot be pinned: then nothing has changed.
        """
        owns_lanes = self.pool.get(digest) is not None
        if owns_lanes or not pinned:
            self._store.pin(digest, pinned)
            self.pool.pin(digest, pinned)
        return owns_lanes

    def expire(self) -> list[str]:
        """Unload the adapters whose time to live is over; return their digests.

        That is whoever was loaded, used or given a time to live here, with lanes or without, but
        for those in use, pinned or being loaded.
        """
        busy = {tenant.digest for tenant in self.pool.tenants().values() if not tenant.evictable}
        expired = self._usage.take_expired(kept=busy)
        for digest in expired:
            self._free_lanes(digest)
        self._store.unload(*expired)
        return expired

    def write_staged(self) -> None:
        """Write staged layers to their lanes, up to the bound between two steps."""
        written = 0
        while self._staged and (written == 0 or written < LANE_BYTES_PER_STEP):
            staged = self._staged.popleft()
            if staged.layer is None:
                self._finish(staged.load)
            else:
                self._write(staged.load, staged.layer, staged.since)
                written += staged.layer.nbytes

    def take_changes(self) -> tuple[Residency, ...]:
        """Return where each adapter is that moved since the last call, in the pool or beside it.

        One that is in the pool is not elsewhere, whatever becomes of its host copy; of one on its
        way there nothing is said until it has arrived or failed.
        """
        changes: list[Residency] = []
        for digest in self._moved | dict.fromkeys(self._store.take_host_moves()):
            tenant = self.pool.get(digest)
            if tenant is None:
                on_host = self._store.is_on_host(digest)
                changes.append(Residency(digest, "host" if on_host else "disk"))
            elif tenant.resident and digest in self._moved:
                changes.append(Residency(digest, "device", tenant.lanes))
        self._moved.clear()
        return tuple(changes)

    def check(self) -> None:
        """Assert that who waits for a load waits for one in flight."""
        self.pool.check()
        for digest, load in self._loads.items():
            tenant = self._tenant(digest)
            assert not tenant.resident
            assert not load.complete
            assert all(row.admission.digest == digest and not row.ready for row in load.rows)

    def _free_lanes(self, digest: str) -> int:
        tenant = self.pool.get(digest)
        lanes = self.pool.evict(digest)
        if tenant is not None:
            self._forget_lanes(tenant.pages)
            self._moved[digest] = None
        return lanes

    def _ensure(self, digest: str) -> None:
        """Give the adapter lanes and start its load, unless it has them already."""
        if self.pool.get(digest) is not None:
            return
        summary = self._store.summary(digest)
        for victim in self.pool.reserve(digest, summary.rank):
            self._forget_lanes(victim.pages)
            self._moved[victim.digest] = None
        load = Load(digest, time.perf_counter())
        self._loads[digest] = load

        def stage(layer: LayerTensors) -> None:
            staged = Staged(load, layer, time.perf_counter())
            self._post(lambda: self._staged.append(staged))

        try:
            read = self._store.load(digest, stage)
        except ShardError:
            self._drop(load)
            raise
        read.add_done_callback(lambda done: self._post(lambda: self._read_ended(load, done)))

    def _write(self, load: Load, layer: LayerTensors, since: float) -> None:
        assert layer.layer == load.written, "the store hands out the ends first, then each layer"
        began = time.perf_counter()
        pages = self._tenant(load.digest).pages
        self._write_lanes(layer.layer, pages, layer.targets, layer.tables)
        load.written += 1
        write_ms = (time.perf_counter() - began) * 1e3
        load.times = load.times.plus(layer.times, write_ms, wait_ms=(began - since) * 1e3)

    def _read_ended(self, load: Load, done: "Future[None]") -> None:
        error = done.exception()
        if error is None:
            self._staged.append(Staged(load, None, time.perf_counter()))
            return
        if not isinstance(error, ShardError):
            log.error("loading adapter %s failed", load.digest, exc_info=error)
            error = ShardError(f"loading the adapter failed: {error}")
        self._staged = deque(item for item in self._staged if item.load is not load)
        for row in list(load.rows):
            self._fail(row, error)
        for future in load.futures:
            future.set_exception(error)
        self._drop(load)

    def _drop(self, load: Load) -> None:
        del self._loads[load.digest]
        self._forget_lanes(self._tenant(load.digest).pages)
        self.pool.abandon(load.digest)
        self._moved[load.digest] = None

    def _finish(self, load: Load) -> None:
        """All layers are written: the adapter is resident and its rows may run."""
        self.pool.complete(load.digest)
        del self._loads[load.digest]
        load.complete = True
        now = time.perf_counter()
        self._usage.loaded(load.digest, (now - load.started) * 1e3, load.times)
        self._moved[load.digest] = None
        for row in load.rows:
            row.cold_ms = (now - row.arrived) * 1e3
            row.ready = True
        for future in load.futures:
            future.set_result(None)

    def _tenant(self, digest: str) -> Tenant:
        tenant = self.pool.get(digest)
        assert tenant is not None
        return tenant

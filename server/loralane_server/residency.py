"""From a digest to lanes: loads adapters layer by layer, between the engine's steps.

The store reads layers on its own threads and hands each to `post`, which brings it to the engine's
thread; here it is written to the lanes of the pool. At most `LANE_BYTES_PER_STEP` enter between two
steps, so that a load never stalls the rows that are running.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from loralane_server.adapters.pool import AdapterPool, Tenant
from loralane_server.adapters.reader import LayerTensors
from loralane_server.adapters.store import AdapterStore
from loralane_server.device.seam import BatchT, Device
from loralane_server.errors import ShardError
from loralane_server.rows import Residency, Row

#: Enough for a layer of most adapters; a load of any size still advances by one layer a step.
LANE_BYTES_PER_STEP = 8 << 20

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Load:
    """An adapter on its way into the pool, and who waits for it."""

    digest: str
    started: float
    rows: list[Row] = field(default_factory=list)
    futures: list[Future[None]] = field(default_factory=list)


class ResidencyManager:
    """Owns the pool's books and the loads in flight. Touched only by the engine's thread."""

    def __init__(
        self,
        pool: AdapterPool,
        store: AdapterStore,
        device: Device[BatchT],
        post: Callable[[Callable[[], None]], None],
        fail: Callable[[Row, ShardError], None],
    ) -> None:
        self.pool = pool
        self._store = store
        self._write_lanes = device.write_lanes
        self._post = post
        self._fail = fail
        self._loads: dict[str, Load] = {}
        #: In order of arrival; None after the last layer of a load.
        self._staged: deque[tuple[Load, LayerTensors | None]] = deque()
        #: Changes not yet reported.
        self._changes: list[Residency] = []
        #: digest -> (milliseconds of the last load, unix time of last use)
        self._load_ms: dict[str, float] = {}
        self._last_used: dict[str, float] = {}

    @property
    def has_staged(self) -> bool:
        """Whether layers wait to be written."""
        return bool(self._staged)

    def load_ms(self, digest: str) -> float:
        """Return how long the adapter's last load took; 0 if it never was loaded."""
        return self._load_ms.get(digest, 0.0)

    def last_used(self, digest: str) -> float:
        """Return when a row last began or ended with the adapter, unix seconds; 0 if never."""
        return self._last_used.get(digest, 0.0)

    def attach(self, row: Row) -> None:
        """Make a row refer to its adapter, loading that if it is not resident.

        Raises `ShardError` (unknown, too large, no lanes) and then nothing has changed.
        """
        digest = row.admission.digest
        self._ensure(digest)
        self.pool.acquire(digest)
        self._last_used[digest] = time.time()
        if digest in self._loads:
            self._loads[digest].rows.append(row)
        else:
            self._make_ready(row)

    def detach(self, row: Row) -> None:
        """Make a row that ends refer to its adapter no longer."""
        digest = row.admission.digest
        load = self._loads.get(digest)
        if load is not None and row in load.rows:
            load.rows.remove(row)
        self.pool.release(digest)
        self._last_used[digest] = time.time()

    def load(self, digest: str, done: Future[None]) -> None:
        """Bring an adapter into the pool and complete `done` when it is resident."""
        self._ensure(digest)
        if digest in self._loads:
            self._loads[digest].futures.append(done)
        else:
            done.set_result(None)

    def unload(self, digest: str) -> int:
        """Free an adapter's lanes; return how many. Raises `AdapterInUse`."""
        lanes = self.pool.evict(digest)
        if lanes:
            self._changes.append(Residency(digest, resident=False, lanes=0))
        return lanes

    def write_staged(self) -> None:
        """Write staged layers to their lanes, up to the bound between two steps."""
        written = 0
        while self._staged and (written == 0 or written < LANE_BYTES_PER_STEP):
            load, layer = self._staged.popleft()
            if layer is None:
                self._finish(load)
            else:
                tenant = self._tenant(load.digest)
                self._write_lanes(layer.layer, tenant.pages, layer.targets, layer.tables)
                written += layer.nbytes

    def take_changes(self) -> tuple[Residency, ...]:
        """Return the changes since the last call."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    def _ensure(self, digest: str) -> None:
        """Give the adapter lanes and start its load, unless it has them already."""
        if self.pool.get(digest) is not None:
            return
        index = self._store.index(digest)
        for victim in self.pool.reserve(digest, index.rank):
            self._changes.append(Residency(victim.digest, resident=False, lanes=0))
        load = Load(digest, time.perf_counter())
        self._loads[digest] = load

        def stage(layer: LayerTensors) -> None:
            self._post(lambda: self._staged.append((load, layer)))

        read = self._store.load(digest, stage)
        read.add_done_callback(lambda done: self._post(lambda: self._read_ended(load, done)))

    def _read_ended(self, load: Load, done: "Future[None]") -> None:
        error = done.exception()
        if error is None:
            self._staged.append((load, None))
            return
        if not isinstance(error, ShardError):
            log.error("loading adapter %s failed", load.digest, exc_info=error)
            error = ShardError(f"loading the adapter failed: {error}")
        del self._loads[load.digest]
        self._staged = deque(item for item in self._staged if item[0] is not load)
        for row in list(load.rows):
            self._fail(row, error)
        for future in load.futures:
            future.set_exception(error)
        self.pool.abandon(load.digest)

    def _finish(self, load: Load) -> None:
        """All layers are written: the adapter is resident and its rows may run."""
        self.pool.complete(load.digest)
        del self._loads[load.digest]
        now = time.perf_counter()
        self._load_ms[load.digest] = (now - load.started) * 1e3
        lanes = self._tenant(load.digest).lanes
        self._changes.append(Residency(load.digest, resident=True, lanes=lanes))
        for row in load.rows:
            row.cold_ms = (now - row.arrived) * 1e3
            self._make_ready(row)
        for future in load.futures:
            future.set_result(None)

    def _make_ready(self, row: Row) -> None:
        row.lane_pages = self._tenant(row.admission.digest).pages
        row.ready = True

    def _tenant(self, digest: str) -> Tenant:
        tenant = self.pool.get(digest)
        assert tenant is not None
        return tenant

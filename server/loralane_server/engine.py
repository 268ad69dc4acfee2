"""The engine: one thread that owns rows, pages and lanes, and runs step after step.

Other threads put events in (admit, cancel, load, ...); between two steps the engine carries them
out, writes the adapter layers that have arrived, lets the planner decide who computes what, runs
the step and tells every listener what changed. Nothing else touches the model or the device.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from loralane_server.adapters.pool import AdapterPool, Tenant
from loralane_server.adapters.store import AdapterStore
from loralane_server.device.seam import BatchT, Device, StepOutput
from loralane_server.device.threads import use_threads
from loralane_server.errors import ShardError
from loralane_server.limits import Limits
from loralane_server.model.decoder import Decoder
from loralane_server.pages import PageTable, pages_for
from loralane_server.planner import plan_step
from loralane_server.residency import ResidencyManager
from loralane_server.rows import (
    NO_PAGES,
    Admission,
    Capacity,
    Finish,
    Row,
    RowEvent,
    Sink,
    StepEvent,
)
from loralane_server.steps import Part, build_step, read_token

log = logging.getLogger(__name__)
T = TypeVar("T")


class Engine(Generic[BatchT]):
    """Owns the rows and the step loop. Public methods may be called from any thread."""

    def __init__(
        self,
        decoder: Decoder[BatchT],
        device: Device[BatchT],
        store: AdapterStore,
        *,
        pool: AdapterPool,
        pages: PageTable,
        limits: Limits,
        threads: int,
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._pages = pages
        self._limits = limits
        self._threads = threads
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._residency = ResidencyManager(pool, store, device, self._inbox.put, self._fail)
        #: In order of arrival.
        self._rows: list[Row] = []
        #: Ended since the last message.
        self._ended: list[Row] = []
        self._sinks: list[Sink] = []
        self._told_capacity: Capacity | None = None
        self._steps = 0
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
        self._inbox.put(lambda: self._add_sink(sink))

    def leave(self, sink: Sink) -> None:
        """Send `sink` nothing more, and cancel its rows."""
        self._inbox.put(lambda: self._drop_sink(sink))

    def admit(self, admission: Admission, sink: Sink) -> None:
        """Start a row. What becomes of it, refusal included, is told to `sink`."""
        self._inbox.put(lambda: self._admit(admission, sink))

    def cancel(self, request_id: int, sink: Sink) -> None:
        """End a row of `sink` if it still runs; its resources are free before the next step."""
        self._inbox.put(lambda: self._cancel(request_id, sink))

    def load(self, digest: str) -> "Future[None]":
        """Bring an adapter into the pool; the future completes when it is resident."""
        done = _promise()

        def begin() -> None:
            try:
                self._residency.load(digest, done)
            except ShardError as error:
                done.set_exception(error)

        self._inbox.put(begin)
        return done

    def unload(self, digest: str) -> "Future[int]":
        """Free an adapter's lanes; the future gives how many, or `AdapterInUse`."""
        return self._ask(lambda: self._residency.unload(digest))

    def pin(self, digest: str, pinned: bool) -> "Future[bool]":
        """Pin or unpin an adapter that owns lanes; the future tells whether it does."""
        return self._ask(lambda: self._residency.pool.pin(digest, pinned))

    def tenants(self) -> "Future[list[Tenant]]":
        """Return who owns lanes now."""
        return self._ask(lambda: list(self._residency.pool.tenants()))

    def load_ms(self, digest: str) -> float:
        """Return how long the adapter's last load took; 0 if it never was loaded."""
        return self._residency.load_ms(digest)

    def last_used(self, digest: str) -> float:
        """Return the unix time of the adapter's last use; 0 if never."""
        return self._residency.last_used(digest)

    def capacity(self) -> "Future[Capacity]":
        """Return what the shard can still take."""
        return self._ask(self._capacity)

    def check(self) -> None:
        """Assert that pages and lanes belong to rows and adapters, each to one. Call when idle."""
        self._ask(self._check).result()

    # The rest runs on the engine's thread only.

    def _run(self) -> None:
        try:
            use_threads(self._threads)
            with torch.inference_mode():
                while not self._closed:
                    self._turn()
            self.stopped.set_result(None)
        except BaseException as exc:
            log.exception("the engine failed")
            self.stopped.set_exception(exc)

    def _turn(self) -> None:
        """Do what was asked, write what arrived, run one step, tell what changed."""
        self._take_inbox()
        self._residency.write_staged()
        runnable = [row for row in self._rows if row.ready]
        counts = plan_step([row.pending for row in runnable], self._limits.step_tokens)
        parts = [(row, n) for row, n in zip(runnable, counts, strict=True) if n]
        if parts:
            self._step(parts)
        self._publish()

    def _take_inbox(self) -> None:
        """Carry out what other threads asked for; wait for it when there is nothing else to do."""
        busy = self._residency.has_staged or any(row.ready for row in self._rows)
        try:
            while True:
                self._inbox.get(block=not busy)()
                busy = True
        except Empty:
            pass

    def _step(self, parts: list[Part]) -> None:
        # Single tokens first, and among them adapters before base: see StepInput.
        parts.sort(key=lambda part: (part[1] > 1, not part[0].lane_pages))
        self._steps += 1
        sampled = [row for row, n in parts if n == row.pending]
        try:
            output = self._compute(parts)
        except Exception as exc:
            log.exception("step %d failed", self._steps)
            for row, _ in parts:
                self._fail(row, ShardError(f"the step failed: {exc}"))
            return
        for row, n in parts:
            row.computed += n
        for i, row in enumerate(sampled):
            finish = row.accept(read_token(output, i, row.admission.logprobs))
            if finish is not None:
                self._end(row)

    def _compute(self, parts: Sequence[Part]) -> StepOutput:
        batch = self._device.batch(build_step(parts))
        return self._device.sample(self._decoder.logits(batch), batch)

    def _admit(self, admission: Admission, sink: Sink) -> None:
        row = Row(admission, sink, NO_PAGES, list(admission.prompt), arrived=time.perf_counter())
        try:
            self._limits.check(admission, running=len(self._rows))
            row.pages = self._pages.take(pages_for(len(row.tokens) + admission.max_tokens))
            if admission.digest:
                self._residency.attach(row)
            else:
                row.ready = True
        except ShardError as error:
            self._pages.give_back(row.pages)
            self._refuse(row, error)
            return
        self._rows.append(row)

    def _cancel(self, request_id: int, sink: Sink) -> None:
        for row in self._rows:
            if row.sink == sink and row.admission.request_id == request_id:
                row.events.append(RowEvent(request_id, finish=Finish.CANCELLED))
                self._end(row)
                return

    def _fail(self, row: Row, error: ShardError) -> None:
        """End a running row with an error."""
        event = RowEvent(row.admission.request_id, finish=Finish.ERROR, error=error)
        row.events.append(event)
        self._end(row)

    def _refuse(self, row: Row, error: ShardError) -> None:
        row.events.append(RowEvent(row.admission.request_id, finish=Finish.ERROR, error=error))
        self._ended.append(row)

    def _end(self, row: Row) -> None:
        """Free all that a row owns; its last events are still to be told."""
        self._rows.remove(row)
        self._ended.append(row)
        self._pages.give_back(row.pages)
        if row.admission.digest:
            self._residency.detach(row)

    def _publish(self) -> None:
        """Tell every listener what changed since the last time."""
        residency = self._residency.take_changes()
        capacity = self._capacity()
        told = [row for row in (*self._ended, *self._rows) if row.events]
        for sink in self._sinks:
            rows = tuple(e for row in told if row.sink == sink for e in row.events)
            if rows or residency or capacity != self._told_capacity:
                sink(StepEvent(self._steps, rows, residency, capacity))
        for row in told:
            row.events.clear()
        self._ended.clear()
        self._told_capacity = capacity

    def _capacity(self) -> Capacity:
        pool = self._residency.pool
        return Capacity(
            rows_total=self._limits.rows,
            rows_free=self._limits.rows - len(self._rows),
            pages_total=self._pages.total,
            pages_free=self._pages.free,
            lanes_total=pool.lanes_total,
            lanes_free=pool.lanes_free,
            lanes_in_use=pool.lanes_in_use,
        )

    def _add_sink(self, sink: Sink) -> None:
        self._sinks.append(sink)
        sink(StepEvent(self._steps, (), (), self._capacity()))

    def _drop_sink(self, sink: Sink) -> None:
        for row in [row for row in self._rows if row.sink == sink]:
            self._end(row)
        self._sinks.remove(sink)

    def _check(self) -> None:
        self._pages.check()
        self._residency.pool.check()
        owned = sum(len(row.pages) for row in self._rows)
        assert owned + self._pages.free == self._pages.total
        users = sum(t.users for t in self._residency.pool.tenants())
        assert users == sum(1 for row in self._rows if row.admission.digest)

    def _stop(self) -> None:
        self._closed = True

    def _ask(self, answer: Callable[[], T]) -> "Future[T]":
        """Compute `answer` on the engine's thread, between two steps."""
        future: Future[T] = _promise()

        def run() -> None:
            try:
                future.set_result(answer())
            except BaseException as exc:
                future.set_exception(exc)

        self._inbox.put(run)
        return future


def _promise() -> "Future[Any]":
    """Return a future that a caller who loses interest cannot cancel under the engine's hands."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future

"""The step loop: what the engine's thread does between and in steps.

A turn writes the adapter layers that have arrived, lets pure functions decide who computes what and
who gives its KV pages back for that (see preemption.py), begins a step, fetches what is due (see
pipeline.py) and tells every listener what changed. Then rows whose adapter is still arriving
compute as far as it has come (see waves.py). Nothing else touches the model or the device.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from loralane_server.adapters.pool import AdapterPool
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.device.seam import LaneMemory, StepOutput, StepRunner
from loralane_server.errors import DeviceFailed, ShardError
from loralane_server.kv.pages import PageTable
from loralane_server.kv.row_pages import RowPages
from loralane_server.limits import Limits
from loralane_server.listeners import Listeners
from loralane_server.pipeline import Pipeline
from loralane_server.residency import ResidencyManager
from loralane_server.rows import Admission, Capacity, Finish, Row, RowEvent, Sink
from loralane_server.scheduling.rates import Rates
from loralane_server.scheduling.schedule import Schedule
from loralane_server.scheduling.waves import Progress, Waves
from loralane_server.steps import Part, in_step_order, read_token, sampled_rows
from loralane_server.usage import UsageBook

#: With nothing to compute but waves, layers that come this fast are gathered first: the thread that
#: reads them would only take turns with the step for the same cores.
GATHER_S: Final = 0.002

T = TypeVar("T")

log = logging.getLogger(__name__)


class StepLoop:
    """Owns what runs. Touched only by the engine's thread.

    `post` brings a call from any thread to the engine's, before the next turn; `clock` gives
    seconds, to measure steps by.
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
        usage: UsageBook,
        post: Callable[[Callable[[], None]], None],
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._pipeline = Pipeline(runner, clock)
        self._limits = limits
        self.residency = ResidencyManager(
            pool, store, lanes, usage=usage, post=post, fail=self._fail
        )
        self._waves = Waves(runner, limits.step_tokens)
        self._schedule = Schedule(
            RowPages(pages, prefix_cache=prefix_cache),
            limits.step_tokens,
            self._waves.drop,
            limits.doubling,
        )
        self._listeners = Listeners()
        #: Ended since the last message.
        self._ended: list[Row] = []
        #: Executions of the model so far; one in parts counts when it ends.
        self._steps = 0
        self._rates = Rates()

    @property
    def preemptions(self) -> int:
        """How often a row gave its KV pages back for an older one."""
        return self._schedule.preemptions

    @property
    def patience(self) -> float | None:
        """Seconds to wait for something new before the next turn; None = as long as it takes."""
        if self.residency.has_staged or self._pipeline.busy:
            return 0.0
        if any(row.runnable for row in self._schedule.rows):
            return 0.0
        if self._waves.can_advance:
            return GATHER_S if self.residency.loads else 0.0
        return None

    def turn(self) -> None:
        """Write what arrived, begin a step, fetch those due, tell what changed; then the waves."""
        arrived = self.residency.has_staged
        self.residency.write_staged()
        parts, held = self._schedule.next_turn(may_stop=not self._pipeline.busy)
        if parts:
            self._submit(in_step_order(parts))
        self._fetch(self._pipeline.due(submitted=bool(parts)))
        self._publish()
        if not held:
            self._form_waves()
        if parts:
            self._advance_waves(sum(n == 1 for _, n in parts))
        elif not (arrived and self.residency.loads):
            self._advance_waves(None)

    def admit(self, admission: Admission, sink: Sink) -> None:
        """Let a row in, or refuse it. It begins when there are pages for it."""
        self._listeners.count(sink)
        row = Row(admission, sink, list(admission.prompt), arrived=time.perf_counter())
        try:
            self._limits.check(admission, len(self._schedule.rows), self._schedule.pages.total)
            if admission.digest:
                self.residency.attach(row)
            else:
                row.ready = True
        except ShardError as error:
            _add_error(row, error)
            self._ended.append(row)
            return
        self._schedule.add(row)

    def cancel(self, request_id: int, sink: Sink) -> None:
        """End a row of `sink` if it still runs."""
        for row in self._schedule.rows:
            if row.sink == sink and row.admission.request_id == request_id:
                row.events.append(RowEvent(request_id, finish=Finish.CANCELLED))
                self._end(row)
                return

    def add_sink(self, sink: Sink) -> None:
        """Tell `sink` from now on what steps change."""
        self._listeners.add(sink, self._steps, self.capacity())

    def drop_sink(self, sink: Sink) -> None:
        """Tell `sink` nothing more and end its rows."""
        for row in [row for row in self._schedule.rows if row.sink == sink]:
            self._end(row)
        self._listeners.remove(sink)

    def capacity(self) -> Capacity:
        """Return what the shard can still take."""
        pool, schedule, pages = self.residency.pool, self._schedule, self._schedule.pages
        graphs = self._runner.graphs
        return Capacity(
            rows_total=self._limits.rows,
            rows_free=self._limits.rows - len(schedule.rows),
            pages_total=pages.total,
            pages_free=schedule.pages_free,
            lanes_total=pool.lanes_total,
            lanes_free=pool.lanes_free,
            lanes_in_use=pool.lanes_in_use,
            pages_cached=pages.cached,
            pending_tokens=schedule.pending_tokens,
            step_ms=self._rates.step_ms,
            token_ms=self._rates.token_ms,
            graphs_declared=graphs.declared,
            graphs_compiled=graphs.compiled,
        )

    def progress(self) -> list[Progress]:
        """Return how far loads, and the rows that wait for them, have come."""
        return self._waves.progress(self.residency.loads)

    def check(self) -> None:
        """Assert that pages, lanes and waves belong to rows and adapters, each to one."""
        self._schedule.check()
        self.residency.check()
        self._waves.check(self._schedule.rows)
        self._pipeline.check(self._schedule.rows)
        self._listeners.check()
        users = sum(t.users for t in self.residency.pool.tenants().values())
        assert users == sum(1 for row in self._schedule.rows if row.admission.digest)

    def _submit(self, parts: Sequence[Part]) -> None:
        self._schedule.cover(parts)
        if self._attempt(parts, partial(self._pipeline.submit, parts)) is not None:
            self._schedule.advance(parts)

    def _fetch(self, count: int) -> None:
        """Wait for so many of the steps under way, and give their rows what they sampled."""
        for _ in range(count):
            fetched = self._pipeline.fetch()
            self._rates = self._rates.after(fetched.prompt_tokens, fetched.seconds)
            self._accept(fetched.sampled, fetched.output)

    def _form_waves(self) -> None:
        """Begin waves for loads that can carry one, with the rows for which there is room."""
        for load in self._waves.due(self.residency.loads):
            parts = self._waves.parts(self._schedule.beginners(load.rows))
            self._schedule.cover(parts)
            if parts:
                self._waves.form(load, parts)

    def _advance_waves(self, streams: int | None) -> None:
        """Run what may be run of the waves beside a step of so many decoding rows, or of none."""
        for wave, count in self._waves.plan(streams):
            output = self._attempt(wave.parts, partial(self._waves.run, wave, count))
            if output is not None:
                sampled = [row for _, row in sampled_rows(wave.parts)]
                self._waves.drop(wave.load.digest)
                self._schedule.advance(wave.parts)
                self._accept(sampled, output)
            self._publish()

    def _attempt(self, parts: Sequence[Part], act: Callable[[], T | None]) -> T | None:
        """Return what `act` does; if it raises, fail the rows of the step and return None.

        What steps before it chose, the rows are told first. Raises `DeviceFailed`: no later step
        could be trusted.
        """
        try:
            return act()
        except DeviceFailed:
            raise
        except Exception as exc:
            log.exception("the step after step %d failed", self._steps)
            self._fetch(self._pipeline.due(submitted=False))
            for row, _ in parts:
                if not row.ended:
                    self._fail(row, ShardError(f"the step failed: {exc}"))
            return None

    def _accept(self, sampled: Sequence[Row], output: StepOutput) -> None:
        """Count a step that was run, and give rows what it sampled; who has ended gets nothing."""
        self._steps += 1
        for i, row in enumerate(sampled):
            if row.ended:
                continue
            finish = row.accept(read_token(output, i, row.admission.logprobs))
            if finish is None:
                self._schedule.extend(row)
            else:
                self._end(row)

    def _fail(self, row: Row, error: ShardError) -> None:
        """End a running row with an error."""
        _add_error(row, error)
        self._end(row)

    def _end(self, row: Row) -> None:
        """Free all that a row owns; its last events are still to be told."""
        self._schedule.remove(row)
        self._ended.append(row)
        if row.admission.digest:
            self.residency.detach(row)

    def _publish(self) -> None:
        """Tell every listener what changed since the last time."""
        rows = [*self._ended, *self._schedule.rows]
        changes = self.residency.take_changes()
        self._listeners.tell(self._steps, rows, changes, self.capacity())
        self._ended.clear()


def _add_error(row: Row, error: ShardError) -> None:
    event = RowEvent(row.admission.request_id, finish=Finish.ERROR, error=error)
    row.events.append(event)

"""One simulated shard: rows, steps that the server's own planner fills, and adapters.

Between two prompts only decoding rows are left and every step is like the last, so those steps are
passed over in one go; whatever becomes ready meanwhile waits for the end of the step under way.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from loralane_server.scheduling.planner import plan_step

from bench.sim.costs import Costs
from bench.sim.events import Events
from bench.sim.store import Store

BASE_RANK: Final = 0


@dataclass(eq=False, slots=True)
class Row:
    """One request on a shard."""

    request_id: int
    adapter: str
    rank: int
    #: Tokens of the prompt, and to generate; at least one each.
    prompt: int
    answer: int
    #: Tokens of the prompt still to be computed.
    pending: int = field(init=False)

    def __post_init__(self) -> None:
        self.pending = self.prompt


@dataclass(frozen=True, slots=True)
class Report:
    """What a shard says after a step."""

    #: Those that have their first token since the last report.
    first: Sequence[Row]
    ended: Sequence[Row]


@dataclass(slots=True)
class _Stride:
    """Steps that are alike: `count` of them, each so long."""

    began: float
    step_s: float
    count: int
    #: Tokens of each prompt in them, by row; with any, there is only one step.
    chunks: Sequence[tuple[Row, int]] = field(default_factory=tuple)


class SimShard:
    """Rows come by `accept`; `report` is called after every step that is not
    passed over."""

    def __init__(
        self,
        events: Events,
        costs: Costs,
        report: Callable[[Report], None],
        moved: Callable[[str, str], None],
    ) -> None:
        self._events = events
        self._costs = costs
        self._report = report
        self.store = Store(events, costs, self._adapter_ready, moved)
        #: Rows that wait for their adapter, by adapter.
        self._blocked: dict[str, list[Row]] = {}
        #: Rows whose prompt is not yet computed, in order.
        self._prompts: list[Row] = []
        #: Decoding rows with the step after which each ends, the first to end at the front.
        self._decoding: list[tuple[int, int, Row]] = []
        self._ranks: Counter[int] = Counter()
        self._steps = 0
        self._stride: _Stride | None = None

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self._prompts) + len(self._decoding) + sum(map(len, self._blocked.values()))

    @property
    def decoding(self) -> int:
        """How many rows have their first token."""
        return len(self._decoding)

    @property
    def step_s(self) -> float:
        """How long a step of the decoding rows takes."""
        return self._costs.step(len(self._decoding), 0, max(self._ranks, default=BASE_RANK))

    @property
    def pending(self) -> int:
        """Tokens of prompts that are still to be computed."""
        return sum(row.pending for row in (*self._prompts, *self.blocked))

    @property
    def blocked(self) -> list[Row]:
        """Rows that wait for their adapter."""
        return [row for rows in self._blocked.values() for row in rows]

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache."""
        generated = (row.answer - (last - self._steps) for last, _, row in self._decoding)
        prompts = sum(row.prompt for _, _, row in self._decoding)
        return prompts + sum(generated) + sum(r.prompt - r.pending for r in self._prompts)

    def accept(self, rows: Sequence[Row]) -> None:
        """Take rows in; each begins when its adapter is resident, after the step under way."""
        for row in rows:
            if self.store.hold(row.adapter):
                self._prompts.append(row)
            else:
                self._blocked.setdefault(row.adapter, []).append(row)
        self._go_on()

    def check(self) -> None:
        """Assert what must hold between events."""
        self.store.check()
        assert self.rows <= self._costs.rows
        assert all(row.pending for row in self._prompts)
        assert not any(row.pending for _, _, row in self._decoding)
        assert (self._stride is None) == (not self._prompts and not self._decoding)

    def _adapter_ready(self, adapter: str) -> None:
        self._prompts += self._blocked.pop(adapter, [])
        self._go_on()

    def _go_on(self) -> None:
        """Begin to compute, or let steps that are passed over end early for a new prompt."""
        if not self._prompts:
            return
        stride = self._stride
        if stride is None:
            self._begin()
        elif not stride.chunks:
            passed = (self._events.now - stride.began) / stride.step_s
            if (count := math.floor(passed) + 1) < stride.count:
                self._start(_Stride(stride.began, stride.step_s, count))

    def _begin(self) -> None:
        decoding = len(self._decoding)
        if not self._prompts:
            if decoding:
                count = self._decoding[0][0] - self._steps
                self._start(_Stride(self._events.now, self.step_s, count))
            return
        pending = [1] * decoding + [row.pending for row in self._prompts]
        plan = plan_step(pending, self._costs.step_tokens)[decoding:]
        chunks = [pair for pair in zip(self._prompts, plan, strict=True) if pair[1]]
        rank = max(self._ranks, default=BASE_RANK)
        rank = max([rank, *(row.rank for row, _ in chunks)])
        seconds = self._costs.step(decoding, sum(plan), rank)
        self._start(_Stride(self._events.now, seconds, 1, chunks))

    def _start(self, stride: _Stride) -> None:
        self._stride = stride
        end = max(self._events.now, stride.began + stride.count * stride.step_s)
        self._events.at(end, lambda: self._end(stride))

    def _end(self, stride: _Stride) -> None:
        if stride is not self._stride:
            return
        self._stride = None
        self._steps += stride.count
        ended = self._decoded()
        first = self._prompted(stride.chunks)
        ended += [row for row in first if row.answer == 1]
        for row in ended:
            self.store.release(row.adapter)
        self._report(Report(first, ended))
        if self._stride is None:  # else somebody was admitted, who began it
            self._begin()

    def _decoded(self) -> list[Row]:
        ended = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            row = heapq.heappop(self._decoding)[2]
            self._ranks[row.rank] -= 1
            if not self._ranks[row.rank]:
                del self._ranks[row.rank]
            ended.append(row)
        return ended

    def _prompted(self, chunks: Sequence[tuple[Row, int]]) -> list[Row]:
        for row, tokens in chunks:
            row.pending -= tokens
        first = [row for row, _ in chunks if not row.pending]
        for row in first:
            self._prompts.remove(row)
            if row.answer > 1:
                self._ranks[row.rank] += 1
                last = self._steps + row.answer - 1
                heapq.heappush(self._decoding, (last, row.request_id, row))
        return first

"""A step loop over a model of two layers whose answers one can compute by hand.

What a layer makes of a token is a hash of what it takes, of what it made of the token before, which
it reads from the row's KV pages, and of the adapter in the row's lanes. The next token is what the
last layer made of the last token, modulo the vocabulary. So one wrong page, lane or order of events
anywhere changes all that follows. Adapters arrive when the test says so.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from loralane_server.adapters.pool import AdapterPool
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.store.entries import AdapterSummary
from loralane_server.device.seam import (
    ENDS,
    GraphCount,
    Span,
    StepInput,
    StepOutput,
    chosen_for,
)
from loralane_server.errors import AdapterNotFound, DeviceFailed, ShardError
from loralane_server.inbox import promise
from loralane_server.kv.pages import PAGE_TOKENS, PageTable
from loralane_server.limits import Limits
from loralane_server.loop import StepLoop
from loralane_server.model.eager import EagerRunner
from loralane_server.rows import RowEvent, StepEvent
from loralane_server.usage import UsageBook

LAYERS = 2
VOCAB = 50


def mixed(*parts: object) -> int:
    return hash(parts) % 1_000_003  # of ints and nested tuples of them: the same in every process


def lane_of(digest: str) -> int:
    """What an adapter writes to its lanes; 0 = the base."""
    return sum(map(ord, digest))


def sampled(last: int, seed: int, position: int) -> int:
    return mixed(last, seed, position) % VOCAB


def continued(digest: str, prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The tokens that must follow, computed without pages, steps or lanes."""
    tokens, state = list(prompt), [0] * LAYERS
    for position in range(len(prompt) + count - 1):
        value = tokens[position]
        for layer in range(LAYERS):
            value = state[layer] = mixed(value, state[layer], lane_of(digest), layer)
        if position + 1 >= len(prompt):
            tokens.append(sampled(value, seed, position + 1))
    return tokens[len(prompt) :]


class PagedDevice:
    """Owns the pages and lanes. A step's input is its own form on this device."""

    name = "fake"

    def __init__(self) -> None:
        #: By layer and slot.
        self.kv: list[dict[int, int]] = [{} for _ in range(LAYERS)]
        #: By layer and lane page.
        self.lanes: list[dict[int, int]] = [{} for _ in range(LAYERS)]
        #: Of every step, or part of one: its spans.
        self.steps: list[Sequence[Span]] = []
        #: Tokens that it chose.
        self.chosen = 0
        self.broken = False
        self.lost = False

    def batch(self, step: StepInput) -> StepInput:
        self.steps.append(step.spans)
        return step

    def layer(self, layer: int, values: list[int], step: StepInput) -> list[int]:
        if self.broken:
            raise RuntimeError("out of order")
        if self.lost:
            raise DeviceFailed("the memory is gone")
        made, begin = [], 0
        for span in step.spans:
            made += self._row(layer, values[begin : begin + span.length], span)
            begin += span.length
        return made

    def sample(self, last: list[int], step: StepInput) -> StepOutput:
        where = step.sample_at.tolist()
        tokens = [
            sampled(last[at], sampling.seed, int(step.positions[at]) + 1)
            for at, sampling in zip(where, step.sampling, strict=True)
        ]
        self.chosen += len(tokens)
        return StepOutput(np.array(tokens, dtype=np.int64))

    def write_lanes(
        self, layer: int, pages: Sequence[int], targets: Mapping[str, Any], tables: object
    ) -> None:
        if layer != ENDS:
            self.lanes[layer] |= dict.fromkeys(pages, targets["lane"])

    def forget(self, pages: Sequence[int]) -> None:
        for lanes in self.lanes:
            for page in pages:
                lanes.pop(page, None)

    def _row(self, layer: int, values: Sequence[int], span: Span) -> list[int]:
        lane = self.lanes[layer][span.lane_pages[0]] if span.lane_pages else 0
        kv = self.kv[layer]
        state = kv[self._slot(span, span.start - 1)] if span.start else 0
        made = []
        for position, value in enumerate(values, span.start):
            state = kv[self._slot(span, position)] = mixed(value, state, lane, layer)
            made.append(state)
        return made

    @staticmethod
    def _slot(span: Span, position: int) -> int:
        return int(span.pages[position // PAGE_TOKENS]) * PAGE_TOKENS + position % PAGE_TOKENS


class LateDevice(PagedDevice):
    """Does what it is told as late as it may: once somebody waits for it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Callable[[], None]] = deque()

    def write_lanes(self, *args: Any) -> None:
        write = super().write_lanes
        self.queue.append(lambda: write(*args))

    def forget(self, pages: Sequence[int]) -> None:
        forget = super().forget
        self.queue.append(lambda: forget(pages))


class LateRunner:
    """Submits steps to a `LateDevice`, and writes down what it was asked: begin or fetch which."""

    depth = 2
    parts = 0
    graphs = GraphCount()

    def __init__(self, decoder: Any, device: LateDevice) -> None:
        self._eager = EagerRunner[Any](decoder, device)
        self._device = device
        self._chosen: dict[int, int] = {}
        self._count = 0
        self.asked: list[tuple[str, int]] = []
        self.refuses = False

    def submit(self, step: StepInput) -> "LateStep":
        if self.refuses:
            raise RuntimeError("no such step")
        late = LateStep(self, self._count)
        self._count += 1
        self.asked.append(("begin", late.number))
        self._device.queue.append(lambda: late.done.append(self._compute(step)))
        return late

    def fetch(self, step: "LateStep") -> StepOutput:
        self.asked.append(("fetch", step.number))
        while not step.done:
            self._device.queue.popleft()()
        return step.done[0]

    def begin(self, step: StepInput) -> Any:
        raise NotImplementedError

    def _compute(self, step: StepInput) -> StepOutput:
        """Put in what the step before chose, by its spans; compute; note what this one chooses."""
        tokens = [self._chosen[chosen_for(t)] if t < 0 else t for t in step.tokens.tolist()]
        output = self._eager.submit(replace(step, tokens=np.array(tokens, np.int32))).fetch()
        ends = np.cumsum([span.length for span in step.spans]) - 1
        spans = np.searchsorted(ends, step.sample_at).tolist()
        self._chosen = dict(zip(spans, output.tokens.tolist(), strict=True))
        return output


@dataclass
class LateStep:
    runner: LateRunner
    number: int
    done: list[StepOutput] = field(default_factory=list)

    def fetch(self) -> StepOutput:
        return self.runner.fetch(self)


class PagedDecoder:
    """Runs the device's layers, all at once or in parts."""

    layers = LAYERS

    def __init__(self, device: PagedDevice) -> None:
        self._device = device

    def logits(self, step: StepInput) -> list[int]:
        return self.finish(self.advance(self.begin(step), 0, LAYERS, step), step)

    def begin(self, step: StepInput) -> list[int]:
        return step.tokens.tolist()  # type: ignore[no-any-return]

    def advance(self, flow: list[int], first: int, last: int, step: StepInput) -> list[int]:
        for layer in range(first, last):
            flow = self._device.layer(layer, flow, step)
        return flow

    def finish(self, flow: list[int], step: StepInput) -> list[int]:
        return flow


@dataclass
class Flight:
    """A load under way."""

    on_layer: Callable[[LayerTensors], None]
    layers: deque[int]
    done: "Future[None]" = field(default_factory=promise)


class HandedStore:
    """Adapters by digest, of one lane page each, handed over layer by layer by the test."""

    def __init__(self, digests: Sequence[str]) -> None:
        self._digests = frozenset(digests)
        self.flights: dict[str, Flight] = {}

    def summary(self, digest: str) -> AdapterSummary:
        if digest not in self._digests:
            raise AdapterNotFound(f"{digest} is not known")
        return AdapterSummary(digest, digest, "local", 8, 0, 1, ("q_proj",))

    def load(self, digest: str, on_layer: Callable[[LayerTensors], None]) -> "Future[None]":
        flight = Flight(on_layer, deque([ENDS, *range(LAYERS)]))
        self.flights[digest] = flight
        return flight.done

    def hand_over(self, digest: str) -> None:
        """Let the next layer of a load arrive, or its end."""
        flight = self.flights[digest]
        if flight.layers:
            targets: Any = {"lane": lane_of(digest)}
            flight.on_layer(LayerTensors(flight.layers.popleft(), targets, nbytes=1))
        else:
            del self.flights[digest]
            flight.done.set_result(None)

    def break_off(self, digest: str, error: ShardError) -> None:
        self.flights.pop(digest).done.set_exception(error)

    def take_host_moves(self) -> tuple[str, ...]:
        return ()

    def is_on_host(self, digest: str) -> bool:
        return False


class PagedShard:
    """The real loop, turned by the test. `late`: on a `LateDevice`, one step ahead."""

    def __init__(
        self,
        *,
        pages: int,
        rows: int = 8,
        lanes: int = 16,
        step_tokens: int = 64,
        length: int = 512,
        prefix_cache: bool = True,
        doubling: int | None = None,
        digests: Sequence[str] = ("one", "two", "three"),
        clock: Callable[[], float] = time.perf_counter,
        late: bool = False,
    ) -> None:
        self.device = LateDevice() if late else PagedDevice()
        self.store = HandedStore(digests)
        self._calls: deque[Callable[[], None]] = deque()
        loop: Any = StepLoop
        decoder: Any = PagedDecoder(self.device)
        runner = LateRunner if late else EagerRunner[Any]
        self.runner: Any = runner(decoder, self.device)
        self.loop: StepLoop = loop(
            self.runner,
            self.device,
            self.store,
            pool=AdapterPool(lanes),
            pages=PageTable(pages),
            limits=Limits(rows, length, VOCAB, step_tokens, doubling),
            usage=UsageBook(0.0, lambda: 0.0),
            post=self._calls.append,
            prefix_cache=prefix_cache,
            clock=clock,
        )
        self.events: list[StepEvent] = []
        self.rows: dict[int, list[RowEvent]] = {}
        self.loop.add_sink(self.sink)

    def sink(self, event: StepEvent) -> None:
        self.events.append(event)
        for row in event.rows:
            self.rows.setdefault(row.request_id, []).append(row)

    def turn(self, count: int = 1) -> None:
        """Carry out what was posted and turn the loop, so many times."""
        for _ in range(count):
            while self._calls:
                self._calls.popleft()()
            self.loop.turn()

    def load(self, digest: str) -> None:
        """Let a load arrive in full."""
        while digest in self.store.flights:
            self.store.hand_over(digest)
        self.turn()

    def tokens(self, request_id: int) -> list[int]:
        return [token.id for event in self.rows.get(request_id, []) for token in event.tokens]

    @property
    def dropped(self) -> int:
        """How many tokens were chosen and nobody was told."""
        return self.device.chosen - sum(len(self.tokens(request_id)) for request_id in self.rows)

    def last(self, request_id: int) -> RowEvent | None:
        """What ended a row; None = nothing yet."""
        events = self.rows.get(request_id)
        return events[-1] if events and events[-1].finish else None

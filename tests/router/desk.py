"""A dispatcher whose stream and clock a test cranks by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.errors import RequestError
from loralane_router.metrics.counters import Metrics
from loralane_router.model import Model
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.deadlines import AdapterWait
from loralane_router.queueing.dispatch import Dispatcher
from loralane_router.queueing.entry import Entry
from loralane_router.text.generation import Accepted, Generation

from tests.router.conftest import tokenizer_files

CODEC = Model(pb.InfoReply(vocab_size=260, max_model_len=99), tokenizer_files()).codec
LANES = 8


class HandCranked:
    """A stream on which steps come when the test says so; keeps what was sent."""

    def __init__(self) -> None:
        self.steps: list[pb.StepReply] = []
        self.sent: list[pb.RunRequest] = []

    def take(self) -> list[pb.StepReply]:
        steps, self.steps = self.steps, []
        if None in steps:
            raise RequestError(pb.ERROR_KIND_UNAVAILABLE, "gone")
        return steps

    async def write(self, request: pb.RunRequest) -> None:
        self.sent.append(request)


class Desk:
    """A dispatcher, its stream, its clock, and what the shard has said of residency."""

    def __init__(self, rows: int = 4, lanes: int = 2 * LANES) -> None:
        self.now, self.resident = 0.0, set[str]()
        self.metrics = Metrics()
        self.handed_back: list[Entry] = []
        self.dispatcher = Dispatcher(
            self.metrics,
            lambda entries, _: self.handed_back.extend(entries),
            lambda: self.now,
            is_resident=self.resident.__contains__,
        )
        self.stream = HandCranked()
        self._rows, self._lanes = rows, lanes
        #: Digests of running rows by request id, and how many were ever admitted.
        self.running: dict[int, str] = {}
        self._admitted = 0
        self.dispatcher.connect(self._capacity())
        self.serving = asyncio.create_task(self.dispatcher.serve(self.stream, lambda step: None))

    def submit(self, id: int, digest: str, wait: AdapterWait | None = None) -> Generation:
        may_fall_back = wait is not None and wait.policy == "base"
        accepted = Accepted(id, 3, f"name-of-{digest}", digest, 0, 9, (), may_fall_back)
        generation = Generation(accepted, CODEC, self.dispatcher.cancel)
        ask = Ask(id, digest, 1, LANES if digest else 0, self.now, flow=digest, tokens=3)
        admission = pb.Admission(request_id=id, digest=digest, prompt=[1, 2, 3], max_tokens=9)
        self.dispatcher.submit(Entry(ask, admission, generation, digest, wait=wait))
        return generation

    async def turn(self, to: float | None = None, *rows: pb.Row) -> pb.RunRequest:
        """Let time pass and the loop run once, with a step if there are rows; what was sent."""
        self.now = self.now if to is None else to
        for row in rows:
            if row.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                del self.running[row.request_id]
        if rows:
            step = pb.StepReply(rows=rows, capacity=self._capacity(), admitted=self._admitted)
            self.stream.steps.append(step)
        before = len(self.stream.sent)
        self.dispatcher.wake()
        for _ in range(5):
            await asyncio.sleep(0)
        self.dispatcher.check()
        sent = pb.RunRequest()
        for request in self.stream.sent[before:]:
            sent.MergeFrom(request)
        for admission in sent.admit:
            self.running[admission.request_id] = admission.digest
            self._admitted += 1
        return sent

    async def break_off(self) -> None:
        self.stream.steps.append(None)
        self.dispatcher.wake()
        with pytest.raises(RequestError, match="gone"):
            await self.serving

    def _capacity(self) -> pb.Capacity:
        used = LANES * len(set(self.running.values()) - {""})
        return pb.Capacity(
            rows_total=self._rows,
            rows_free=self._rows - len(self.running),
            pages_total=99,
            pages_free=99 - len(self.running),
            page_tokens=16,
            lanes_total=self._lanes,
            lanes_free=self._lanes - used,
            lanes_in_use=used,
        )


def token(id: int, token_id: int, finish: str = "UNSPECIFIED") -> pb.Row:
    reason = getattr(pb, f"FINISH_REASON_{finish}")
    return pb.Row(request_id=id, tokens=[pb.Token(id=token_id)], finish_reason=reason)


def cancelled(id: int) -> pb.Row:
    return pb.Row(request_id=id, finish_reason=pb.FINISH_REASON_CANCELLED)


@asynccontextmanager
async def desks() -> AsyncIterator[Callable[..., Desk]]:
    """Make desks by what is yielded; they end with the context."""
    made: list[Desk] = []

    def make(**fields: int) -> Desk:
        made.append(Desk(**fields))
        return made[-1]

    yield make
    for desk in made:
        desk.serving.cancel()
        await asyncio.gather(desk.serving, return_exceptions=True)

"""Giving up on an adapter: who does, what becomes of it on the shard, and the base's answer.

The first part cranks a dispatcher's stream by hand, on a clock of its own; the second has a whole
router in front of a shard that resolves when it is told to.
"""

import asyncio
import random
import time
from dataclasses import dataclass

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.errors import RequestError
from loralane_router.metrics.counters import Metrics
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.deadlines import AdapterWait
from loralane_router.queueing.dispatch import Dispatcher
from loralane_router.queueing.entry import Entry
from loralane_router.requests import Parameters, TextRequest
from loralane_router.text.generation import Accepted, Generation

from tests.router.conftest import FakeAdapter
from tests.router.desk import CODEC, LANES, Desk, HandCranked, cancelled, desks, token
from tests.router.slow_shard import SlowShard


@pytest.fixture
async def desk():
    async with desks() as make:
        yield make


def fail(at_most_s: float = 2.0) -> AdapterWait:
    return AdapterWait(0.0, at_most_s, "fail")


def base(at_most_s: float = 2.0) -> AdapterWait:
    return AdapterWait(0.0, at_most_s, "base")


async def error_of(generation: Generation) -> RequestError:
    with pytest.raises(RequestError) as caught:
        async for _ in generation:
            pass
    return caught.value


def text_of(generation: Generation) -> str:
    """Return what is there, without waiting for more."""
    return "".join(delta.text for delta in generation._deltas)


async def test_who_waits_for_lanes_gives_up_at_its_end_and_not_before(desk):
    one = desk(lanes=LANES)
    one.submit(1, "a")
    waiting = one.submit(2, "b", fail())
    assert [a.request_id for a in (await one.turn()).admit] == [1]

    before = await one.turn(1.99)
    still_waiting = not waiting.finished
    sent = await one.turn(2.0)

    assert still_waiting
    assert not before.cancel
    assert not sent.cancel, "the shard never heard of it"
    error = await error_of(waiting)
    assert (error.kind, error.status.http) == (pb.ERROR_KIND_LOADING, 503)
    assert "'name-of-b' was not ready 2.000 s" in error.message
    assert one.dispatcher.waiting == 0


async def test_a_wait_for_rows_alone_is_no_wait_for_the_adapter(desk):
    one = desk(rows=1)
    one.resident.add("b")
    one.submit(1, "")
    waiting = one.submit(2, "b", fail())
    await one.turn()

    await one.turn(1000.0)
    waits_on = not waiting.finished
    one.resident.clear()
    await one.turn(1001.0)

    assert waits_on
    assert (await error_of(waiting)).kind == pb.ERROR_KIND_LOADING


async def test_an_admitted_row_that_still_waits_for_its_load_is_given_up_on_the_shard(desk):
    one = desk()
    loading = one.submit(1, "a", fail())
    assert (await one.turn()).admit

    sent = await one.turn(2.0)
    await one.turn(2.1, cancelled(1))

    assert list(sent.cancel) == [1]
    assert (await error_of(loading)).kind == pb.ERROR_KIND_LOADING
    assert one.dispatcher.work().running == 0
    assert one.dispatcher.free_rows == 4


async def test_an_admitted_row_whose_adapter_is_there_waits_for_its_prompt(desk):
    one = desk()
    generation = one.submit(1, "a", fail())
    await one.turn()
    one.resident.add("a")

    sent = await one.turn(2.0)

    assert not sent.cancel
    assert not generation.finished


async def test_after_its_first_token_nobody_gives_up(desk):
    one = desk()
    generation = one.submit(1, "a", base())
    await one.turn()
    await one.turn(1.0, token(1, 98))

    sent = await one.turn(99.0)

    assert not sent.cancel
    assert (text_of(generation), generation.is_fallback) == ("b", False)


async def test_who_may_fall_back_waits_for_the_base_instead_of_its_lanes(desk):
    one = desk(lanes=LANES)
    one.submit(1, "a")
    waiting = one.submit(2, "b", base())
    await one.turn()

    (admission,) = (await one.turn(2.0)).admit
    await one.turn(2.1, token(2, 99))

    assert (admission.request_id, admission.digest) == (2, "")
    assert list(admission.prompt) == [1, 2, 3]
    assert admission.max_tokens == 9
    assert text_of(waiting) == "c"
    assert (waiting.is_fallback, waiting.adapter, waiting.adapter_digest) == (True, "", "")


async def test_a_row_that_falls_back_begins_anew_when_the_adapters_has_ended(desk):
    one = desk()
    generation = one.submit(1, "a", base())
    await one.turn()

    given_up = await one.turn(2.0)
    crossed = await one.turn(2.1, token(1, 98))
    (admission,) = (await one.turn(2.2, cancelled(1))).admit
    await one.turn(2.3, token(1, 99))

    assert (list(given_up.cancel), list(given_up.admit)) == ([1], [])
    assert not crossed.admit
    assert (admission.request_id, admission.digest) == (1, "")
    assert text_of(generation) == "c", "what the adapter made too late is nobody's"
    assert generation.is_fallback


async def test_an_adapters_answer_that_ends_while_it_is_given_up_is_too_late_as_well(desk):
    one = desk()
    generation = one.submit(1, "a", base())
    await one.turn()
    await one.turn(2.0)

    (admission,) = (await one.turn(2.1, token(1, 98, "LENGTH"))).admit
    await one.turn(2.2, token(1, 99, "LENGTH"))

    assert admission.digest == ""
    assert [delta.text async for delta in generation] == ["c"]


async def test_who_leaves_while_falling_back_asks_nobody(desk):
    one = desk()
    generation = one.submit(1, "a", base())
    await one.turn()
    await one.turn(2.0)

    await generation.aclose()
    await one.turn(2.1)
    sent = await one.turn(2.2, cancelled(1))

    assert not sent.admit
    work = one.dispatcher.work()
    assert (work.running, work.waiting) == (0, 0)


async def test_who_is_falling_back_when_the_shard_goes_is_handed_on_as_the_bases(desk):
    one = desk()
    generation = one.submit(1, "a", base())
    await one.turn()
    await one.turn(2.0)

    await one.break_off()

    (entry,) = one.handed_back
    assert (entry.ask.digest, entry.admission.digest, entry.asked) == ("", "", "")
    assert (entry.falls_back, entry.wait, generation.is_fallback) == (False, None, True)


async def test_it_is_settled_who_answers_as_soon_as_anybody_does(desk):
    one = desk(lanes=LANES)
    adapted = one.submit(1, "a", base())
    fallen = one.submit(2, "b", base(3.0))
    closed = one.submit(3, "b", base(9.0))
    certain = one.submit(4, "b", fail(9.0))
    await one.turn()
    waiting = [asyncio.create_task(g.settled()) for g in (adapted, fallen, closed)]
    await asyncio.wait_for(certain.settled(), 5)

    await one.turn(1.0, token(1, 98))
    after_a_token = [task.done() for task in waiting]
    await one.turn(3.0)
    after_giving_up = [task.done() for task in waiting]
    await closed.aclose()
    await asyncio.gather(*waiting)

    assert after_a_token == [True, False, False]
    assert after_giving_up == [True, True, False]


async def test_those_who_gave_up_are_counted_by_what_they_did(desk):
    one = desk()
    one.submit(1, "a", base())
    one.submit(2, "b", fail())
    await one.turn()
    await one.turn(2.0)

    def value(policy: str) -> float | None:
        return one.metrics.registry.get_sample_value(
            "loralane_adapter_waits_ended_total", {"policy": policy}
        )

    assert (value("base"), value("fail")) == (1, 1)


async def test_the_end_of_a_wait_wakes_the_dispatcher_by_itself():
    dispatcher = Dispatcher(Metrics())
    dispatcher.connect(pb.Capacity(rows_total=1, rows_free=1, pages_total=9, page_tokens=16))
    serving = asyncio.create_task(dispatcher.serve(HandCranked(), lambda step: None))
    accepted = Accepted(1, 3, "a", "a", 0, 9, ())
    generation = Generation(accepted, CODEC, dispatcher.cancel)
    ask = Ask(1, "a", 1, LANES, time.monotonic(), flow="a", tokens=3)
    admission = pb.Admission(request_id=1, digest="a", prompt=[1, 2, 3], max_tokens=9)
    wait = AdapterWait(ask.arrived, 0.001, "fail")

    dispatcher.submit(Entry(ask, admission, generation, "a", wait=wait))
    error = await asyncio.wait_for(error_of(generation), 5)

    assert error.kind == pb.ERROR_KIND_LOADING
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


#: What each adapter, and the base, says at every token.
LETTERS = {"": "z", "a": "a", "b": "b", "c": "c"}


@dataclass
class Asked:
    """One request of a random run, and what must come of it."""

    generation: Generation
    digest: str
    wait: AdapterWait | None
    left: bool = False

    def check(self) -> None:
        text, error = text_of(self.generation), self.generation._error
        assert self.generation.finished
        may_fall_back = self.wait is not None and self.wait.policy == "base"
        assert may_fall_back or not self.generation.is_fallback
        speaker = "" if self.generation.is_fallback else self.digest
        assert set(text) <= {LETTERS[speaker]}, "one answerer, from the first token to the last"
        if error is not None:
            assert not text, "nobody gives up after the first token"
            assert self.wait is not None
            assert self.wait.policy == "fail"
            assert error.kind == pb.ERROR_KIND_LOADING
        assert self.left or error is not None or text


class RandomRun:
    """A desk with too few rows and lanes, and everything that may happen to its requests."""

    def __init__(self, desk: Desk, seed: int) -> None:
        self.desk, self.rng = desk, random.Random(seed)
        self.asked: list[Asked] = []
        #: Running requests that the shard was told to give up.
        self.ending: set[int] = set()

    def submit(self) -> None:
        digest = self.rng.choice(["", "a", "b", "c"])
        policy = self.rng.choice(["fail", "base"])
        wait = AdapterWait(self.desk.now, self.rng.uniform(0.1, 4), policy)
        bounded = wait if digest and self.rng.random() < 0.7 else None
        generation = self.desk.submit(len(self.asked) + 1, digest, bounded)
        self.asked.append(Asked(generation, digest, bounded))

    async def leave(self) -> None:
        gone = self.rng.choice(self.asked)
        gone.left = gone.left or not gone.generation.finished
        read = list(gone.generation._deltas)
        await gone.generation.aclose()
        gone.generation._deltas.extend(read)

    async def turn(self) -> None:
        """Do a step in which some rows make a token, end or are given up, as it comes."""
        await self._step([row for id in self.desk.running for row in self._row(id)])

    async def finish(self) -> None:
        """Do a step that ends every row."""
        running = self.desk.running.items()
        await self._step([self._end(id, digest) for id, digest in running])

    def _row(self, id: int) -> list[pb.Row]:
        digest = self.desk.running[id]
        if id in self.ending and self.rng.random() < 0.5:
            return [cancelled(id)]
        if (digest and digest not in self.desk.resident) or self.rng.random() < 0.4:
            return []
        finish = "LENGTH" if self.rng.random() < 0.3 else "UNSPECIFIED"
        return [token(id, ord(LETTERS[digest]), finish)]

    def _end(self, id: int, digest: str) -> pb.Row:
        return cancelled(id) if id in self.ending else token(id, ord(LETTERS[digest]), "LENGTH")

    async def _step(self, rows: list[pb.Row]) -> None:
        self.ending -= {row.request_id for row in rows if row.finish_reason}
        sent = await self.desk.turn(self.desk.now + self.rng.random(), *rows)
        self.ending |= set(sent.cancel) & self.desk.running.keys()


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_happens_each_request_has_one_answerer_or_one_error(desk, seed):
    run = RandomRun(desk(rows=3, lanes=2 * LANES), seed)
    for _ in range(120):
        if run.rng.random() < 0.4:
            run.submit()
        if run.rng.random() < 0.3:
            run.desk.resident ^= {run.rng.choice("abc")}
        if run.asked and run.rng.random() < 0.1:
            await run.leave()
        await run.turn()

    for _ in range(100):
        await run.finish()

    for request in run.asked:
        request.check()
    assert run.desk.running == {}
    assert not run.desk.dispatcher.work().waiting


@pytest.fixture
async def slow_shard():
    shard = SlowShard(adapters={"two": FakeAdapter(increment=2)})
    await shard.start()
    yield shard
    shard.may_resolve.set()
    await shard.stop()


def ask(adapter: str = "two", ms: int | None = None, policy: str = "fail", **more) -> TextRequest:
    wait_s = None if ms is None else ms / 1000
    return TextRequest(
        adapter,
        "a",
        Parameters(max_tokens=more.pop("max_tokens", 3)),
        max_wait_for_adapter_s=wait_s,
        adapter_wait_policy=policy,
        **more,
    )


async def text(generation: Generation) -> str:
    return "".join([delta.text async for delta in generation])


async def test_resolving_that_hangs_is_a_wait_for_the_adapter(slow_shard, start_router):
    router = await start_router(slow_shard)

    with pytest.raises(RequestError) as caught:
        await router.open(ask(ms=1))

    error = caught.value
    assert (error.kind, error.status.http) == (pb.ERROR_KIND_LOADING, 503)
    for word in ("'two'", "max_wait_for_adapter_ms=1"):
        assert word in error.message
    assert slow_shard.admissions == []
    router.check()


async def test_where_resolving_hangs_the_base_may_answer_and_says_so(slow_shard, start_router):
    router = await start_router(slow_shard)

    generation = await router.open(ask(ms=1, policy="base"))

    assert await text(generation) == "bcd"
    assert (generation.is_fallback, generation.adapter_digest) == (True, "")
    assert [admission.digest for admission in slow_shard.admissions] == [""]


async def test_an_adapter_that_cannot_be_had_is_an_error_whatever_the_policy(
    slow_shard, start_router
):
    slow_shard.may_resolve.set()
    router = await start_router(slow_shard)

    with pytest.raises(RequestError) as caught:
        await router.open(ask("nope", ms=60_000, policy="base"))

    assert caught.value.status.http == 404
    assert slow_shard.admissions == []


async def test_an_adapter_that_is_ready_in_time_answers(slow_shard, start_router):
    slow_shard.may_resolve.set()
    router = await start_router(slow_shard)

    generation = await router.open(ask(ms=60_000, policy="base"))

    assert await text(generation) == "ceg"
    assert not generation.is_fallback


async def test_the_base_is_no_adapter_to_wait_for(start_shard, start_router):
    shard = await start_shard(rows_total=1, manual=True)
    router = await start_router(shard)
    first = await router.open(ask("", max_tokens=1))
    second = await router.open(ask("", ms=1, max_tokens=1))
    await shard.until(lambda s: bool(s.rows))

    shard.step(2)

    assert [await text(first), await text(second)] == ["b", "b"]


@pytest.mark.parametrize("policy", ["fail", "base"])
async def test_a_load_that_hangs_is_given_up_on_the_shard(start_shard, start_router, policy):
    shard = await start_shard({"two": {"increment": 2, "cold_steps": 1000}}, manual=True)
    router = await start_router(shard)

    generation = await router.open(ask(ms=50, policy=policy))
    await shard.until(lambda s: bool(s.cancels))
    shard.step(9)

    if policy == "base":
        assert await text(generation) == "bcd"
        assert [a.digest for a in shard.admissions] == ["digest-of-two", ""]
    else:
        assert (await error_of(generation)).kind == pb.ERROR_KIND_LOADING
        await shard.until(lambda s: not s.rows)
    assert generation.is_fallback is (policy == "base")
    router.check()


async def test_resolving_once_more_is_a_wait_for_the_adapter_too(slow_shard, start_router):
    slow_shard.may_resolve.set()
    slow_shard.manual = True
    router = await start_router(slow_shard)
    generation = await router.open(ask(ms=300, policy="base"))
    await slow_shard.until(lambda s: bool(s.rows))
    slow_shard.may_resolve.clear()
    slow_shard.rows[generation.request_id].end = pb.FINISH_REASON_ERROR
    gone = pb.Error(kind=pb.ERROR_KIND_NOT_FOUND, message="it is not known here")
    slow_shard.rows[generation.request_id].error = gone

    slow_shard.step(9)

    assert await text(generation) == "bcd"
    assert generation.is_fallback
    router.check()


@pytest.mark.parametrize("policy", ["fail", "base"])
async def test_who_lost_its_shard_still_waits_no_longer_than_it_said(
    slow_shard, start_shard, start_router, policy
):
    resident = {"two": {"increment": 2, "cold_steps": 1000, "resident": True}}
    dying = await start_shard(resident, manual=True)
    router = await start_router(dying, slow_shard)
    generation = await router.open(ask(ms=400, policy=policy))
    await dying.until(lambda s: bool(s.rows))

    await dying.stop()
    await slow_shard.until(lambda s: bool(s.resolving))

    if policy == "base":
        assert await text(generation) == "bcd"
    else:
        assert (await error_of(generation)).kind == pb.ERROR_KIND_LOADING
    assert generation.is_fallback is (policy == "base")
    router.check()

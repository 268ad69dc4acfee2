"""Cancellation, fairness on the wire, and what a step costs."""

import asyncio
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.errors import RequestError
from loralane_router.metrics.counters import Metrics
from loralane_router.model import Model
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.dispatch import Dispatcher
from loralane_router.queueing.entry import Entry
from loralane_router.queueing.weights import Weights
from loralane_router.requests import Parameters, TextRequest
from loralane_router.text.generation import Accepted, Generation


def ask(adapter="", max_tokens=20) -> TextRequest:
    return TextRequest(adapter, "a", Parameters(max_tokens=max_tokens))


async def text_of(generation: Generation) -> str:
    return "".join([delta.text async for delta in generation])


async def test_closing_a_waiting_request_takes_it_out_of_the_queue(start_shard, start_router):
    shard = await start_shard(rows_total=1, manual=True)
    router = await start_router(shard)
    running, waiting, last = [await router.open(ask(max_tokens=1)) for _ in range(3)]
    await shard.until(lambda s: bool(s.rows))

    await waiting.aclose()
    await waiting.aclose()
    shard.step(2)

    assert await text_of(running) == "b"
    assert await text_of(last) == "b"
    admitted = [admission.request_id for admission in shard.admissions]
    assert admitted == [running.request_id, last.request_id]
    router.check()


async def test_closing_a_running_request_frees_its_row_at_the_next_step(start_shard, start_router):
    shard = await start_shard(rows_total=1, manual=True)
    router = await start_router(shard)
    running, waiting = await router.open(ask()), await router.open(ask(max_tokens=1))
    await shard.until(lambda s: bool(s.rows))

    await running.aclose()
    await shard.until(lambda s: bool(s.cancels))
    shard.step(2)

    assert shard.cancels == [running.request_id]
    assert await text_of(waiting) == "b"
    assert [delta async for delta in running] == []


async def test_who_waits_for_lanes_that_others_then_pin_is_told_so(start_shard, start_router):
    adapters = {name: {"increment": 2, "lanes": 8} for name in ("busy", "pinned", "narrow")}
    adapters["wide"] = {"increment": 3, "lanes": 16}
    shard = await start_shard(adapters, rows_total=1, lanes_total=16, manual=True)
    router = await start_router(shard)
    busy, wide, narrow = [await router.open(ask(n, 1)) for n in ("busy", "wide", "narrow")]
    await shard.until(lambda s: bool(s.rows))

    await router.pin_adapter("pinned", True)
    with pytest.raises(RequestError) as caught:
        await text_of(wide)
    shard.step(2)

    assert (caught.value.status.http, caught.value.retry_after_s) == (429, 1.0)
    assert "pinned adapters hold 8 of 16" in caught.value.message
    assert [await text_of(generation) for generation in (busy, narrow)] == ["c", "c"]
    router.check()


async def test_a_quiet_adapter_is_not_behind_a_chatty_ones_backlog(start_shard, start_router):
    adapters = {"chatty": {"increment": 2}, "quiet": {"increment": 3}}
    shard = await start_shard(adapters, rows_total=1, manual=True)
    router = await start_router(shard)
    chatty = [await router.open(ask("chatty", max_tokens=1)) for _ in range(6)]
    await shard.until(lambda s: bool(s.rows))
    quiet = await router.open(ask("quiet", max_tokens=1))

    shard.step(7)
    await asyncio.gather(*map(text_of, [*chatty, quiet]))

    order = [admission.digest for admission in shard.admissions]
    assert order.index("digest-of-quiet") == 1


async def test_requests_of_a_key_that_has_a_weight_share_one_turn_whatever_their_adapters(
    start_shard, start_router
):
    adapters = {name: {"increment": 2} for name in ("one", "two", "three", "other")}
    shard = await start_shard(adapters, rows_total=1, manual=True)
    router = await start_router(shard, weights=Weights.parse({"keys": {"shared": 1}}))
    running = await router.open(ask("one", max_tokens=1))
    await shard.until(lambda s: bool(s.rows))
    asked = ["one", "two", "three", "other", "other"]
    keys = ["shared"] * 3 + ["anybody's", None]

    waiting = [
        await router.open(replace(ask(name, max_tokens=1), key=key))
        for name, key in zip(asked, keys, strict=True)
    ]
    shard.step(6)
    await asyncio.gather(*map(text_of, [running, *waiting]))

    names = [admission.digest.removeprefix("digest-of-") for admission in shard.admissions]
    assert names[1:] == ["one", "other", "two", "other", "three"]


async def test_lower_priorities_go_first(start_shard, start_router):
    shard = await start_shard(rows_total=1, manual=True)
    router = await start_router(shard)
    running = await router.open(ask(max_tokens=1))
    await shard.until(lambda s: bool(s.rows))

    waiting = [
        await router.open(replace(ask(max_tokens=1), priority=priority)) for priority in (1, 0, -5)
    ]
    shard.step(4)
    await asyncio.gather(*map(text_of, [running, *waiting]))

    order = [admission.request_id for admission in shard.admissions]
    assert order == [g.request_id for g in (running, *reversed(waiting))]


async def test_a_step_for_a_request_that_has_ended_is_ignored(start_shard, start_router):
    shard = await start_shard(manual=True)
    router = await start_router(shard)
    generation = await router.open(ask())
    await shard.until(lambda s: bool(s.rows))

    await generation.aclose()
    shard.step()
    await shard.until(lambda s: bool(s.cancels))
    shard.step(9)
    await shard.until(lambda s: not s.rows)
    again = await router.open(ask(max_tokens=1))

    assert await text_of(again) == "b"


async def test_gauges_follow_the_shard(start_shard, start_router):
    shard = await start_shard({"two": {"increment": 2}}, manual=True)
    router = await start_router(shard)
    generation = await router.open(ask("two", max_tokens=2))
    await shard.until(lambda s: bool(s.rows))
    shard.step()
    await anext(aiter(generation))

    def value(name: str, **labels: str) -> float | None:
        return router.metrics.registry.get_sample_value(f"loralane_{name}", labels)

    assert (value("requests_running"), value("requests_waiting")) == (1, 0)
    assert (value("rows"), value("rows_free")) == (4, 3)
    assert (value("lanes"), value("lanes_in_use"), value("lanes_free")) == (32, 8, 24)
    assert (value("pages"), value("pages_free")) == (64, 63)
    assert (value("prompt_tokens_total"), value("generated_tokens_total")) == (2, 1)
    assert value("time_to_first_token_seconds_count") == 1
    assert value("shard_up") == 1
    assert value("adapters", tier="device") == 1
    await generation.aclose()


class OneStep:
    """A stream on which the given steps have arrived and then breaks."""

    def __init__(self, steps: list[pb.StepReply], wake) -> None:
        self._steps = steps
        self._wake = wake

    def take(self) -> list[pb.StepReply]:
        if not self._steps:
            raise RequestError(pb.ERROR_KIND_UNAVAILABLE, "gone")
        self._wake()
        return [self._steps.pop(0)]

    async def write(self, request: pb.RunRequest) -> None:
        self.written = request


async def test_a_step_of_32_rows_costs_the_router_less_than_2_ms(start_shard):
    shard = await start_shard()
    info = pb.InfoReply(vocab_size=260, max_model_len=99)
    codec = Model(info, shard.files).codec
    dispatcher = Dispatcher(Metrics())
    dispatcher.connect(
        pb.Capacity(rows_total=32, rows_free=32, pages_total=999, pages_free=999, page_tokens=16)
    )
    generations = []
    for id in range(32):
        accepted = Accepted(id, 3, "", "", 0, 1000, stop=("\n\n", "User:"))
        generations.append(Generation(accepted, codec, dispatcher.cancel))
        dispatcher.submit(Entry(Ask(id, "", 1, 0, 0.0), pb.Admission(), generations[-1]))
    capacity = pb.Capacity(rows_total=32, pages_total=999, pages_free=9, page_tokens=16)
    rows = [pb.Row(request_id=id, tokens=[pb.Token(id=65 + id)]) for id in range(32)]
    steps = [pb.StepReply(rows=rows, capacity=capacity) for _ in range(50)]
    stream = OneStep([pb.StepReply(capacity=capacity), *steps], dispatcher.wake)

    times: list[float] = []
    with pytest.raises(RequestError, match="gone"):
        await dispatcher.serve(stream, lambda step: times.append(time.thread_time()))
    cost = median(after - before for before, after in pairwise(times))

    assert [len(generation._deltas) for generation in generations] == [50] * 32
    assert cost < 0.002, f"{cost * 1000:.2f} ms a step"


async def test_tokens_that_cannot_be_decoded_fail_one_request_only(start_shard, start_router):
    shard = await start_shard(manual=True)
    router = await start_router(shard)
    bad, good = await router.open(ask(max_tokens=2)), await router.open(ask(max_tokens=2))
    bad._text = None
    await shard.until(lambda s: len(s.rows) == 2)

    shard.step(2)

    assert await text_of(good) == "bc"
    with pytest.raises(RequestError, match="decoded"):
        await text_of(bad)


async def test_adapters_of_waiting_requests_are_prefetched_once_while_they_wait(
    start_shard, start_router
):
    adapters = {name: {"increment": 2, "lanes": 8} for name in ("now", "next", "warm")}
    shard = await start_shard(adapters, rows_total=1, manual=True)
    shard.adapters["warm"].resident = True
    router = await start_router(shard)
    running = await router.open(ask("now", max_tokens=2))
    await shard.until(lambda s: bool(s.rows))

    waiting = [await router.open(ask(name, max_tokens=1)) for name in ("next", "warm", "next")]
    await shard.until(lambda s: bool(s.prefetched))
    shard.step(9)
    texts = await asyncio.gather(*map(text_of, [running, *waiting]))

    assert texts == ["ce", "c", "c", "c"]
    assert shard.prefetched == ["digest-of-next"]


async def test_an_adapter_that_went_before_its_admission_is_resolved_once_more(
    start_shard, start_router
):
    shard = await start_shard({"two": {"increment": 2}}, rows_total=1, manual=True)
    router = await start_router(shard)
    first, second = [await router.open(ask("two", max_tokens=1)) for _ in range(2)]
    await shard.until(lambda s: bool(s.rows))
    shard.unloaded.add("digest-of-two")

    shard.step(4)

    assert await asyncio.gather(text_of(first), text_of(second)) == ["c", "c"]
    assert len(shard.resolved) == 3
    router.check()


async def test_what_an_adapter_is_when_it_is_resolved_again_is_served_and_named(
    start_shard, start_router
):
    shard = await start_shard({"two": {"increment": 2}}, rows_total=1, manual=True)
    router = await start_router(shard)
    running = await router.open(ask(max_tokens=1))
    waiting = await router.open(ask("two", max_tokens=1))
    await shard.until(lambda s: bool(s.rows))
    shard.unloaded.add("digest-of-two")
    shard.adapters["old"] = shard.adapters["two"]
    shard.adapters["two"] = replace(shard.adapters["two"], increment=3, digest="new")

    shard.step(4)

    assert await asyncio.gather(text_of(running), text_of(waiting)) == ["b", "d"]
    assert waiting.adapter_digest == "new"


@pytest.mark.parametrize(("gone", "http"), [("removed", 404), ("forbidden", 403)])
async def test_an_adapter_that_cannot_be_had_again_ends_the_request_with_the_reason(
    start_shard, start_router, gone, http
):
    shard = await start_shard({"two": {"increment": 2}}, rows_total=1, manual=True)
    router = await start_router(shard)
    running = await router.open(ask(max_tokens=1))
    waiting = await router.open(ask("two", max_tokens=1))
    await shard.until(lambda s: bool(s.rows))
    shard.unloaded.add("digest-of-two")
    shard.adapters["two"].token = "other"
    if gone == "removed":
        shard.adapters["elsewhere"] = shard.adapters.pop("two")

    shard.step(4)

    assert await text_of(running) == "b"
    with pytest.raises(RequestError) as caught:
        await text_of(waiting)
    assert caught.value.status.http == http
    assert not router.fleet.links[0].dispatcher.needs("digest-of-two")
    router.check()

"""A flood fills the queue of the real router; others are let in, and the flood is told so."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
from loralane_router.config import RouterConfig
from loralane_router.gateway.app import create_app
from loralane_router.gateway.limits import Limits
from loralane_router.requests import Parameters, TextRequest
from loralane_router.router import Router

from tests.router.conftest import FakeAdapter, FakeShard
from tests.router.gateway.conftest import serving
from tests.router.gateway.test_leaving import until

PLACES = 4
#: Of the flood: one that runs, and those that wait.
FLOOD = 1 + PLACES


@dataclass
class Place:
    """A shard with one row, a router with a short queue, and a client."""

    shard: FakeShard
    router: Router
    http: httpx.AsyncClient

    def send(self, model: str, *, stream: bool = False) -> asyncio.Task[httpx.Response]:
        body = {"model": model, "prompt": "a", "max_tokens": 1, "stream": stream}
        return asyncio.create_task(self.http.post("/v1/completions", json=body))

    async def flood(self, most: int = FLOOD) -> list[asyncio.Task[httpx.Response]]:
        """Fill the row and the queue, in order."""
        sent = [self.send("flood")]
        await self.shard.until(lambda s: bool(s.rows))
        for waiting in range(1, most):
            sent.append(self.send("flood"))
            await until(lambda waiting=waiting: self.router.fleet.waiting == waiting)
        return sent

    async def drain(self) -> None:
        self.shard.step(50)
        await until(lambda: not self.router.fleet.waiting)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    adapters = {name: FakeAdapter(n) for n, name in enumerate(("flood", "quiet", "shy"), 2)}
    shard = FakeShard(adapters=adapters, rows_total=1, manual=True)
    await shard.start()
    router = Router(
        RouterConfig(
            shards=(f"127.0.0.1:{shard.port}",),
            max_queue=PLACES,
        )
    )
    await router.start()
    await asyncio.wait_for(router.wait_ready(), 10)
    async with (
        serving(create_app(router, Limits(quiet_s=0.05))) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        yield Place(shard, router, http)
        router.check()
    await router.close()
    await shard.stop()


async def test_a_victim_is_let_in_and_the_newest_of_the_flood_is_told_to_come_back(place):
    flood = await place.flood()

    victim = place.send("quiet")
    refused = await asyncio.wait_for(flood[-1], 10)
    await place.drain()
    replies = await asyncio.gather(victim, *flood[:-1])

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    assert [reply.status_code for reply in replies] == [200] * FLOOD
    assert victim.result().json()["choices"][0]["text"] == "d"


async def test_the_flood_itself_is_refused_and_refuses_nobody(place):
    flood = await place.flood()

    refused = await place.send("flood")
    await place.drain()
    replies = await asyncio.gather(*flood)

    assert refused.status_code == 429
    assert [reply.status_code for reply in replies] == [200] * FLOOD


async def test_victims_are_let_in_while_the_flood_has_twice_its_share(place):
    flood = await place.flood()

    victims = [place.send("quiet") for _ in range(4)]
    await until(lambda: sum(one.done() for one in [*victims, *flood]) == 4)
    waiting = [not one.done() for one in flood]
    await place.drain()
    statuses = [(await one).status_code for one in victims]

    assert sorted(statuses) == [200, 429, 429, 429]
    assert waiting == [True] * PLACES + [False]


async def test_a_stream_of_which_nothing_was_sent_is_refused_with_a_status(place):
    flood = await place.flood()
    shy = place.send("shy", stream=True)
    await asyncio.wait_for(flood[-1], 10)
    quiet = place.send("quiet", stream=True)
    await asyncio.wait_for(flood[-2], 10)
    await place.drain()

    assert [flood[n].result().status_code for n in (-1, -2)] == [429, 429]
    assert ["[DONE]" in (await one).text for one in (shy, quiet)] == [True, True]


async def test_a_stream_that_was_kept_alive_is_told_so_in_an_event(place):
    flood = await place.flood(most=FLOOD - 1)
    body = {"model": "flood", "prompt": "a", "stream": True}

    async with place.http.stream("POST", "/v1/completions", json=body) as newest:
        victim = place.send("quiet")
        told = await asyncio.wait_for(newest.aread(), 10)
    await place.drain()
    replies = await asyncio.gather(victim, *flood)

    assert newest.status_code == 200
    assert b'"code":"overloaded"' in told
    assert b"[DONE]" not in told
    assert [reply.status_code for reply in replies] == [200] * FLOOD


async def test_an_adapter_that_nobody_knows_pushes_nobody_out(place):
    flood = await place.flood()

    unknown = await place.send("no/such")
    await place.drain()

    assert unknown.status_code == 404
    assert [(await one).status_code for one in flood] == [200] * FLOOD


async def test_what_can_never_be_served_is_told_so_whatever_waits(place):
    flood = await place.flood()

    unknown = await place.send("no/such")
    too_long = await place.http.post(
        "/v1/completions", json={"model": "flood", "prompt": "a" * 999}
    )
    no_json = await place.http.post("/v1/completions", content=b"not JSON")
    await place.drain()

    statuses = [reply.status_code for reply in (unknown, too_long, no_json)]
    assert statuses == [404, 400, 400]
    assert [(await one).status_code for one in flood] == [200] * FLOOD


async def test_where_nobody_may_wait_an_unknown_adapter_is_still_told_from_a_full_queue(
    start_shard, start_router
):
    shard = await start_shard(rows_total=1, manual=True)
    router = await start_router(shard, max_queue=0)
    running = await router.open(TextRequest("", "a", Parameters(max_tokens=1)))
    await shard.until(lambda s: bool(s.rows))

    answers = await asyncio.gather(
        router.open(TextRequest("", "a", Parameters(max_tokens=1))),
        router.open(TextRequest("no/such", "a", Parameters(max_tokens=1))),
        return_exceptions=True,
    )

    assert [error.status.http for error in answers] == [429, 404]
    await running.aclose()

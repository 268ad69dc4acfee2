"""A client of the real router leaves: whatever its request was doing, everything is free again."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.config import RouterConfig
from loralane_router.gateway.app import create_app
from loralane_router.requests import Parameters, TextRequest
from loralane_router.router import Router

from tests.router.conftest import FakeAdapter
from tests.router.gateway.conftest import serving
from tests.router.slow_shard import SlowShard


@dataclass
class Place:
    """A shard with one row, the router in front of it, and where it serves."""

    shard: SlowShard
    router: Router
    url: str

    async def until_idle(self) -> None:
        """Return when nothing is left of any request, on either side."""
        await until(lambda: not self._busy())
        self.router.check()

    def _busy(self) -> bool:
        work = self.router.fleet.links[0].dispatcher.work()
        return bool(work.running or work.waiting or self.shard.rows or self.shard.resolving)


async def until(holds: Callable[[], bool]) -> None:
    """Return when something holds, within so many turns of the loop that it must be soon."""
    for _ in range(200_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come about")


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    adapters = {"two": FakeAdapter(2), "cold": FakeAdapter(3, cold_steps=10_000)}
    shard = SlowShard(adapters=adapters, rows_total=1, max_model_len=5000, pages_total=5000)
    await shard.start()
    router = Router(RouterConfig(shards=(f"127.0.0.1:{shard.port}",), max_queue=1))
    await router.start()
    await asyncio.wait_for(router.wait_ready(), 10)
    async with serving(create_app(router)) as url:
        yield Place(shard, router, url)
        shard.may_resolve.set()
    await router.close()
    await shard.stop()


@contextlib.asynccontextmanager
async def client(url: str, model: str, stream: bool) -> AsyncIterator[None]:
    """Ask for more than will ever be generated here, and hang up at the end."""
    body = {"model": model, "prompt": "a", "max_tokens": 4000, "stream": stream}
    body |= {"ignore_eos": True}
    raw = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    try:
        yield
    finally:
        writer.transport.abort()


async def resolving(place: Place) -> None:
    await place.shard.until(lambda s: bool(s.resolving))


async def loading(place: Place) -> None:
    place.shard.may_resolve.set()
    await place.shard.until(lambda s: any(row.waited for row in s.rows.values()))


async def running(place: Place) -> None:
    place.shard.may_resolve.set()
    await place.shard.until(lambda s: any(row.made for row in s.rows.values()))


async def lost(place: Place) -> None:
    """Its adapter went, and is asked for once more, which takes long."""
    await loading(place)
    place.shard.may_resolve.clear()
    (row,) = place.shard.rows.values()
    row.end = pb.FINISH_REASON_ERROR
    row.error = pb.Error(kind=pb.ERROR_KIND_NOT_FOUND, message="it is not known here")
    await resolving(place)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "moment"),
    [("two", resolving), ("cold", loading), ("two", running), ("cold", lost)],
)
async def test_leaving_frees_everything(place, model, moment, stream):
    async with client(place.url, model, stream):
        await moment(place)

    await place.until_idle()
    assert not place.router.fleet.links[0].dispatcher.needs(f"digest-of-{model}")


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_a_queue_frees_its_place(place, stream):
    place.shard.may_resolve.set()
    async with client(place.url, "two", stream):
        await running(place)
        async with client(place.url, "two", stream):
            await until(lambda: place.router.fleet.waiting == 1)
        await until(lambda: place.router.fleet.waiting == 0)

    await place.until_idle()
    place.router.check_ready()


async def test_those_who_left_while_they_were_opened_do_not_count_any_more(place):
    """With one row and room for one more, two that hang would keep everybody out."""
    for _ in range(5):
        async with client(place.url, "two", False), client(place.url, "two", True):
            await place.shard.until(lambda s: s.resolving == 2)
        await place.until_idle()

    place.router.check_ready()
    generation = await place.router.open(TextRequest("", "a", Parameters(max_tokens=2)))
    assert "".join([delta.text async for delta in generation]) == "bc"

"""Two shards behind one router, and what happens to one of them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import client_of
from tests.product import (
    GOOD,
    PATIENCE_S,
    Command,
    Served,
    World,
    events_of,
    metrics,
    stop_cleanly,
)

ADAPTERS = ("", *(recipe.name for recipe in GOOD))
#: Of each kind, greedy and sampled.
STREAMS, TOKENS = 16, 128
SAMPLED = {"temperature": 0.9, "top_p": 0.95}
#: Seconds until a shard that is gone is out of rotation; promised are 2, but a machine may be busy.
GONE_S = 20

Body = dict[str, Any]


def greedy(count: int, word: str) -> list[Body]:
    """Requests over all adapters; prompts of equal length."""
    names = [ADAPTERS[i % len(ADAPTERS)] for i in range(count)]
    bodies = [{"model": name, "prompt": f"{word} {i:02}"} for i, name in enumerate(names)]
    return [{**body, "max_tokens": TOKENS, "temperature": 0} for body in bodies]


def sampled(count: int, word: str) -> list[Body]:
    return [{**body, **SAMPLED, "seed": i} for i, body in enumerate(greedy(count, word))]


def expected_texts(world: World, bodies: Sequence[Body]) -> list[str]:
    """What the reference says; one batch of it for each adapter."""
    prompts = {
        name: [body["prompt"] for body in bodies if body["model"] == name] for name in ADAPTERS
    }
    texts = {
        (name, prompt): text
        for name, mine in prompts.items()
        for prompt, text in zip(mine, world.texts(name, mine, TOKENS), strict=True)
    }
    return [texts[body["model"], body["prompt"]] for body in bodies]


@dataclass
class Pair:
    """Two shards by address, and a router in front of both."""

    world: World
    shards: dict[str, Command]
    router: Command
    http: httpx.AsyncClient

    def start(self, address: str) -> None:
        """Start a shard again where it was."""
        shard = Command("shard", *self.world.flags, f"--listen={address}")
        self.shards[address] = shard
        shard.wait_for(r"ready (\S+)")

    def signal(self, address: str, number: signal.Signals) -> None:
        os.kill(self.shards[address].pid, number)

    async def gauge(self, name: str) -> dict[str, float]:
        """Return a metric of each shard, by address; 0 while it has none."""
        found = await metrics(self.http)
        return {at: found.get(f'loralane_{name}{{shard="{at}"}}', 0) for at in self.shards}

    async def until(self, name: str, wanted: dict[str, float]) -> None:
        """Wait until a metric is so for these shards."""
        async with asyncio.timeout(PATIENCE_S):
            while wanted.items() - (await self.gauge(name)).items():  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # leaves the processor to the shards

    async def until_up(self, address: str, up: bool) -> None:
        """Wait until the router finds that a shard answers, or no longer."""
        await self.until("shard_up", {address: up})

    async def busiest(self) -> tuple[str, str]:
        """Return the address of the shard with most running requests, and the other's."""
        running = await self.gauge("requests_running")
        busy, other = sorted(running, key=running.__getitem__, reverse=True)
        assert running[other], "both have some"
        return busy, other

    async def moved(self) -> float:
        return (await metrics(self.http)).get('loralane_replays_total{outcome="moved"}', 0)


@asynccontextmanager
async def pair_of(world: World) -> AsyncIterator[Pair]:
    commands: list[Command] = []
    try:
        for _ in range(2):
            commands.append(Command("shard", *world.flags, "--listen=127.0.0.1:0"))
        shards = {shard.wait_for(r"ready (\S+)"): shard for shard in commands}
        router = Command("router", *(f"--shard={address}" for address in shards), "--port=0")
        commands.append(router)
        url = router.wait_for(r"loralane serves model on (http://\S+)")
        async with client_of(Served(router, url, "")) as http:
            pair = Pair(world, shards, router, http)
            for address in shards:
                await pair.until_up(address, True)
            yield pair
            stop_cleanly(router)
    finally:
        for command in [*commands, *shards.values()]:
            command.end()


@pytest.fixture
async def pair(world: World) -> AsyncIterator[Pair]:
    async with pair_of(world) as pair:
        yield pair


class Streams:
    """Requests that are answered as streams, all at once."""

    def __init__(self, http: httpx.AsyncClient, bodies: Sequence[Body]) -> None:
        self._http = http
        self._all_begun = asyncio.Barrier(len(bodies) + 1)
        self._tasks = [asyncio.create_task(self._read(body)) for body in bodies]

    async def begun(self) -> None:
        """Return when each has sent its first event, and none was read further."""
        await self._all_begun.wait()

    async def ends(self) -> list[list[Any]]:
        """Return the events of each."""
        return await asyncio.gather(*self._tasks)

    async def _read(self, body: Body) -> list[Any]:
        request = {**body, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=request) as reply:
            assert reply.status_code == 200
            lines = reply.aiter_lines()
            first = await anext(lines)
            await self._all_begun.wait()
            rest = [line async for line in lines]
        done = rest.count("data: [DONE]")
        events = events_of("\n".join([first, *rest]))
        assert done == ("error" not in events[-1]), "an end, or an error, and never both"
        return events


def texts_of(answers: Sequence[Sequence[Any]]) -> list[str]:
    return ["".join(event["choices"][0]["text"] for event in events) for events in answers]


async def whole(http: httpx.AsyncClient, body: Body) -> str:
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


async def calm_texts(served: Served, bodies: Sequence[Body]) -> list[str]:
    """What an undisturbed shard answers."""
    async with client_of(served) as http:
        return await asyncio.gather(*(whole(http, body) for body in bodies))


async def test_a_killed_shards_streams_go_on_on_the_other_and_back_when_it_is_back(
    pair: Pair, served: Served, world: World
):
    plain, drawn = greedy(STREAMS, "tale"), sampled(STREAMS, "song")
    streams = Streams(pair.http, [*plain, *drawn])
    await streams.begun()
    victim, other = await pair.busiest()

    pair.signal(victim, signal.SIGKILL)
    async with asyncio.timeout(GONE_S):
        await pair.until_up(victim, False)
    answers = await streams.ends()

    texts = texts_of(answers)
    assert texts[:STREAMS] == expected_texts(world, plain)
    assert texts[STREAMS:] == await calm_texts(served, drawn)
    moved = await pair.moved()
    assert 0 < moved < 2 * STREAMS
    assert await whole(pair.http, plain[1]) == texts[1]

    pair.start(victim)
    await pair.until_up(victim, True)
    again = greedy(STREAMS, "poem")
    streams = Streams(pair.http, again)
    await streams.begun()
    pair.signal(other, signal.SIGKILL)

    assert texts_of(await streams.ends()) == expected_texts(world, again)
    assert await pair.moved() > moved


async def test_with_both_shards_killed_each_stream_ends_with_one_error(pair: Pair, world: World):
    bodies = greedy(STREAMS, "tale")
    streams = Streams(pair.http, bodies)
    await streams.begun()

    for address in pair.shards:
        pair.signal(address, signal.SIGKILL)
    answers = await streams.ends()
    refused = await pair.http.post("/v1/completions", json=bodies[0])

    for events, full in zip(answers, expected_texts(world, bodies), strict=True):
        *pieces, error = events
        assert full.startswith(texts_of([pieces])[0])
        assert error["error"]["code"] == "unavailable"
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert (await pair.http.get("/health/ready")).status_code == 503


async def test_a_silent_shards_streams_go_on_and_it_is_clean_when_it_wakes(
    pair: Pair, world: World
):
    bodies = greedy(STREAMS, "tale")
    streams = Streams(pair.http, bodies)
    await streams.begun()
    victim, _ = await pair.busiest()

    pair.signal(victim, signal.SIGSTOP)
    try:
        async with asyncio.timeout(GONE_S):
            await pair.until_up(victim, False)
        texts = texts_of(await streams.ends())
        alone = await whole(pair.http, bodies[0])
    finally:
        pair.signal(victim, signal.SIGCONT)
    await pair.until_up(victim, True)
    rows = await pair.gauge("rows")
    await pair.until("rows_free", rows)

    assert texts == expected_texts(world, bodies)
    assert alone == texts[0]
    assert min(rows.values()) > 0


async def test_a_shard_that_is_told_to_stop_loses_no_stream(pair: Pair, world: World):
    bodies = greedy(STREAMS, "tale")
    streams = Streams(pair.http, bodies)
    await streams.begun()
    victim, _ = await pair.busiest()

    pair.shards[victim].terminate()
    texts = texts_of(await streams.ends())

    assert texts == expected_texts(world, bodies)
    assert await asyncio.to_thread(pair.shards[victim].wait) == 0

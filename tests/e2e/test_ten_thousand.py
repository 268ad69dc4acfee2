"""Ten thousand registered adapters: what they cost, and that their lists stay short."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest
from loralane_proto import shard_pb2 as pb
from loralane_proto import shard_pb2_grpc

from tests import reference
from tests.product import PATIENCE_S, WEIGHTS, Command, World, stop_cleanly

ADAPTERS, WARM, USED, AT_ONCE = 10_000, 100, 300, 16
MOST_GROWTH, MOST_METRICS, MOST_PAGE = 30 << 20, 200_000, 400_000


@dataclass(frozen=True)
class Pair:
    """A shard, a router in front of it, and where they answer."""

    shard: Command
    router: Command
    address: str
    url: str

    def resident_bytes(self) -> int:
        """What both processes hold in memory now."""
        return sum(psutil.Process(c.pid).memory_info().rss for c in (self.shard, self.router))


@pytest.fixture(scope="module")
def names(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of adapters below a root of their own, each with its own identity."""
    recipe = reference.AdapterRecipe("tiny", 1, 2, ("q_proj", "v_proj"))
    root = tmp_path_factory.mktemp("thousands")
    reference.save_adapter(world.model, recipe, root / "first", seed=1)
    config, weights = (
        (root / "first" / name).read_bytes() for name in ("adapter_config.json", WEIGHTS)
    )
    for n in range(ADAPTERS):
        folder = root / f"adapter-{n:05}"
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes(config)
        (folder / WEIGHTS).write_bytes(weights)
    return [str(root / f"adapter-{n:05}") for n in range(ADAPTERS)]


@pytest.fixture(scope="module")
def pair(world: World, names: list[str]) -> Iterator[Pair]:
    """A shard with the root of all of them, and a router."""
    root = Path(names[0]).parent
    shard = Command("shard", *world.bare_flags, f"--adapter-root={root}", "--listen=127.0.0.1:0")
    try:
        address = shard.wait_for(r"ready (\S+)")
        router = Command("router", f"--shard={address}", "--port=0")
        try:
            url = router.wait_for(r"loralane serves model on (http://\S+)")
            yield Pair(shard, router, address, url)
            stop_cleanly(router)
        finally:
            router.end()
        stop_cleanly(shard)
    finally:
        shard.end()


@pytest.fixture
async def http(pair: Pair) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=pair.url, timeout=PATIENCE_S) as client:
        yield client


async def register(address: str, names: list[str]) -> None:
    """Resolve adapters as a router does for a request: headers only, no tensor is read."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = shard_pb2_grpc.ShardStub(channel)
        waiting = iter(names)

        async def resolve() -> None:
            for name in waiting:
                await stub.ResolveAdapter(pb.ResolveAdapterRequest(reference=name))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(resolve())


async def use(http: httpx.AsyncClient, names: list[str]) -> None:
    """Ask each of some adapters for one token."""
    waiting = iter(names)

    async def ask() -> None:
        for name in waiting:
            body = {"model": name, "prompt": "a", "max_tokens": 1, "temperature": 0}
            reply = await http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask())


async def pages(http: httpx.AsyncClient, path: str, key: str) -> AsyncIterator[list[Any]]:
    """All pages of a list, each a bounded answer."""
    after = ""
    while True:
        reply = await http.get(path, params={"after": after} if after else {})
        assert reply.status_code == 200, reply.text
        assert len(reply.content) <= MOST_PAGE
        body = reply.json()
        yield body["data"]
        if not body["has_more"]:
            return
        after = body["data"][-1][key]


async def test_ten_thousand_adapters_cost_little_and_are_listed_in_pages(pair, http, names):
    await register(pair.address, names[:WARM])
    await use(http, names[:WARM])
    listed = [row async for page in pages(http, "/v1/adapters", "name") for row in page]
    assert len(listed) == WARM
    before = pair.resident_bytes()

    await register(pair.address, names)
    listed = [row async for page in pages(http, "/v1/adapters", "name") for row in page]
    growth = pair.resident_bytes() - before

    assert sorted(row["name"] for row in listed) == names, "each of them once"
    assert growth <= MOST_GROWTH, f"{growth / 2**20:.1f} MiB"


async def test_the_first_page_is_short_and_takes_one_look_at_the_shard(http, names):
    reply = await http.get("/v1/adapters")
    body = reply.json()

    assert reply.status_code == 200
    assert len(body["data"]) < ADAPTERS / 10
    assert body["has_more"] is True
    assert len(reply.content) <= MOST_PAGE
    few = (await http.get("/v1/adapters", params={"limit": 3})).json()
    assert [row["name"] for row in few["data"]] == names[:3]


async def test_a_model_is_found_among_ten_thousand_and_they_are_listed_in_pages(http, names):
    listed = [row["id"] async for page in pages(http, "/v1/models", "id") for row in page]
    one = await http.get(f"/v1/models/{names[-1]}")

    assert set(names) <= set(listed)
    assert one.json()["id"] == names[-1]


async def test_metrics_stay_short_however_many_adapters_are_used(http, names):
    await use(http, names[:USED])

    page = await http.get("/metrics")

    assert page.status_code == 200
    assert len(page.content) <= MOST_METRICS
    labelled = {line.partition('adapter="')[2] for line in page.text.splitlines()}
    assert len(labelled) < USED, "those beyond the cap are one"

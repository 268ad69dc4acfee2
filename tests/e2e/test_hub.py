"""Adapters from a hub through the whole product: one download for all, and nobody waits for it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import client_of
from tests.product import (
    PATIENCE_S,
    WEIGHTS,
    Served,
    World,
    metrics,
    serve,
    stop_cleanly,
    until,
)
from tests.server.adapters.sources.fake_hub import FakeHub, Fault, Repo, fake_hub

CROWD, TOKENS = 64, 8
LOADS = 'loralane_adapter_moves_total{tier="device"}'
#: Longer than any test may take: a held download ends when the test says so.
HUB_PATIENCE_S = 10 * PATIENCE_S


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def hub_served(
    world: World, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server whose hub is the fake one, with an empty cache."""
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        "HF_TOKEN": "",
        "HF_HUB_DOWNLOAD_TIMEOUT": str(HUB_PATIENCE_S),
    }
    with serve(*world.bare_flags, "--max-rows=128", env=environment) as served:
        yield served
        stop_cleanly(served.command)


@pytest.fixture
async def http(hub_served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(hub_served) as client:
        yield client


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What holds a download; open at the end, whatever the test did."""
    gate = threading.Event()
    yield gate
    gate.set()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


async def text(http: httpx.AsyncClient, adapter: str, prompt: str) -> str:
    body = {"model": adapter, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


async def test_64_requests_for_a_cold_adapter_are_one_download_and_all_right(http, world, hub):
    hub.repos["org/crowd"] = Repo(files(world.root / "a"))
    size = len(hub.repos["org/crowd"].files[WEIGHTS])
    prompts = [f"tale {i:02}" for i in range(CROWD)]
    sent = hub.sent[WEIGHTS]

    texts = await asyncio.gather(*(text(http, "org/crowd", prompt) for prompt in prompts))

    assert texts == world.texts("a", prompts, TOKENS)
    headers = hub.sent[WEIGHTS] - sent - size
    assert 0 <= headers < size, "the weights were sent whole once, and their header by range"


async def test_a_crowd_that_waits_for_a_download_causes_one_and_one_load(http, world, hub, gate):
    hub.repos["org/slow-crowd"] = Repo(files(world.root / "d"), faults={WEIGHTS: Fault(held=gate)})
    size = len(hub.repos["org/slow-crowd"].files[WEIGHTS])
    prompts = [f"tale {i:02}" for i in range(CROWD)]
    sent, before = hub.sent[WEIGHTS], (await metrics(http))[LOADS]

    asked = [asyncio.create_task(text(http, "org/slow-crowd", prompt)) for prompt in prompts]
    await until(http, running=CROWD)
    gate.set()
    texts = await asyncio.gather(*asked)

    assert texts == world.texts("d", prompts, TOKENS)
    assert size <= hub.sent[WEIGHTS] - sent < 2 * size
    assert (await metrics(http))[LOADS] == before + 1


async def test_a_hub_that_hangs_on_one_adapter_delays_no_other_and_not_the_base(
    http, world, hub, gate
):
    hub.repos["org/hangs"] = Repo(files(world.root / "h"), faults={WEIGHTS: Fault(held=gate)})
    hub.repos["org/b"] = Repo(files(world.root / "b"))
    hub.repos["org/c"] = Repo(files(world.root / "c"))

    hangs = asyncio.create_task(text(http, "org/hangs", "tale 01"))
    await until(http, running=1)
    others = [await text(http, name, "tale 01") for name in ("org/b", "org/c", "", "d", "org/b")]
    waits = not hangs.done()
    gate.set()

    assert waits, "the others answered while the download was held"
    assert others == [world.text(name, "tale 01", TOKENS) for name in ("b", "c", "", "d", "b")]
    assert await hangs == world.text("h", "tale 01", TOKENS)


async def test_a_hub_that_hangs_before_it_says_what_an_adapter_is_delays_no_other(
    http, world, hub, gate
):
    hub.repos["org/mute"] = Repo(
        files(world.root / "a"), faults={WEIGHTS: Fault(hang=True, held=gate)}
    )
    hub.repos["org/late"] = Repo(files(world.root / "e"))
    ended: list[str] = []

    async def ask(name: str, prompt: str) -> httpx.Response:
        body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        reply = await http.post("/v1/completions", json=body)
        ended.append(name)
        return reply

    mute = [asyncio.create_task(ask("org/mute", f"tale {i:02}")) for i in range(CROWD)]
    await seen(hub, "org/mute")
    replies = [await ask(name, "tale 01") for name in ("org/late", "", "b", "org/late")]
    for client in mute:
        client.cancel()
    await asyncio.wait(mute)

    assert ended == ["org/late", "", "b", "org/late"]
    texts = [reply.json()["choices"][0]["text"] for reply in replies]
    assert texts == [world.text(name, "tale 01", TOKENS) for name in ("e", "", "b", "e")]


async def seen(hub: FakeHub, repo: str) -> None:
    """Wait until the hub was asked for the weights of a repository."""
    async with asyncio.timeout(PATIENCE_S):
        while not any(key[1:] == (repo, WEIGHTS) for key in list(hub.requests)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

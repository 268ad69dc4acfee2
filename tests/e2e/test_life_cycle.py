"""Adapters come, stay, are replaced and go, while others are served; few lanes force them to."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import client_of
from tests.product import GOOD, Served, World, events_of, serve, stop_cleanly

PROMPT, TOKENS, LONG = "tale 01", 16, 400
#: Each of the eight adapters takes 8 to 24 of these.
LANES = 48
NAMES = [recipe.name for recipe in GOOD]


@pytest.fixture(scope="module")
def crowded(world: World) -> Iterator[Served]:
    """A server whose lanes hold about half of the adapters, and that knows none by alias."""
    with serve(*world.bare_flags, f"--lanes={LANES}") as served:
        yield served
        stop_cleanly(served.command)


@pytest.fixture
async def http(crowded: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(crowded) as client:
        yield client


@pytest.fixture
def own(world: World, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an adapter that belongs to one test: a copy of `a` below the root."""
    name = f"own-{request.node.originalname}"
    shutil.copytree(world.root / "a", world.root / name)
    yield name
    shutil.rmtree(world.root / name)


async def ask(http: httpx.AsyncClient, adapter: str, prompt: str = PROMPT) -> httpx.Response:
    body = {"model": adapter, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply


async def text(http: httpx.AsyncClient, adapter: str, prompt: str = PROMPT) -> str:
    reply = await ask(http, adapter, prompt)
    return str(reply.json()["choices"][0]["text"])


async def shown(http: httpx.AsyncClient) -> dict[str, Any]:
    """Return the rows of `GET /v1/adapters` by name."""
    rows = (await http.get("/v1/adapters")).json()["data"]
    return {row["name"]: row for row in rows}


def replace_files(folder: Path, source: Path) -> None:
    """Replace an adapter's files as a careful user does: each by a rename."""
    for path in source.iterdir():
        copy = folder / f".{path.name}"
        shutil.copy(path, copy)
        copy.rename(folder / path.name)


async def test_load_makes_resident_and_delete_frees(http, world, own):
    body = {"name": "mine", "reference": str(world.root / own)}

    loaded = await http.post("/v1/adapters", json=body)
    again = await http.post("/v1/adapters", json=body)
    row = (await shown(http))["mine"]
    answer = await text(http, "mine")
    deleted = await http.delete("/v1/adapters/mine")
    gone = await http.delete("/v1/adapters/mine")
    unnamed = await http.post("/v1/completions", json={"model": "mine", "prompt": "a"})

    assert (loaded.status_code, again.status_code) == (201, 200)
    assert loaded.json()["tier"] == row["tier"] == "device"
    assert (row["rank"], row["lanes"], row["targets"]) == (8, 8, 21)
    assert row["load_ms"] > 0
    assert answer == world.text("a", PROMPT, TOKENS)
    assert deleted.status_code == 200
    assert deleted.json()["freed_lanes"] == 8
    assert deleted.json()["freed_host_bytes"] > 0
    assert gone.status_code == unnamed.status_code == 404
    assert "mine" not in await shown(http)


@pytest.mark.parametrize(
    ("bad", "status"), [("nope", 404), ("wide", 422), ("cut", 424), ("nan", 424)]
)
async def test_load_verifies(http, bad, status):
    reply = await http.post("/v1/adapters", json={"name": "mine", "reference": bad})

    assert reply.status_code == status
    assert "mine" not in await shown(http)


async def test_delete_is_refused_while_a_stream_uses_the_adapter(http, world, own):
    body = {
        "model": own, "prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "stream": True
    }  # fmt: skip

    async with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.aiter_lines()
        first = await anext(lines)
        refused = await http.delete(f"/v1/adapters/{own}")
        rest = [line async for line in lines]
    deleted = await http.delete(f"/v1/adapters/{own}")

    events = events_of("\n".join([first, *rest]))
    streamed = "".join(event["choices"][0]["text"] for event in events)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "adapter_in_use"
    assert streamed == world.text("a", PROMPT, LONG)
    assert (deleted.status_code, deleted.json()["freed_lanes"]) == (200, 8)


async def test_replaced_files_serve_new_requests_while_old_streams_end_as_they_began(
    http, world, own
):
    body = {
        "model": own, "prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "stream": True
    }  # fmt: skip

    async with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.aiter_lines()
        first = await anext(lines)
        replace_files(world.root / own, world.root / "e")
        new = await text(http, own)
        rest = [line async for line in lines]

    events = events_of("\n".join([first, *rest]))
    old = "".join(event["choices"][0]["text"] for event in events)
    assert old == world.text("a", PROMPT, LONG)
    assert new == world.text("e", PROMPT, TOKENS)


async def test_files_replaced_between_requests_serve_the_new_weights_under_the_alias(
    http, world, own
):
    await http.post("/v1/adapters", json={"name": "alias", "reference": own})
    before = await text(http, "alias")

    replace_files(world.root / own, world.root / "h")
    after = await text(http, "alias")
    await http.delete("/v1/adapters/alias")

    assert before == world.text("a", PROMPT, TOKENS)
    assert after == world.text("h", PROMPT, TOKENS)


async def test_after_a_replacement_a_name_means_the_new_files_to_pin_and_delete(http, world, own):
    old = (await ask(http, own)).headers["x-loralane-adapter-digest"]
    replace_files(world.root / own, world.root / "h")
    new = (await ask(http, own)).headers["x-loralane-adapter-digest"]

    pinned = await http.patch(f"/v1/adapters/{own}", json={"pinned": True})
    deleted = await http.delete(f"/v1/adapters/{own}")
    left = {row["digest"] for row in (await http.get("/v1/adapters")).json()["data"]}

    assert old != new
    assert pinned.json()["digest"] == new
    assert deleted.json()["freed_lanes"] == 8
    assert (old in left, new in left) == (True, False)


async def test_a_pin_follows_the_name_when_its_files_are_replaced(http, world, own):
    old = (await ask(http, own)).headers["x-loralane-adapter-digest"]
    await http.patch(f"/v1/adapters/{own}", json={"pinned": True})

    replace_files(world.root / own, world.root / "h")
    new = (await ask(http, own)).headers["x-loralane-adapter-digest"]
    listed = (await http.get("/v1/adapters")).json()["data"]
    pinned = {row["digest"]: row["pinned"] for row in listed}
    await http.delete(f"/v1/adapters/{own}")

    assert (pinned[old], pinned[new]) == (False, True)


async def test_more_adapters_than_lanes_are_all_right_in_any_order(http, world):
    rounds = [NAMES, NAMES[::-1], NAMES[::2] + NAMES[1::2]]

    for names in rounds:
        for name in names:
            assert await text(http, name) == world.text(name, PROMPT, TOKENS)

    rows = await shown(http)
    tiers = {name: rows[name]["tier"] for name in NAMES}
    assert set(tiers.values()) == {"device", "host"}, "some had to leave the device"
    assert sum(rows[n]["lanes"] for n in NAMES if tiers[n] == "device") <= LANES


async def test_more_adapters_than_lanes_at_once_are_all_right(http, world):
    asked = [(name, f"tale {i:02}") for i in range(5) for name in NAMES]

    texts = await asyncio.gather(*(text(http, *one) for one in asked))

    assert texts == [world.text(name, prompt, TOKENS) for name, prompt in asked]


async def test_a_pinned_adapter_stays_while_others_rotate(http, world):
    await text(http, "c")
    pinned = await http.patch("/v1/adapters/c", json={"pinned": True})

    for name in NAMES * 2:
        if name != "c":
            await text(http, name)
    row = (await shown(http))["c"]
    answer = await text(http, "c")
    released = await http.patch("/v1/adapters/c", json={"pinned": False})

    assert pinned.json()["pinned"] is True
    assert (row["tier"], row["pinned"]) == ("device", True)
    assert answer == world.text("c", PROMPT, TOKENS)
    assert released.json()["pinned"] is False


async def test_what_no_lanes_can_hold_is_too_large(http, world):
    reply = await http.post("/v1/completions", json={"model": "large", "prompt": "a"})

    assert reply.status_code == 413
    assert "--lanes" in reply.json()["error"]["message"]

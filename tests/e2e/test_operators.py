"""What operators see and set: dry runs, pages, times to live, adapters at start, who waited."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import client_of
from tests.product import (
    GOOD,
    LONGEST,
    PATIENCE_S,
    Command,
    Served,
    World,
    metrics,
    serve,
    stop_cleanly,
)

PROMPT, TOKENS = "tale 01", 8
DIGEST, COLD = "x-loralane-adapter-digest", "x-loralane-adapter-cold-ms"


@pytest.fixture(scope="module")
def small(world: World) -> Iterator[Served]:
    """A server with one row, that has `a` and `c` from the start and knows no other by alias."""
    flags = [*world.bare_flags, f"--max-model-len={LONGEST}", "--max-rows=1"]
    with serve(*flags, "--preload=a", "--pin=c") as served:
        yield served
        stop_cleanly(served.command)


@pytest.fixture
async def http(small: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(small) as client:
        yield client


def body_of(adapter: str, tokens: int = TOKENS, stream: bool = False) -> dict[str, Any]:
    return {
        "model": adapter,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
    }


async def ask(http: httpx.AsyncClient, adapter: str, stream: bool = False) -> httpx.Response:
    reply = await http.post("/v1/completions", json=body_of(adapter, stream=stream))
    assert reply.status_code == 200, reply.text
    return reply


async def rows(http: httpx.AsyncClient) -> dict[str, Any]:
    listed = (await http.get("/v1/adapters")).json()["data"]
    return {row["name"]: row for row in listed}


async def until_tier(http: httpx.AsyncClient, name: str, tier: str) -> None:
    """Return when an adapter is in a tier."""
    async with asyncio.timeout(PATIENCE_S):
        while (await rows(http)).get(name, {}).get("tier") != tier:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # leaves the processor to the server


async def test_adapters_of_the_start_are_resident_before_the_first_request(http, world, small):
    listed = await rows(http)

    reply = await ask(http, "a")

    assert {name: row["tier"] for name, row in listed.items()} == {"a": "device", "c": "device"}
    assert [listed[name]["pinned"] for name in "ac"] == [False, True]
    assert listed["a"]["load_ms"] > 0
    assert listed["a"]["load_times"]["write_ms"] > 0
    assert listed["a"]["host_bytes"] > 0
    assert reply.headers[COLD] == "0.0"
    assert reply.json()["choices"][0]["text"] == world.text("a", PROMPT, TOKENS)
    assert "preloaded adapter 2 of 2" in small.command.output


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_first_request_of_an_adapter_waited_for_it(http, stream):
    name = "d" if stream else "e"

    first, second = [await ask(http, name, stream) for _ in range(2)]

    assert float(first.headers[COLD]) > 0
    assert second.headers[COLD] == "0.0"
    assert first.headers[DIGEST] == second.headers[DIGEST] == (await rows(http))[name]["digest"]


@pytest.mark.parametrize("name", [recipe.name for recipe in GOOD])
async def test_a_dry_run_finds_what_a_request_finds_and_leaves_nothing(http, world, name):
    before = await rows(http)

    told = await http.post("/v1/adapters/validate", json={"reference": name, "tensors": True})
    after = await rows(http)

    facts = told.json()
    recipe = next(recipe for recipe in GOOD if recipe.name == name)
    assert facts["valid"] is True
    assert facts["rank"] == max([recipe.rank, *(rank for _, rank in recipe.rank_pattern)])
    assert facts["notes"] == []
    assert before == after


@pytest.mark.parametrize("bad", ["nope", "wide", "cut", "pickle"])
async def test_a_dry_run_says_what_a_request_would_be_answered(http, bad):
    asked = await http.post("/v1/completions", json=body_of(bad))

    told = await http.post("/v1/adapters/validate", json={"reference": bad})

    assert asked.status_code >= 400
    assert told.status_code == 200
    assert told.json() == {"valid": False, "status": asked.status_code, **asked.json()}


async def test_a_dry_run_finds_a_bad_number_only_if_it_reads_the_tensors(http):
    quick = await http.post("/v1/adapters/validate", json={"reference": "nan"})
    whole = await http.post("/v1/adapters/validate", json={"reference": "nan", "tensors": True})

    assert quick.json()["valid"] is True
    assert (whole.json()["valid"], whole.json()["status"]) == (False, 424)


async def test_an_adapter_that_nobody_uses_is_forgotten_and_comes_back_when_it_is_named(
    http, world
):
    body = {"name": "short", "reference": "h", "ttl_s": 0.1}

    loaded = await http.post("/v1/adapters", json=body)
    await until_tier(http, "short", "remote")
    gone = (await rows(http))["short"]
    reply = await ask(http, "short")

    assert (loaded.json()["tier"], loaded.json()["ttl_s"]) == ("device", 0.1)
    assert (gone["digest"], gone["host_bytes"]) == ("", 0)
    assert reply.json()["choices"][0]["text"] == world.text("h", PROMPT, TOKENS)


async def test_an_adapter_is_read_to_memory_while_its_request_waits_for_a_row(http, world):
    # Far longer than any read: its client leaves when it has seen what it waits for.
    endless = {**body_of("a", LONGEST - 100, stream=True), "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=endless) as running:
        lines = running.aiter_lines()  # kept: an iterator that is dropped closes its stream
        await anext(lines)
        waiting = asyncio.create_task(ask(http, "b"))
        await until_tier(http, "b", "host")
        still_waiting = not waiting.done()
    reply = await waiting

    assert still_waiting
    assert reply.json()["choices"][0]["text"] == world.text("b", PROMPT, TOKENS)


async def test_metrics_tell_what_each_adapter_was_used_for(http):
    await ask(http, "f")
    await ask(http, "f")

    found = await metrics(http)
    digest = (await rows(http))["f"]["digest"][:16]

    labels = f'{{adapter="f",digest="{digest}"}}'
    assert found[f"loralane_adapter_requests_total{labels}"] == 2
    assert found[f"loralane_adapter_generated_tokens_total{labels}"] == 2 * TOKENS
    assert found[f"loralane_adapter_cold_starts_total{labels}"] == 1
    assert found[f"loralane_adapter_time_to_first_token_seconds_count{labels}"] == 2
    assert found['vllm:lora_adapter_loaded{adapter_name="f",level="gpu",pinned="false"}'] == 1
    assert found['vllm:lora_adapter_loaded{adapter_name="c",level="gpu",pinned="true"}'] == 1


async def test_deleting_in_a_loop_fails_no_request(http, world):
    done = asyncio.Event()
    names = ["a", "b", "d", "e"] * 8

    async def delete() -> list[httpx.Response]:
        replies = []
        while not done.is_set():
            for name in "abde":
                replies.append(await http.delete(f"/v1/adapters/{name}"))
        return replies

    deleting = asyncio.create_task(delete())
    replies = await asyncio.gather(*(ask(http, name) for name in names))
    done.set()
    deleted = await deleting

    texts = [reply.json()["choices"][0]["text"] for reply in replies]
    assert texts == [world.text(name, PROMPT, TOKENS) for name in names]
    statuses = {reply.status_code for reply in deleted}
    assert 200 in statuses
    assert statuses <= {200, 404, 409}


def test_a_shard_that_cannot_preload_says_why_and_ends(world: World):
    command = Command("shard", *world.bare_flags, "--listen=127.0.0.1:0", "--pin=wide")

    status = command.wait()

    assert status == 1
    assert "adapter wide cannot be preloaded: " in command.output
    assert "ready" not in command.output


def test_check_with_tensors_reads_them(world: World):
    model, *flags = world.bare_flags
    quick, whole = [
        Command("check", "nan", f"--model={model}", *flags, *more) for more in ([], ["--tensors"])
    ]

    statuses = [quick.wait(), whole.wait()]

    assert statuses == [0, 1]
    assert json.loads(quick.output)["notes"] == []
    assert "NaN" in whole.output or "finite" in whole.output

"""Many streams over many adapters in one batch, and half of their clients gone."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import client_of
from tests.product import (
    GOOD,
    LONGEST,
    Served,
    World,
    assert_all_free,
    events_of,
    metrics,
    serve,
    stop_cleanly,
    until,
)

ADAPTERS = ("", *(recipe.name for recipe in GOOD))
STREAMS, TOKENS, LONG = 64, 32, 200
#: What those ask for who leave: one that is computed to its end makes more than all others.
ENDLESS = LONGEST - 100

Case = tuple[str, str]


def cases() -> list[Case]:
    """64 different (adapter, prompt), neighbours of different adapters."""
    return [(ADAPTERS[i % len(ADAPTERS)], f"tale {i:02}") for i in range(STREAMS)]


def expected_texts(world: World, asked: list[Case], tokens: int) -> list[str]:
    """The reference's texts; one batch of the reference for each adapter."""
    texts: dict[Case, str] = {}
    for adapter in ADAPTERS:
        mine = [case for case in asked if case[0] == adapter]
        found = world.texts(adapter, [prompt for _, prompt in mine], tokens)
        texts.update(zip(mine, found, strict=True))
    assert len(set(texts.values())) == len(asked), "a reference that degenerates proves nothing"
    return [texts[case] for case in asked]


async def stream(http: httpx.AsyncClient, case: Case, tokens: int) -> str:
    """Return the whole text of one stream."""
    async with http.stream("POST", "/v1/completions", json=body(case, tokens)) as reply:
        events = events_of((await reply.aread()).decode())
    return "".join(event["choices"][0]["text"] for event in events)


def body(case: Case, tokens: int) -> dict[str, object]:
    adapter, prompt = case
    return {
        "model": adapter, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True
    }  # fmt: skip


async def test_64_streams_over_8_adapters_and_the_base_are_all_right(http, world):
    asked = cases()

    before = await metrics(http)

    texts = await asyncio.gather(*(stream(http, case, TOKENS) for case in asked))

    assert texts == expected_texts(world, asked, TOKENS)
    after = await metrics(http)
    steps, tokens = (
        after[name] - before[name]
        for name in ("loralane_steps_total", "loralane_generated_tokens_total")
    )
    assert tokens == STREAMS * TOKENS
    assert TOKENS <= steps < tokens / 4, "they ran in one batch"


@pytest.fixture
def long(world: World) -> Iterator[Served]:
    """A server for as many streams, of the model's whole length."""
    flags = [*world.flags, f"--max-model-len={LONGEST}", f"--max-rows={STREAMS}"]
    with serve(*flags) as served:
        yield served
        stop_cleanly(served.command)


async def test_streams_whose_neighbours_vanish_end_right_and_everything_is_free_again(long, world):
    asked = cases()
    both = asyncio.Barrier(STREAMS)

    async def leave(case: Case) -> None:
        async with http.stream("POST", "/v1/completions", json=body(case, ENDLESS)) as reply:
            lines = reply.aiter_lines()  # kept: an iterator that is dropped closes its stream
            await anext(lines)
            await both.wait()

    async def stay(case: Case) -> str:
        async with http.stream("POST", "/v1/completions", json=body(case, LONG)) as reply:
            lines = reply.aiter_lines()
            first = await anext(lines)
            await both.wait()
            rest = [line async for line in lines]
        events = events_of("\n".join([first, *rest]))
        return "".join(event["choices"][0]["text"] for event in events)

    async with client_of(long) as http:
        async with asyncio.TaskGroup() as group:
            staying = [group.create_task(stay(case)) for case in asked[::2]]
            for case in asked[1::2]:
                group.create_task(leave(case))
        after = await until(http, running=0, waiting=0)

    assert [task.result() for task in staying] == expected_texts(world, asked, LONG)[::2]
    assert_all_free(after)
    of_gone = after["loralane_generated_tokens_total"] - STREAMS // 2 * LONG
    assert of_gone < ENDLESS, "all were freed when they left, none at its end"

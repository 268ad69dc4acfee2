"""Half of 64 clients leave at once: what they held is free two steps later, seen in /metrics."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from transformers import LlamaConfig

from tests import reference
from tests.product import metrics, serve, stop_cleanly, until

STREAMS, ADAPTERS = 64, 8


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose steps take so long that they can be told apart from outside."""
    folder = tmp_path_factory.mktemp("slow")
    size = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 192}
    config = LlamaConfig(**{**reference.FAMILIES["llama"].to_dict(), **size})
    model = reference.random_model(config)
    reference.save_model(model, folder / "model")
    for i in range(ADAPTERS):
        recipe = reference.AdapterRecipe(f"a{i}", 8, 16)
        reference.save_adapter(model, recipe, folder / "adapters" / f"a{i}", seed=i)
    return folder


@pytest.fixture(scope="module")
async def slow_http(slow_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    flags = [
        str(slow_model / "model"),
        f"--adapter-root={slow_model / 'adapters'}",
        "--dtype=float32",
        f"--max-rows={STREAMS}",
        "--threads=1",
    ]
    with serve(*flags) as served:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=60) as http:
            yield http
        stop_cleanly(served.command)


async def test_half_of_the_streams_leave_and_free_all_they_held_within_two_steps(
    slow_http: httpx.AsyncClient,
) -> None:
    leave, done = asyncio.Event(), asyncio.Event()
    started = asyncio.Barrier(STREAMS + 1)

    async def stream(i: int, until_: asyncio.Event) -> None:
        # Those who leave use adapters 0 to 3, those who stay 4 to 7: lanes come free as well.
        adapter = f"a{i // 2 % 4 + (4 if until_ is done else 0)}"
        body = {"model": adapter, "prompt": f"{i:02}", "max_tokens": 200}
        forced = {"temperature": 0, "ignore_eos": True, "stream": True}
        async with slow_http.stream("POST", "/v1/completions", json=body | forced) as reply:
            lines = reply.aiter_lines()  # held: dropping it would end the stream
            await anext(lines)
            await started.wait()
            await until_.wait()

    async with asyncio.TaskGroup() as group:
        for i in range(STREAMS):
            group.create_task(stream(i, leave if i % 2 else done))
        await started.wait()
        full = await metrics(slow_http)
        leave.set()
        gone = await metrics(slow_http)  # its request is sent behind the 32 disconnects
        free = await until(slow_http, running=STREAMS // 2)
        done.set()

    assert full["loralane_rows_free"] == 0
    assert full["loralane_lanes_in_use"] == ADAPTERS * 8
    assert free["loralane_rows_free"] == STREAMS // 2
    assert free["loralane_lanes_in_use"] == ADAPTERS // 2 * 8
    assert free["loralane_pages_free"] > full["loralane_pages_free"]
    assert free["loralane_steps_total"] - gone["loralane_steps_total"] <= 2

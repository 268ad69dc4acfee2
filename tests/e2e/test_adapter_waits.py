"""A request that waits for its adapter no longer than it says, in front of the real shard."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.product import World

TOKENS = 8


@pytest.fixture
def unheard_of(world: World, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An adapter that no request has named yet, equal to "b"; nothing of it is read within 1 ms."""
    own = world.root / request.node.name.replace("[", "-").rstrip("]")
    shutil.copytree(world.root / "b", own)
    yield own
    shutil.rmtree(own)


async def ask(http: httpx.AsyncClient, adapter: Path | str, **fields: object) -> httpx.Response:
    body = {"model": str(adapter), "prompt": "a tale", "max_tokens": TOKENS, "temperature": 0}
    return await http.post("/v1/completions", json=body | fields)


async def test_an_adapter_that_is_not_ready_in_time_is_an_error_that_passes(
    http, world, unheard_of
):
    late = await ask(http, unheard_of, max_wait_for_adapter_ms=1)
    waits = await ask(http, unheard_of)
    in_time = await ask(http, unheard_of, max_wait_for_adapter_ms=60_000)

    assert late.status_code == 503
    assert late.json()["error"]["code"] == "adapter_loading"
    assert int(late.headers["retry-after"]) >= 1
    expected = world.text("b", "a tale", TOKENS)
    assert [r.json()["choices"][0]["text"] for r in (waits, in_time)] == [expected] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_where_the_request_allows_it_the_base_answers_and_says_so(
    http, world, unheard_of, stream
):
    late = {"max_wait_for_adapter_ms": 1, "adapter_wait_policy": "base"}
    base = await ask(http, "")

    fallen = await ask(http, unheard_of, stream=stream, **late)

    assert fallen.status_code == 200
    assert fallen.headers["x-loralane-adapter-fallback"] == "base"
    assert "x-loralane-adapter-digest" not in fallen.headers
    if not stream:
        assert fallen.json()["model"] == base.json()["model"] != str(unheard_of)
        assert fallen.json()["choices"] == base.json()["choices"]
        assert fallen.json()["choices"][0]["text"] == world.text("", "a tale", TOKENS)


async def test_a_repeated_prompt_is_cached_and_says_so(http, world):
    body = {"model": "a", "prompt": "once upon a time " * 9, "max_tokens": 4, "temperature": 0}

    first = (await http.post("/v1/completions", json=body)).json()
    again = (await http.post("/v1/completions", json=body)).json()

    cached = [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in (first, again)]
    assert cached[0] == 0
    assert 0 < cached[1] < first["usage"]["prompt_tokens"]
    expected = world.text("a", body["prompt"], 4)
    assert [r["choices"][0]["text"] for r in (first, again)] == [expected] * 2

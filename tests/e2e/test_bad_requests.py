"""What cannot be served is refused with a reason, by the route's own shape, and disturbs nobody."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.product import CONTEXT, World, events_of

TOKENS = 200
PROMPTS = ("tale 01", "tale 02")


@pytest.fixture
async def undisturbed(http: httpx.AsyncClient, world: World) -> AsyncIterator[None]:
    """Streams over base and adapters that run while the test does; their texts must be right."""

    async def stream(adapter: str, prompt: str) -> str:
        reply = await http.post("/v1/completions", json=asking(adapter, prompt))
        return "".join(event["choices"][0]["text"] for event in events_of(reply.text))

    asked = [(adapter, prompt) for adapter in ("", "a", "g") for prompt in PROMPTS]
    tasks = [asyncio.create_task(stream(*one)) for one in asked]
    yield
    texts = await asyncio.gather(*tasks)
    assert texts == [world.text(adapter, prompt, TOKENS) for adapter, prompt in asked]


def asking(adapter: str, prompt: str) -> dict[str, object]:
    return {
        "model": adapter, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True
    }  # fmt: skip


async def refusals(http: httpx.AsyncClient, adapter: str) -> list[httpx.Response]:
    """Ask for an adapter on both surfaces, streaming and not."""
    replies = []
    for stream in (False, True):
        openai = {"model": adapter, "prompt": "a", "stream": stream}
        chat = {
            "model": adapter, "messages": [{"role": "user", "content": "a"}], "stream": stream
        }  # fmt: skip
        native = {"inputs": "a", "parameters": {"adapter_id": adapter}, "stream": stream}
        replies += [
            await http.post("/v1/completions", json=openai),
            await http.post("/v1/chat/completions", json=chat),
            await http.post("/", json=native),
            await http.post("/generate", json=native),
        ]
    return [*replies, await http.post("/generate_stream", json=native)]


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """Return {"message", "code" or "error_type", ...}; the body must have the route's shape."""
    body = reply.json()
    if reply.request.url.path.startswith("/v1/"):
        error: dict[str, Any] = body.pop("error")
        assert body == {}
        assert error.keys() - {"tensors"} == {"message", "type", "param", "code"}
        return error
    assert body.keys() == {"error", "error_type"}
    return {"message": body["error"], "error_type": body["error_type"]}


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    ("adapter", "status", "code", "message"),
    [
        ("nope", 404, "adapter_not_found", "no alias and no folder is named 'nope'"),
        ("wide", 422, "adapter_incompatible", "lora_A.weight"),
        ("pickle", 422, "adapter_incompatible", "save the adapter with PEFT as safetensors"),
        ("cut", 424, "adapter_corrupt", "truncated"),
        ("nan", 424, "adapter_corrupt", "not finite"),
    ],
)
async def test_a_bad_adapter_fails_only_its_own_requests(http, adapter, status, code, message):
    for reply in await refusals(http, adapter):
        error = error_of(reply)

        assert reply.status_code == status
        assert message in error["message"]
        assert error.get("code", code) == code
        assert reply.headers["x-request-id"]


async def test_the_tensors_that_do_not_fit_are_named(http):
    reply = await http.post("/v1/completions", json={"model": "wide", "prompt": "a"})

    error = error_of(reply)
    assert error["tensors"]
    assert all(".lora_" in name and name in error["message"] for name in error["tensors"])


@pytest.mark.usefixtures("undisturbed")
async def test_a_path_outside_the_roots_is_refused_and_not_looked_at(http, world):
    trap = world.folder / "outside" / "trap"
    trap.mkdir(parents=True, exist_ok=True)
    fifos = [trap / "adapter_config.json", trap / "adapter_model.safetensors"]
    for fifo in fifos:
        os.mkfifo(fifo)  # whoever opens it waits for ever
    link = world.root / "link"
    link.symlink_to(trap)

    there = [*await refusals(http, str(trap)), *await refusals(http, str(trap) + "/../trap")]
    nowhere = await refusals(http, str(world.folder / "outside" / "gone"))
    linked = await refusals(http, "link")

    for reply in (*there, *nowhere, *linked):
        assert reply.status_code == 404
    told = [error_of(reply)["message"].replace("trap", "gone") for reply in there[:9]]
    assert told == [error_of(reply)["message"] for reply in nowhere], "it tells what exists"
    assert all("--adapter-root" in message for message in told)


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "a" * CONTEXT}, "prompt", "shorten the prompt"),
        ({"prompt": "a" * 12, "max_tokens": CONTEXT}, "max_tokens", "ask for at most 499"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "a", "temperature": -1}, "temperature", "0"),
        ({"prompt": [260]}, "prompt", "259"),
    ],
)
async def test_a_request_that_no_model_could_serve_is_400_with_the_field(
    http, body, param, message
):
    for stream in (False, True):
        reply = await http.post("/v1/completions", json={"model": "a", "stream": stream, **body})

        error = error_of(reply)
        assert (reply.status_code, error["param"]) == (400, param)
        assert message in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/", "/generate"])
@pytest.mark.parametrize("raw", [b"{", b"", b"[]", b'{"prompt": "\xff"}'])
async def test_malformed_json_is_400_in_the_routes_shape(http, path, raw):
    reply = await http.post(path, content=raw)

    assert reply.status_code == 400
    assert error_of(reply)["message"]

"""A client that leaves frees what it used, whenever it leaves."""

import asyncio
import contextlib
import json

import pytest


@contextlib.asynccontextmanager
async def leaving(url: str, path: str, body: dict):
    """Send a request; give the connection's reader; hang up."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    try:
        yield reader
    finally:
        writer.transport.abort()


def body_of(path: str, text: str, stream: bool) -> dict:
    messages = [{"role": "user", "content": text}]
    return {"prompt": text, "inputs": text, "messages": messages, "stream": stream, "seed": 1}


PATHS = ["/v1/completions", "/v1/chat/completions", "/", "/generate"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["queue", "hold", "pause"])
async def test_leaving_closes_the_generation(url, router, path, stream, moment):
    async with leaving(url, path, body_of(path, f"{moment} it", stream)):
        await router.until_running(1)

    await router.until_running(0)
    assert not router.gate.is_set()


async def test_leaving_after_some_events_closes_the_generation(url, router):
    async with leaving(url, "/v1/completions", body_of("", "pause it", True)) as reader:
        await reader.readuntil(b"data: ")

    await router.until_running(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_closes_every_choice(url, router, stream):
    body = body_of("", "pause it", stream) | {"n": 3}

    async with leaving(url, "/v1/completions", body):
        await router.until_running(3)

    await router.until_running(0)


async def test_one_bad_choice_closes_the_others(http, router):
    reply = await http.post("/v1/completions", json={"prompt": ["ok", "x" * 200]})

    assert reply.status_code == 400
    await router.until_running(0)


async def test_forty_clients_vanish_and_the_next_is_served(url, http, router):
    for _ in range(40):
        async with leaving(url, "/v1/completions", body_of("", "pause it", True)) as reader:
            await reader.readuntil(b"data: ")
    await router.until_running(0)

    reply = await http.post("/v1/completions", json={"prompt": "a b", "temperature": 0})

    assert reply.json()["choices"][0]["text"] == "b a"


async def test_a_silent_stream_is_kept_alive(http, router):
    body = {"prompt": "pause it", "stream": True, "temperature": 0}

    async with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.aiter_lines()
        while await anext(lines) != ": keep-alive":
            pass
        router.gate.set()
        rest = [line async for line in lines]

    assert rest[-2:] == ["data: [DONE]", ""]


async def test_a_long_wait_for_the_first_token_commits_to_200_and_is_kept_alive(http, router):
    body = {"prompt": "hold it", "stream": True, "temperature": 0}

    async with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.aiter_lines()
        first = await anext(lines)
        router.gate.set()
        rest = [line async for line in lines]

    assert reply.status_code == 200
    assert first == ": keep-alive"
    assert "data: [DONE]" in rest

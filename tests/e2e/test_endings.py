"""How it ends: a signal lets streams finish, a dead shard fails them, and nothing stays behind."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
import pytest
from loralane_proto import inference_pb2 as pb
from loralane_proto import inference_pb2_grpc

from tests.e2e.conftest import client_of
from tests.product import LONGEST, Command, Served, World, events_of, serve

PROMPT, TOKENS = "tale 01", 400
ENDLESS = LONGEST - 100


@pytest.fixture
def served(world: World) -> Iterator[Served]:
    """A server that the test ends."""
    with serve(*world.flags, f"--max-model-len={LONGEST}") as served:
        yield served


class Stream:
    """A stream over HTTP that has begun; `rest` reads it to its end."""

    def __init__(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        self._http, self._path, self._body = http, path, body
        self._context: Any = None
        self._lines: AsyncIterator[str]
        self._first = ""

    async def begin(self) -> "Stream":
        self._context = self._http.stream("POST", self._path, json=self._body | {"stream": True})
        reply = await self._context.__aenter__()
        assert reply.status_code == 200
        self._lines = reply.aiter_lines()
        self._first = await anext(self._lines)
        return self

    async def rest(self) -> tuple[list[Any], str]:
        """Return all events and the raw text; fails if the connection breaks."""
        lines = [self._first, *[line async for line in self._lines]]
        await self._context.__aexit__(None, None, None)
        text = "\n".join(lines)
        return events_of(text), text


def completion(http: httpx.AsyncClient, adapter: str, tokens: int) -> Stream:
    body = {"model": adapter, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    return Stream(http, "/v1/completions", body)


def native(http: httpx.AsyncClient, adapter: str, tokens: int) -> Stream:
    parameters = {"adapter_id": adapter, "max_new_tokens": tokens}
    return Stream(http, "/generate_stream", {"inputs": PROMPT, "parameters": parameters})


async def read_grpc(channel: grpc.aio.Channel, adapter: str, tokens: int, begun: asyncio.Event):
    """Return the text that came and the status that ended it."""
    request = pb.GenerateRequest(adapter=adapter, prompt=PROMPT, max_tokens=tokens)
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
    text = ""
    try:
        async for reply in call:
            text += reply.text
            begun.set()
    except grpc.aio.AioRpcError as error:
        return text, error.code()
    return text, await call.code()


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events)


async def ended(served: Served, children: list[psutil.Process]) -> int:
    """Wait for the end; no child may be left."""
    status = await asyncio.to_thread(served.command.wait)
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    return status


async def test_sigterm_lets_streams_finish_and_ends_with_0(served: Served, world: World):
    children = served.command.children()
    begun = asyncio.Event()
    async with client_of(served) as http, grpc.aio.insecure_channel(served.grpc) as channel:
        streams = [await completion(http, adapter, TOKENS).begin() for adapter in ("", "a")]
        by_grpc = asyncio.create_task(read_grpc(channel, "g", TOKENS, begun))
        await begun.wait()

        served.command.terminate()
        answers = [await stream.rest() for stream in streams]
        answer = await by_grpc

    assert [text_of(events) for events, _ in answers] == [
        world.text(adapter, PROMPT, TOKENS) for adapter in ("", "a")
    ]
    assert all(raw.rstrip().endswith("[DONE]") for _, raw in answers)
    assert answer == (world.text("g", PROMPT, TOKENS), grpc.StatusCode.OK)
    assert await ended(served, children) == 0


async def test_streams_longer_than_the_grace_end_with_one_error(served: Served):
    children = served.command.children()
    begun = asyncio.Event()
    async with client_of(served) as http, grpc.aio.insecure_channel(served.grpc) as channel:
        openai = await completion(http, "a", ENDLESS).begin()
        lorax = await native(http, "b", ENDLESS).begin()
        by_grpc = asyncio.create_task(read_grpc(channel, "g", ENDLESS, begun))
        await begun.wait()

        served.command.terminate()
        assert_one_error(await openai.rest(), await lorax.rest())
        _, status = await by_grpc

    assert status is grpc.StatusCode.UNAVAILABLE
    assert await ended(served, children) == 0


async def test_a_killed_shard_ends_streams_with_one_error_and_serve_with_1(served: Served):
    children = served.command.children()
    begun = asyncio.Event()
    async with client_of(served) as http, grpc.aio.insecure_channel(served.grpc) as channel:
        openai = await completion(http, "a", ENDLESS).begin()
        lorax = await native(http, "b", ENDLESS).begin()
        by_grpc = asyncio.create_task(read_grpc(channel, "g", ENDLESS, begun))
        whole = asyncio.create_task(
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": ENDLESS})
        )
        await begun.wait()

        os.kill(shard_of(children).pid, signal.SIGKILL)
        assert_one_error(await openai.rest(), await lorax.rest())
        _, status = await by_grpc
        reply = await whole

    assert status is grpc.StatusCode.UNAVAILABLE
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
    assert await ended(served, children) == 1
    assert "the shard ended with status -9" in served.command.output


def shard_of(children: list[psutil.Process]) -> psutil.Process:
    (shard,) = [child for child in children if "loralane_server" in child.cmdline()]
    return shard


def assert_one_error(openai: tuple[list[Any], str], lorax: tuple[list[Any], str]) -> None:
    """The last event of each stream, and only that, is an error in the route's shape."""
    *events, error = openai[0]
    assert all("error" not in event for event in events)
    assert error["error"]["code"] == "unavailable"
    assert "[DONE]" not in openai[1]
    *events, error = lorax[0]
    assert all("error" not in event for event in events)
    assert error.keys() == {"error", "error_type"}


async def test_a_second_sigterm_does_not_wait_for_streams(served: Served):
    children = served.command.children()
    async with client_of(served) as http:
        await completion(http, "a", ENDLESS).begin()

        served.command.terminate()
        served.command.terminate()
        status = await ended(served, children)

    assert status == 0


def test_a_shard_that_cannot_start_says_why_and_ends_serve_with_1(world: World):
    command = Command("serve", str(world.folder / "gone"), "--port=0")

    status = command.wait()

    assert status == 1
    assert "there is no folder" in command.output
    assert "the shard ended with status 1" in command.output

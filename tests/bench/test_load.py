"""The load generator against a server whose answers are known."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.load import Arrivals, Generator, Work, run_cases
from bench.stream import Client, Server, StreamFailed

WORK = Work("base", tuple(f"a{i}" for i in range(9)), prompt_tokens=5, new_tokens=3, vocab=50)


class CountingServer:
    """Answers every completion with the tokens it asks for, two events in one HTTP chunk."""

    def __init__(self, *, short_by: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.connections = 0
        self._short_by = short_by

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.asked.append(body)
                writer.write(self._answer(body))
        writer.close()

    def _answer(self, body: dict[str, Any]) -> bytes:
        count = body["max_tokens"] - self._short_by
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        events = [{"choices": [{"text": "x"}]}] * count + [{"choices": [], "usage": usage}]
        lines = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events)
        lines += b"data: [DONE]\n\n"
        half = len(lines) // 2
        chunks = (f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in (lines[:half], lines[half:]))
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(
            (*chunks, b"0\r\n\r\n")
        )


@contextlib.asynccontextmanager
async def served(fake: CountingServer, work: Work = WORK) -> AsyncIterator[Generator]:
    listening = await asyncio.start_server(fake.answer, "127.0.0.1", 0)
    client = Client(Server("127.0.0.1", listening.sockets[0].getsockname()[1]))
    async with listening:
        yield Generator(client, work)
        client.close()


async def test_a_round_of_eight_adapters_uses_each_of_them_and_sums_up():
    fake = CountingServer()

    async with served(fake) as generator:
        figures, share = await generator.round("eight", Arrivals(16))

    assert Counter(body["model"] for body in fake.asked) == dict.fromkeys(WORK.adapters[:8], 2)
    assert figures.tokens == 16 * 3
    assert figures.prompt_tokens == 16 * 5
    assert share >= 0


async def test_no_two_prompts_are_alike_and_connections_are_used_again():
    fake = CountingServer()

    async with served(fake) as generator:
        await run_cases(generator, ["base", "one"], Arrivals(4), rounds=2)

    prompts = {tuple(body["prompt"]) for body in fake.asked}
    assert len(prompts) == len(fake.asked) == 4 * 2 * (1 + 2)
    assert fake.connections == 4


async def test_an_answer_that_is_too_short_fails_the_round():
    async with served(CountingServer(short_by=1)) as generator:
        with pytest.raises(StreamFailed, match="5 \\+ 2 tokens instead of 5 \\+ 3"):
            await generator.round("base", Arrivals(1))


async def test_a_refusal_is_told_with_its_status():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater")
        writer.close()

    listening = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with listening:
        client = Client(Server("127.0.0.1", listening.sockets[0].getsockname()[1]))
        with pytest.raises(StreamFailed, match="429: later"):
            await client.post("/v1/completions", b"{}")


def test_open_arrivals_are_spread_at_their_rate_and_bursts_are_not():
    delays = Arrivals(4000, rate=20.0).delays(seed=1)

    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(4000 / 20.0, rel=0.1)
    assert Arrivals(3).delays(seed=1) == [0.0, 0.0, 0.0]

"""Cold against warm, on servers whose delays are scripted."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from bench.cold import Summary, Timed, Turn, alternate, findings
from bench.load import Work
from bench.stream import Client, Server

WORK = Work("base", (), prompt_tokens=5, new_tokens=4, vocab=50)


class Asked:
    """Answers every completion at once, and remembers who was asked for what, in order."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name = name
        self.log = log
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.log.append((self.name, body["model"]))
                writer.write(self._answer(body))
        writer.close()

    def _answer(self, body: dict[str, Any]) -> bytes:
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
        events = [{"choices": [{"text": "x"}]}, {"choices": [], "usage": usage}]
        lines = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        return (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Loralane-Adapter-Cold-Ms: 7.5\r\n"
            b"\r\n" + f"{len(lines):x}\r\n".encode() + lines + b"\r\n0\r\n\r\n"
        )


@contextlib.asynccontextmanager
async def timed(asked: Asked, *, one_event_a_token: bool = False) -> AsyncIterator[Timed]:
    listening = await asyncio.start_server(asked.answer, "127.0.0.1", 0)
    client = Client(Server("127.0.0.1", listening.sockets[0].getsockname()[1]))
    async with listening:
        yield Timed(client, WORK, one_event_a_token=one_event_a_token)
        client.close()


async def test_a_turn_asks_the_base_the_adapter_cold_and_then_warm():
    asked = Asked("ours", [])

    async with timed(asked) as server:
        turn = await server.turn("s000")

    assert [body["model"] for body in asked.bodies] == ["base"] * 3 + ["s000"] * 4
    assert len({tuple(body["prompt"]) for body in asked.bodies}) == 7
    assert all(body["logprobs"] == 0 for body in asked.bodies)
    assert turn.waited == 7.5
    assert min(turn.base, turn.cold, turn.warm) > 0


async def test_servers_take_turns_and_each_adapter_is_cold_once():
    log: list[tuple[str, str]] = []

    async with (
        timed(Asked("ours", log)) as ours,
        timed(Asked("theirs", log), one_event_a_token=True) as theirs,
    ):
        turns = await alternate({"a": ours, "b": theirs}, {"a": ("x", "y"), "b": ("x", "y")})

    first = [entry for i, entry in enumerate(log) if entry not in log[:i] and entry[1] != "base"]
    assert first == [("ours", "x"), ("theirs", "x"), ("theirs", "y"), ("ours", "y")]
    assert {name: [t.adapter for t in found] for name, found in turns.items()} == {
        "a": ["x", "y"],
        "b": ["x", "y"],
    }


def test_the_summary_is_of_medians_and_of_the_turns_own_ratios():
    turns = [Turn("x", 1, 10, 10, None), Turn("y", 2, 12, 6, None), Turn("z", 3, 60, 20, None)]

    assert Summary.of(turns) == Summary(base=2, cold=12, warm=10, cold_of_warm=2.0)


def test_what_does_not_hold_is_said():
    good = Summary(base=10, cold=13, warm=10, cold_of_warm=1.3)
    peer = Summary(base=10, cold=20, warm=12, cold_of_warm=1.6)

    held, lost = findings({"loralane": good, "peer": peer})

    assert held.startswith("holds: cold / warm = 1.30")
    assert lost.startswith("DOES NOT HOLD: cold 13.0 ms, the peer's warm 12.0 ms")

"""Traffic against a server that answers, refuses, cuts off or never ends, as it is told."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from bench.load import Work
from bench.stream import Client, Server
from bench.traffic import (
    BROKEN,
    CALLED_OFF,
    Answer,
    Call,
    Fresh,
    Traffic,
    ask,
    closed_loop,
    poisson,
    read,
    together,
)

WORK = Work("base", ("a", "b"), prompt_tokens=5, new_tokens=3, vocab=50)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    fields = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Scripted:
    """Does with a request what its model's name says, and remembers who asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.keys: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self.connections = 0
        self.halfway = asyncio.Event()
        #: Set when a connection was closed.
        self.let_go = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with (
            contextlib.closing(writer),
            contextlib.suppress(asyncio.IncompleteReadError, ConnectionError),
        ):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.asked.append(body["model"])
                self.prompts.append(tuple(body["prompt"]))
                if "authorization" in head:
                    self.keys.append(head.split("authorization: ")[1].split("\r\n")[0])
                if not await self._answer(body["model"], writer):
                    break
        self.let_go.set()

    async def _answer(self, model: str, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        if model in ("busy", "tired"):
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 5\r\n\r\nlater")
            return model == "busy"
        writer.write(STREAM + chunk(event("x")))
        if model == "cut":
            return False
        if model == "endless":
            self.halfway.set()
            await asyncio.Event().wait()
        writer.write(chunk(event("y") + usage(2)) + chunk(b""))
        return True


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Scripted, Client]]:
    fake = Scripted()
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await fake.answer(reader, writer)

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = Client(Server("127.0.0.1", listening.sockets[0].getsockname()[1]))
    async with listening:
        yield fake, client
        client.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers)


async def test_an_answer_has_its_text_its_times_and_the_servers_count():
    async with served() as (_, client):
        answer = await ask(client, Fresh(WORK)("a"))

    assert (answer.tenant, answer.status, answer.text, answer.counted) == ("a", 200, "xy", 2)
    assert answer.complete
    assert answer.tokens_of_an_event == 1.0
    assert answer.sent <= answer.times[0] <= answer.times[1] <= answer.ended
    assert answer.first == answer.times[0] - answer.sent


async def test_a_refusal_has_its_status_and_its_connection_is_used_again():
    async with served() as (fake, client):
        refused = [await ask(client, Fresh(WORK)("busy")) for _ in range(3)]

    assert [answer.status for answer in refused] == [429] * 3
    assert all(answer.first == float("inf") and not answer.complete for answer in refused)
    assert fake.connections == 1


async def test_a_connection_that_the_server_closed_while_it_was_idle_is_not_used_again():
    async with served() as (fake, client):
        refused = await ask(client, Fresh(WORK)("tired"))
        await fake.let_go.wait()
        for _ in range(100):  # until the client's side has heard of it
            await asyncio.sleep(0)
        answer = await ask(client, Fresh(WORK)("a"))

    assert (refused.status, answer.status) == (429, 200)
    assert fake.connections == 2


async def test_a_stream_that_is_cut_off_is_broken_and_keeps_what_came():
    async with served() as (_, client):
        answer = await ask(client, Fresh(WORK)("cut"))

    assert (answer.status, answer.text, answer.complete) == (BROKEN, "x", False)
    assert len(answer.times) == 1


async def test_nobody_listening_is_a_broken_answer_not_an_exception():
    listening = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    listening.close()
    await listening.wait_closed()

    answer = await ask(Client(Server("127.0.0.1", port)), Fresh(WORK)("a"))

    assert (answer.status, answer.times) == (BROKEN, ())


def test_a_stream_with_an_error_in_it_is_broken():
    answer = read("a", 0.0, [(1.0, b'{"choices": [{"text": "x"}]}'), (2.0, b'{"error": {}}')])

    assert (answer.status, answer.times, answer.complete) == (BROKEN, (1.0,), False)


def test_tokens_that_were_held_back_are_spread_over_the_events():
    events = [(1.0, b'{"choices": [{}]}'), (2.0, b'{"usage": {"completion_tokens": 6}}')]

    assert read("a", 0.0, events).tokens_of_an_event == 6.0


async def test_every_call_that_was_sent_has_one_answer_also_when_called_off():
    async with served() as (fake, client):
        traffic, fresh = Traffic(client), Fresh(WORK)
        arrivals = [(0.0, name) for name in ("a", "busy", "cut", "endless")]
        await traffic.offer(arrivals, fresh)
        await fake.halfway.wait()
        while traffic.under_way > 1:  # noqa: ASYNC110 - as many turns as the answers take
            await asyncio.sleep(0)
        await traffic.finish(within_s=0)

    assert traffic.under_way == 0
    assert {answer.tenant: answer.status for answer in traffic.answers} == {
        "a": 200,
        "busy": 429,
        "cut": BROKEN,
        "endless": CALLED_OFF,
    }


async def test_a_closed_loop_keeps_one_call_of_each_name_under_way_and_never_repeats_a_prompt():
    async with served() as (fake, client):
        answers = await closed_loop(client, ("a", "b", "b"), Fresh(WORK), seconds=0.05)

    assert all(answer.status == 200 for answer in answers)
    assert len(answers) == len(fake.asked)
    assert fake.connections == 3
    assert len(set(fake.prompts)) == len(fake.prompts)


async def test_calls_carry_their_key():
    async with served() as (fake, client):
        await ask(client, Fresh(WORK, {"authorization": "Bearer k"})("a"))

    assert fake.keys == ["Bearer k"]


def test_a_key_is_not_shown():
    assert "secret" not in repr(Call("a", b"{}", {"authorization": "secret"}))


def test_another_first_seed_gives_other_prompts():
    one, other = Fresh(WORK), Fresh(WORK, first_seed=100)

    assert one("a").body == Fresh(WORK)("a").body
    assert {one("a").body for _ in range(50)}.isdisjoint(other("a").body for _ in range(50))


def test_answers_may_differ_in_length_and_then_the_same_way_each_time():
    lengths = [json.loads(Fresh(WORK, spread=2)("a").body)["max_tokens"] for _ in range(3)]
    fresh = Fresh(WORK, spread=2)
    spread = {json.loads(fresh("a").body)["max_tokens"] for _ in range(200)}

    assert len(set(lengths)) == 1
    assert spread == {1, 2, 3, 4, 5}


def test_only_who_wants_each_token_asks_for_log_probabilities():
    assert json.loads(Fresh(WORK)("a").body)["logprobs"] == 0
    assert "logprobs" not in json.loads(Fresh(WORK, each_token=False)("a").body)


def test_arrivals_come_at_their_rate_and_the_same_seed_repeats_them():
    times = poisson(20.0, 200.0, seed=3)

    assert times == poisson(20.0, 200.0, seed=3) == sorted(times)
    assert times != poisson(20.0, 200.0, seed=4)
    assert abs(len(times) - 4000) < 300
    assert times[-1] < 200.0
    assert poisson(0.0, 10.0, seed=1) == []


def test_arrivals_of_all_tenants_are_in_the_order_of_time():
    assert together({"a": [1.0, 3.0], "b": [2.0]}) == [(1.0, "a"), (2.0, "b"), (3.0, "a")]


def test_an_answer_without_a_token_waited_for_ever():
    assert Answer("a", 1.0, 2.0, 429).first == float("inf")
    assert Answer("a", 1.0, 2.0, 429).tokens_of_an_event == 1.0

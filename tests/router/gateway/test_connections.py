"""What one turn of the loop writes to a connection is sent at once; heads are bounded."""

import asyncio
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from loralane_router.gateway.connections import MOST_HEAD_BYTES, GatheringTransport


class Recording(asyncio.Transport):
    """A transport that keeps each write, and what was written before it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data):
        assert not self.closed
        self.sent.append(bytes(data))

    def close(self):
        self.closed = True

    def abort(self):
        self.closed = True

    def is_closing(self):
        return self.closed


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
async def gathering(recording) -> GatheringTransport:
    return GatheringTransport(recording, asyncio.get_running_loop())


async def test_what_one_turn_writes_is_sent_at_once(gathering, recording):
    gathering.write(b"head")
    gathering.write(bytearray(b" and body"))
    before = list(recording.sent)
    await asyncio.sleep(0)
    gathering.write(b"next")
    await asyncio.sleep(0)

    assert before == []
    assert recording.sent == [b"head and body", b"next"]


async def test_what_was_written_is_sent_before_the_connection_is_closed(gathering, recording):
    gathering.write(b"last")
    gathering.close()
    await asyncio.sleep(0)

    assert recording.sent == [b"last"]
    assert gathering.is_closing()


async def test_much_is_not_kept_until_the_turn_is_over(gathering, recording):
    gathering.write(b"a" * 40_000)
    gathering.write(b"b" * 40_000)
    gathering.write(b"c")
    at_once = [len(data) for data in recording.sent]
    await asyncio.sleep(0)

    assert at_once == [80_000]
    assert recording.sent[1:] == [b"c"]


async def test_nothing_is_sent_to_a_connection_that_was_aborted(gathering, recording):
    gathering.write(b"lost")
    gathering.abort()
    await asyncio.sleep(0)

    assert recording.sent == []


async def test_an_empty_write_sends_nothing(gathering, recording):
    gathering.write(b"")
    await asyncio.sleep(0)

    assert recording.sent == []


@pytest.mark.parametrize(
    "begin", [b"GET /", b"GET /health HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\nx"]
)
async def test_a_head_that_never_ends_is_400(url, begin):
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)

    with closing(writer):
        writer.write(begin)
        for _ in range(2 * MOST_HEAD_BYTES // 1024):
            writer.write(b"y" * 1024)
        answer = await reader.readuntil(b"\r\n")

    assert answer == b"HTTP/1.1 400 Bad Request\r\n"


async def test_many_requests_on_one_connection_have_one_heads_room_each(url):
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (MOST_HEAD_BYTES // 2) + b"\r\n\r\n"

    answers = []
    with closing(writer):
        for _ in range(4):
            writer.write(head[:100])
            await writer.drain()
            writer.write(head[100:])
            answers.append(await reader.readuntil(b"\r\n\r\n"))
            await reader.readexactly(_length(answers[-1]))

    assert [answer.split(b" ", 2)[1] for answer in answers] == [b"200"] * 4


async def test_a_long_body_has_no_part_in_the_heads_length(url):
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    body = b'{"prompt": true' + b" " * (2 * MOST_HEAD_BYTES) + b"}"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"

    with closing(writer):
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        text = await reader.readexactly(_length(answer))

    assert b"prompt" in text, "it was read to its end, and that is what is wrong with it"


def _length(head: bytes) -> int:
    """Return the length of the body that belongs to an answer's head."""
    fields = head.decode().lower().split("\r\n")
    return int(next(f.split(":")[1] for f in fields if f.startswith("content-length")))

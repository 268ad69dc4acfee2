"""What one turn of the loop writes to a connection is sent at once, and nothing is lost."""

import asyncio

import pytest
from loralane_router.gateway.writes import GatheringTransport


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

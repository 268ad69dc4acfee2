"""What a connection of the load generator makes of bytes, however they are cut."""

import asyncio

import pytest

from bench.connection import Connection, Event, Reply, StreamFailed

REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 5\r\nRetry-After: 1\r\n\r\nlater"
STREAM = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"9\r\ndata: a\n\n\r\n"
    b"6\r\ndata: \r\n2\r\nb\n\r\n1\r\n\n\r\n"
    b"e\r\ndata: [DONE]\n\n\r\n"
    b"0\r\n\r\n"
)


class Wire(asyncio.Transport):
    """Keeps what was sent, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.aborted = False

    def write(self, data):
        self.sent.append(bytes(data))

    def abort(self):
        self.aborted = True


class Asked:
    """A connection with one request under way, and what was told of it."""

    def __init__(self) -> None:
        self.wire, self.connection = Wire(), Connection()
        self.connection.connection_made(self.wire)
        self.events: list[Event] = []
        self.told: list[Reply | Exception] = []
        self.sent = self.connection.ask(b"request", self.events, self.told.append)

    def come(self, answer: bytes, step: int) -> None:
        for at in range(0, len(answer), step):
            self.connection.data_received(answer[at : at + step])


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_stream_is_the_same_however_it_is_cut(step):
    asked = Asked()

    asked.come(STREAM, step)

    [reply] = asked.told
    assert [data for _, data in asked.events] == [b"a", b"b"]
    assert (reply.status, reply.text) == (200, None)
    assert reply.headers == {"transfer-encoding": "chunked"}
    assert asked.sent == reply.sent <= asked.events[0][0] <= asked.events[1][0] <= reply.ended
    assert not asked.connection.is_closed


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_an_answer_with_a_length_is_told_with_its_last_byte_and_another_may_follow(step):
    asked = Asked()

    asked.come(REFUSAL[:-1], step)
    before = list(asked.told)
    asked.come(REFUSAL[-1:], step)
    asked.connection.ask(b"again", asked.events, asked.told.append)
    asked.come(STREAM, step)

    assert before == []
    assert [reply.status for reply in asked.told] == [429, 200]
    assert asked.told[0].text == b"later"
    assert asked.wire.sent == [b"request", b"again"]


def test_a_server_that_closes_after_its_answer_is_believed():
    asked = Asked()

    asked.come(REFUSAL.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), 1000)

    assert asked.told[0].status == 429
    assert asked.connection.is_closed


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (STREAM[:-5], "before the answer's end"),
        (b"HTTP/1.1 502 Bad Gateway\r\nserver: x\r\n\r\nno upstream", "status 502: no upstream"),
        (STREAM.replace(b"200 OK", b"500 No"), "status 500"),
        (STREAM.replace(b"\r\n9\r\n", b"\r\nnine\r\n"), "no stream"),
    ],
)
def test_what_is_no_whole_stream_fails_once_and_says_why(answer, said):
    asked = Asked()

    asked.come(answer, 1000)
    asked.connection.connection_lost(None)

    [error] = asked.told
    assert isinstance(error, StreamFailed)
    assert said in str(error)
    assert asked.connection.is_closed


def test_nobody_is_told_of_what_was_called_off():
    asked = Asked()

    asked.connection.call_off()
    asked.come(REFUSAL, 1000)
    asked.connection.connection_lost(None)

    assert asked.told == []
    assert asked.wire.aborted


def test_what_comes_without_a_request_closes_the_connection():
    asked = Asked()

    asked.come(REFUSAL, 1000)
    asked.come(b"more", 1000)

    assert len(asked.told) == 1
    assert asked.connection.is_closed

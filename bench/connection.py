"""One HTTP connection of the load generator: bytes out, and what comes back told by a call.

No coroutine waits for an answer, so that a refused request, of which there may be a hundred in a
second, costs the generator little: what it computes is taken from the servers beside it.
"""

import asyncio
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

#: When it came, and its data.
Event = tuple[float, bytes]

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n")
_CHUNKED: Final = b"\r\ntransfer-encoding: chunked\r\n"
_CLOSE: Final = b"\r\nconnection: close\r\n"
_OK: Final = 200
#: The length of a body that ends with its connection.
_UNTIL_CLOSED: Final = sys.maxsize


class StreamFailed(Exception):
    """The server refused the request or its answer is no event stream; the message says which."""


@dataclass(frozen=True)
class Reply:
    """A whole answer; times by `perf_counter`."""

    sent: float
    ended: float
    status: int
    #: In lower case.
    head: bytes
    #: The body of an answer with a length; None = it was a stream, its events came one by one.
    text: bytes | None

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """By their names in lower case."""
        lines = self.head.decode("latin-1").rstrip().split("\r\n")[1:]
        pairs = (line.partition(":") for line in lines)
        return {name: value.strip() for name, _, value in pairs}


#: Is told how a request ended, once.
Tell = Callable[[Reply | Exception], None]


class Connection(asyncio.Protocol):
    """Carries one request at a time. Not usable once it `is_closed`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.is_closed = False
        self._tell: Tell | None = None
        self._into: list[Event] = []
        self._sent = 0.0
        #: Of the answer under way, in lower case; empty until it is complete.
        self._head, self._status = b"", 0
        #: Of its body; None = it comes in chunks.
        self._length: int | None = None
        #: What came and is not understood yet; of chunks that were, the last line if unfinished.
        self._rest = self._line = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over an open connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self, request: bytes, into: list[Event], tell: Tell) -> float:
        """Send a request, whose events are appended to `into`; return when it was sent."""
        assert self._transport is not None, "it is open"
        assert self._tell is None, "its last request has ended"
        self._tell, self._into = tell, into
        self._head, self._length, self._rest, self._line = b"", None, b"", b""
        self._sent = time.perf_counter()
        self._transport.write(request)
        return self._sent

    def call_off(self) -> None:
        """Close it; nobody is told of the request under way."""
        self._tell, self.is_closed = None, True
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        now = time.perf_counter()
        if self._tell is None:  # nothing was asked
            self.call_off()
            return
        self._rest += data
        try:
            if self._head or self._takes_head():
                self._take_chunks(now) if self._length is None else self._take_text(now)
        except ValueError as exc:
            self._fail(StreamFailed(f"the answer is no stream: {exc}"))

    def eof_received(self) -> None:
        """The server will say no more; the transport closes itself."""
        self.is_closed = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits hears it."""
        if self._length == _UNTIL_CLOSED:
            self._fail(StreamFailed(self._shown()))
        else:
            self._fail(StreamFailed(f"the connection closed before the answer's end: {exc}"))

    def _takes_head(self) -> bool:
        end = self._rest.find(_HEAD_END)
        if end < 0:
            return False
        head, self._rest = self._rest[: end + len(_HEAD_END)].lower(), self._rest[end + 4 :]
        self._head, self._status = head, int(head.split(b" ", 2)[1])
        if found := _LENGTH.search(head):
            self._length = int(found[1])
        elif _CHUNKED not in head:
            self._length = _UNTIL_CLOSED
        elif self._status != _OK:
            raise ValueError(self._shown())
        return True

    def _shown(self) -> str:
        return f"status {self._status}: {self._rest[:2000].decode('latin-1')}"

    def _take_text(self, now: float) -> None:
        assert self._length is not None
        if len(self._rest) >= self._length:
            self._end(now, self._rest[: self._length])

    def _take_chunks(self, now: float) -> None:
        while (head := self._rest.find(b"\r\n")) >= 0:
            begin = head + 2
            end = begin + int(self._rest[:head], 16)
            if len(self._rest) < end + 2:
                return
            chunk, self._rest = self._rest[begin:end], self._rest[end + 2 :]
            if not chunk:
                self._end(now, None)
                return
            *lines, self._line = (self._line + chunk).split(b"\n")
            found = (line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA))
            self._into.extend((now, data) for data in found if data != _DONE)

    def _end(self, now: float, text: bytes | None) -> None:
        tell, self._tell = self._tell, None
        assert tell is not None
        reply = Reply(self._sent, now, self._status, self._head, text)
        if _CLOSE in self._head:
            self.call_off()
        tell(reply)

    def _fail(self, error: StreamFailed) -> None:
        tell = self._tell
        self.call_off()
        if tell is not None:
            tell(error)

"""A small HTTP client for event streams: what it costs must not show in what it measures.

Connections are opened before the clock starts and used again, as SDKs do: some delays (of a server
without TCP_NODELAY, say) only show on a connection that was used before. Lines are kept as they
come, with their time; nothing is parsed while a stream runs.
"""

import asyncio
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from bench.connection import Connection, Event, Reply, StreamFailed, Tell

__all__ = [
    "Asked",
    "Client",
    "Event",
    "Refused",
    "Reply",
    "Server",
    "Stream",
    "StreamFailed",
    "leave_imports_alone",
]

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class Refused(StreamFailed):
    """The server answered with an error instead of a stream; the connection can be used again."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"status {reply.status}: {(reply.text or b'').decode()}")
        self.reply = reply


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go."""

    host: str
    port: int

    @classmethod
    def at(cls, url: str) -> "Server":
        """Read `http://host:port`."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url} must be http://HOST:PORT")
        return cls(parts.hostname, parts.port or 80)


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: when it was asked for, and every event with its time (`perf_counter`)."""

    sent: float
    events: tuple[Event, ...]
    #: Of the answer, in lower case.
    headers: Mapping[str, str] = field(default_factory=dict)


def leave_imports_alone() -> None:
    """Call before measuring: a collection through what torch imports stops the clock for 0.1 s."""
    gc.collect()
    gc.freeze()


class Asked:
    """One request under way."""

    def __init__(self, sent: float) -> None:
        #: When it was sent (`perf_counter`); until its connection is open, when it was asked for.
        self.sent = sent
        self.connection: Connection | None = None
        self.opening: asyncio.Task[None] | None = None

    def call_off(self) -> None:
        """Close its connection. Nobody is told how it ended; its events so far are there."""
        if self.opening is not None:
            self.opening.cancel()
        if self.connection is not None:
            self.connection.call_off()


class Client:
    """Sends requests to one server, each on a connection that no other uses meanwhile."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes) -> Stream:
        """Send one request and read its stream to the end. Raises as `follow`."""
        events: list[Event] = []
        sent, headers = await self.follow(path, body, events)
        return Stream(sent, tuple(events), headers)

    async def follow(
        self, path: str, body: bytes, into: list[Event], more_headers: Mapping[str, str] = _NONE
    ) -> tuple[float, Mapping[str, str]]:
        """Do the same, but append events while they come; return when it was sent, and headers.

        Cancelling it closes the connection, and what came so far is there. Raises StreamFailed,
        which is Refused where the server answered with an error, or OSError if nobody listens.
        """
        ended: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def tell(outcome: Reply | Exception) -> None:
            if isinstance(outcome, Exception):
                ended.set_exception(outcome)
            else:
                ended.set_result(outcome)

        asked = self.ask(path, body, into, tell, more_headers)
        try:
            reply = await ended
        except asyncio.CancelledError:
            asked.call_off()
            raise
        if reply.text is not None:
            raise Refused(reply)
        return reply.sent, reply.headers

    def ask(
        self,
        path: str,
        body: bytes,
        into: list[Event],
        tell: Tell,
        more_headers: Mapping[str, str] = _NONE,
    ) -> Asked:
        """Send one request; nobody waits for it. `tell` hears later how it ended, once.

        It is told a Reply, with a text where that is no stream, or StreamFailed or OSError.
        """
        request = _head(self._server, path, len(body), more_headers) + body
        asked = Asked(time.perf_counter())

        def end(outcome: Reply | Exception) -> None:
            if asked.connection is not None and not asked.connection.is_closed:
                self._idle.append(asked.connection)
            tell(outcome)

        asked.connection = self._take_idle()
        if asked.connection is None:
            asked.opening = asyncio.create_task(self._open(asked, request, into, end))
        else:
            asked.sent = asked.connection.ask(request, into, end)
        return asked

    def close(self) -> None:
        """Close all connections that are not in use."""
        for connection in self._idle:
            connection.call_off()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        """Return an open connection; those that the server closed meanwhile are let go."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection
        return None

    async def _open(self, asked: Asked, request: bytes, into: list[Event], end: Tell) -> None:
        """Send a request on a new connection."""
        loop, server = asyncio.get_running_loop(), self._server
        try:
            _, connection = await loop.create_connection(Connection, server.host, server.port)
        except OSError as exc:
            end(exc)
        else:
            asked.connection = connection
            asked.sent = connection.ask(request, into, end)


def _head(server: Server, path: str, length: int, more: Mapping[str, str]) -> bytes:
    added = "".join(f"{name}: {value}\r\n" for name, value in more.items())
    return (
        f"POST {path} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n{added}\r\n"
    ).encode()

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

#: When it came, and its data.
Event = tuple[float, bytes]

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class StreamFailed(Exception):
    """The server refused the request or its answer is no event stream; the message says which."""


class Refused(StreamFailed):
    """The server answered with an error instead of a stream; the connection can be used again."""

    def __init__(self, status: int, sent: float, text: str) -> None:
        super().__init__(f"status {status}: {text}")
        self.status = status
        #: When the request was sent, and when the whole answer was there (`perf_counter`).
        self.sent = sent
        self.answered = time.perf_counter()


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


class Client:
    """Sends requests to one server, each on a connection that no other uses meanwhile."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes) -> Stream:
        """Send one request and read its stream to the end. Raises StreamFailed."""
        events: list[Event] = []
        sent, headers = await self.follow(path, body, events)
        return Stream(sent, tuple(events), headers)

    async def follow(
        self, path: str, body: bytes, into: list[Event], more_headers: Mapping[str, str] = _NONE
    ) -> tuple[float, Mapping[str, str]]:
        """Do the same, but append events while they come; return when it was sent, and headers.

        Cancelling it closes the connection, and what came so far is there. Raises StreamFailed,
        which is Refused where the server answered with an error.
        """
        reader, writer = self._take_idle() or await self._open()
        try:
            sent = time.perf_counter()
            writer.write(_head(self._server, path, len(body), more_headers) + body)
            status, headers = await _read_head(reader)
            if headers.get("transfer-encoding") == "chunked" and status == 200:
                await _read_events(reader, into)
                refusal = None
            elif "content-length" in headers:
                text = (await reader.readexactly(int(headers["content-length"]))).decode()
                refusal = Refused(status, sent, text)
            else:
                raise StreamFailed(f"status {status}: {(await reader.read(2000)).decode()}")
        except BaseException:
            writer.close()
            raise
        if headers.get("connection") == "close":
            writer.close()
        else:
            self._idle.append((reader, writer))
        if refusal is not None:
            raise refusal
        return sent, headers

    def close(self) -> None:
        """Close all connections that are not in use."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    def _take_idle(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Return an open connection; those that the server closed meanwhile are let go."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._server.host, self._server.port)


def _head(server: Server, path: str, length: int, more: Mapping[str, str]) -> bytes:
    added = "".join(f"{name}: {value}\r\n" for name, value in more.items())
    return (
        f"POST {path} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n{added}\r\n"
    ).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Return the status and the headers, in lower case."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status, *lines = head.rstrip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(status.split(" ", 2)[1]), {name: value.strip() for name, _, value in pairs}


async def _read_events(reader: asyncio.StreamReader, into: list[Event]) -> None:
    rest = b""
    while size := int(await reader.readline(), 16):
        chunk = (await reader.readexactly(size + 2))[:-2]
        now = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        found = (line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA))
        into.extend((now, data) for data in found if data != _DONE)
    await reader.readline()  # the empty line after the last chunk

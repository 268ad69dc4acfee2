"""HTTP connections: what one turn of the event loop wrote is sent at once, and heads are bounded.

uvicorn writes the head of an answer, its body and its end apart: that is a system call each, and a
packet each, for which the client wakes. For a short answer, as a refusal is, they are a good part
of what it costs, on both sides. Its parser in C takes a third off the rest, but would keep the head
of a request however long it is.
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: So many bytes are not kept for the end of the turn.
_MOST_BYTES: Final = 64 * 1024
#: So long may the head of a request be.
MOST_HEAD_BYTES: Final = 64 * 1024


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn's protocol on a transport that gathers what is written."""

    #: Bytes that came since the head of a request began; None = its end has come.
    _head_bytes: int | None = None

    # As uvicorn's own does: only transports that can be written to, where asyncio names any.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to serve a connection."""
        super().connection_made(GatheringTransport(transport, self.loop))

    def data_received(self, data: bytes) -> None:
        """Take what came; a head that is too long is answered with 400, and closes."""
        super().data_received(data)
        if self._head_bytes is None or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MOST_HEAD_BYTES:
            self.send_400_response(f"The head is longer than {MOST_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Serve a request whose head is complete."""
        self._head_bytes = None
        super().on_headers_complete()


class GatheringTransport(asyncio.Transport):
    """Another transport, whose writes are gathered until the turn is over. Loses nothing."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data` behind what was written before, at the end of this turn at the latest."""
        if not data:
            return
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(bytes(data))
        self._bytes += len(data)
        if self._bytes >= _MOST_BYTES:
            self._flush()

    def close(self) -> None:
        """Send what was written, then close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        self._parts.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of the connection."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Read no more until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Give the connection to another protocol."""
        self._transport.set_protocol(protocol)

    def _flush(self) -> None:
        parts, self._parts, self._bytes = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

"""Server-sent events: framing, keep-alive, errors after the headers, and clients that vanish."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loralane_router.errors import RequestError
from loralane_router.gateway.failures import Failure
from loralane_router.gateway.generations import (
    close_all,
    disconnected,
    first_token_headers,
    opening_headers,
    settled,
)
from loralane_router.gateway.limits import Limits
from loralane_router.router import Generation

_log = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"
_KEEP_ALIVE: Final = b": keep-alive\n\n"

#: Clients that split decoded text into lines (httpx does) break at these; JSON allows them bare.
_LINE_BREAKS: Final = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def one_line(payload: object) -> bytes:
    """Return `payload` as JSON that no client takes for two lines."""
    encoded = msgspec.json.encode(payload)
    if not encoded.isascii():
        for bare, escaped in _LINE_BREAKS:
            encoded = encoded.replace(bare, escaped)
    return encoded


def event(payload: object) -> bytes:
    """Return one event."""
    return b"data:" + one_line(payload) + b"\n\n"


class EventStream(Response):
    """A response whose frames come from generations; it owns them and closes them at its end."""

    def __init__(
        self,
        generations: Sequence[Generation],
        frames: AsyncGenerator[bytes, None],
        error_body: Callable[[Failure], Mapping[str, object]],
        limits: Limits,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._generations = generations
        self._frames = frames
        self._error_body = error_body
        self._limits = limits
        self._first: asyncio.Task[bytes | None] | None = None
        #: Whether nothing was sent since the watcher last looked.
        self._quiet = False

    async def begin(self) -> "EventStream":
        """Wait for the first frame, so that an error before it keeps its status (RequestError).

        A client that waits longer than the quiet time gets status 200 and keep-alives instead, but
        not before it is settled who answers: the headers say so.
        """
        self._first = asyncio.create_task(self._next())
        try:
            await settled(self._generations)
            await asyncio.wait({self._first}, timeout=self._limits.quiet_s)
            if self._first.done():
                self._first.result()
                self.headers.update(first_token_headers(self._generations))
            else:
                self.headers.update(opening_headers(self._generations))
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all frames, then close the generations, however it ends."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        tasks: set[asyncio.Task[None]] = set()
        try:
            await send(start)
            tasks = {
                asyncio.create_task(self._send_all(send)),
                asyncio.create_task(disconnected(receive)),
                asyncio.create_task(self._keep_alive(send)),
            }
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.aclose()

    async def _next(self) -> bytes | None:
        return await anext(self._frames, None)

    async def _send_all(self, send: Send) -> None:
        assert self._first is not None, "begin comes before sending"
        try:
            frame = await self._first
            if frame is not None:
                await self._send(send, frame)
            async for frame in self._frames:
                await self._send(send, frame)
        except OSError:
            return
        except Exception as error:
            if not isinstance(error, RequestError):
                _log.exception("a stream failed")
            await self._send(send, event(self._error_body(Failure.of(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, frame: bytes) -> None:
        self._quiet = False
        await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(self._limits.quiet_s)
            if self._quiet:
                await self._send(send, _KEEP_ALIVE)

    async def aclose(self) -> None:
        """Close the generations. Idempotent; `begin` and the call do it by themselves."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._frames.aclose()
        await close_all(self._generations)

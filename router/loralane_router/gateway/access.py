"""Around every request: an id that the client can quote, one log line, one count."""

import logging
import re
import secrets
import time
from typing import Final

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("loralane_router.access")

#: Ids of callers are kept if they are safe to log and to send back.
_SAFE_ID: Final = re.compile(rb"[\w.:-]{1,128}")
_ID: Final = b"x-request-id"
_LINE: Final = "%s %s %d in %.0f ms, request %s"
_ADMIN: Final = ("/v1/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_PROBES: Final = ("/health", "/ping", "/startup", "/metrics")


class Access:
    """ASGI middleware; logs the path as it was sent and never the query, which may hold secrets."""

    def __init__(self, app: ASGIApp, requests: Counter) -> None:
        self._app = app
        self._requests = requests
        #: The counters of surfaces and statuses that were met.
        self._met: dict[tuple[str, int], Counter] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _ID), b"")
        request_id = given if _SAFE_ID.fullmatch(given) else secrets.token_hex(16).encode()
        started = time.perf_counter()
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_ID, request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._note(scope, status, request_id.decode(), time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        surface = surface_of(scope["path"])
        counter = self._met.get((surface, status))
        if counter is None:
            counter = self._met[surface, status] = self._requests.labels(surface, str(status))
        counter.inc()
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
        level = logging.DEBUG if surface == "probe" else logging.INFO
        if _log.isEnabledFor(level):
            # `log` would go through the stack for the name of this function.
            given = (scope["method"], path, status, seconds * 1000, request_id)
            _log.handle(_log.makeRecord(_log.name, level, __file__, 0, _LINE, given, None))


def surface_of(path: str) -> str:
    """Return which surface a path belongs to: openai, native, admin or probe."""
    if path.startswith(_ADMIN):
        return "admin"
    if path.startswith("/v1/"):
        return "openai"
    return "probe" if path.startswith(_PROBES) else "native"

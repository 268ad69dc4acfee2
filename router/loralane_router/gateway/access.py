"""Around every request: an id that the client can quote, one log line, one count."""

import logging
import re
import time
import uuid
from typing import Final

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("loralane_router.access")

#: Ids of callers are kept if they are safe to log and to send back.
_SAFE_ID: Final = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_ADMIN: Final = ("/v1/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_PROBES: Final = ("/health", "/ping", "/startup", "/metrics")


class Access:
    """ASGI middleware; logs the path as it was sent and never the query, which may hold secrets."""

    def __init__(self, app: ASGIApp, requests: Counter) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        started = time.perf_counter()
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._note(scope, status, request_id, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        surface = surface_of(scope["path"])
        self._requests.labels(surface, str(status)).inc()
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
        level = logging.DEBUG if surface == "probe" else logging.INFO
        line = "%s %s %d in %.0f ms, request %s"
        _log.log(level, line, scope["method"], path, status, seconds * 1000, request_id)


def surface_of(path: str) -> str:
    """Return which surface a path belongs to: openai, native, admin or probe."""
    if path.startswith(_ADMIN):
        return "admin"
    if path.startswith("/v1/"):
        return "openai"
    return "probe" if path.startswith(_PROBES) else "native"

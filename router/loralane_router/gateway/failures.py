"""One error, rendered the way each route's clients expect it.

`/v1/...`    {"error": {"message", "type", "param", "code"}}     what the OpenAI SDK reads
elsewhere    {"error": "...", "error_type": "..."}               what lorax-client reads

The status comes from `loralane_router.errors.STATUS`, except that native routes answer a bad
parameter with 422 as LoRAX does.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from loralane_proto import shard_pb2 as pb
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from loralane_router.errors import RequestError

_log = logging.getLogger(__name__)

#: nginx's number for a client that left before its answer; nobody receives it, metrics count it.
CLIENT_GONE = 499

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


class BodyRefused(RequestError):
    """The body cannot be read at all: not JSON (400), too slow (408) or too long (413)."""

    def __init__(self, http: int, code: str, message: str) -> None:
        super().__init__(pb.ERROR_KIND_INVALID_REQUEST, message)
        self.http = http
        self.code = code


@dataclass(frozen=True, slots=True)
class Failure:
    """Everything that any route says about one error."""

    http: int
    message: str
    #: OpenAI's `error.type` and `error.code`.
    type: str
    code: str
    #: LoRAX's `error_type`.
    native_type: str
    param: str | None = None
    tensors: tuple[str, ...] = ()
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Return how `error` looks to clients; what is not ours says nothing about its cause."""
        if isinstance(error, RequestError):
            return cls._of_request_error(error)
        if isinstance(error, HTTPException):
            code = _HTTP_CODES.get(error.status_code, "invalid_request")
            return cls(error.status_code, error.detail, "invalid_request_error", code, "validation")
        message = "internal error; the server's log has the cause"
        return cls(500, message, "server_error", "internal_error", "generation")

    @classmethod
    def _of_request_error(cls, error: RequestError) -> "Failure":
        status = error.status
        http, code = status.http, status.code
        if isinstance(error, BodyRefused):
            http, code = error.http, error.code
        return cls(
            http=http,
            message=error.message,
            type=status.openai,
            code=code,
            native_type=status.native,
            param=error.param,
            tensors=error.tensors,
            retry_after_s=error.retry_after_s,
        )

    def openai(self) -> dict[str, object]:
        """Return the body of `/v1` routes; `tensors` only where there are some."""
        body: dict[str, object] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.tensors:
            body["tensors"] = self.tensors
        return {"error": body}

    def native(self) -> dict[str, object]:
        """Return the body of all other routes."""
        return {"error": self.message, "error_type": self.native_type}

    @property
    def native_http(self) -> int:
        """The status on native routes: LoRAX answers a bad parameter with 422."""
        bad_parameter = self.http == 400 and self.code == "invalid_request"
        return 422 if bad_parameter else self.http

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After` where a later try may succeed."""
        if self.http not in (429, 503):
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s or 1.0)))}


def speaks_openai(path: str) -> bool:
    """Return whether the clients of `path` read OpenAI's error body."""
    return path.startswith("/v1/") or path == "/v1"


async def render(request: Request, error: Exception) -> Response:
    """Return the error response in the shape of the request's route.

    Asynchronous for its own sake: Starlette runs plain handlers in threads, behind which a refusal
    would queue just when there are many.
    """
    failure = Failure.of(error)
    if speaks_openai(request.scope["path"]):
        body, http = failure.openai(), failure.http
    else:
        body, http = failure.native(), failure.native_http
    headers = failure.headers
    if isinstance(error, HTTPException):
        headers |= dict(error.headers or {})
    return Response(msgspec.json.encode(body), http, headers, media_type="application/json")


async def client_gone(request: Request, error: Exception) -> Response:
    """Return what nobody will read."""
    assert isinstance(error, ClientDisconnect)
    _log.debug("client gone: %s", request.url.path)
    return Response(status_code=CLIENT_GONE)


#: Who answers which error: the first that fits.
HANDLERS: Final[Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]] = {
    ClientDisconnect: client_gone,
    RequestError: render,
    HTTPException: render,
    Exception: render,
}

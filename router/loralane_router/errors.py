"""The router's one error, and the table that turns its kind into status codes.

The shard reports an `ErrorKind`; the router raises the same kinds itself (a bad parameter, a full
queue). Each surface has its own body (see gateway/), but the status comes from here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from loralane_proto import shard_pb2 as pb


@dataclass(frozen=True, slots=True)
class Status:
    """How one kind of error looks on each surface."""

    http: int
    grpc: grpc.StatusCode
    #: OpenAI's `error.type`.
    openai: str
    #: OpenAI's `error.code`.
    code: str
    #: LoRAX/TGI's `error_type`, one of those that lorax-client maps to an exception.
    native: str


_INVALID, _SERVER = "invalid_request_error", "server_error"

STATUS: "Final[dict[pb.ErrorKind.ValueType, Status]]" = {
    pb.ERROR_KIND_NOT_FOUND: Status(
        404, grpc.StatusCode.NOT_FOUND, _INVALID, "adapter_not_found", "generation"
    ),
    pb.ERROR_KIND_FORBIDDEN: Status(
        403, grpc.StatusCode.PERMISSION_DENIED, _INVALID, "adapter_forbidden", "generation"
    ),
    pb.ERROR_KIND_INCOMPATIBLE: Status(
        422, grpc.StatusCode.FAILED_PRECONDITION, _INVALID, "adapter_incompatible", "validation"
    ),
    pb.ERROR_KIND_CORRUPT: Status(
        424, grpc.StatusCode.FAILED_PRECONDITION, _INVALID, "adapter_corrupt", "generation"
    ),
    pb.ERROR_KIND_TOO_LARGE: Status(
        413, grpc.StatusCode.FAILED_PRECONDITION, _INVALID, "adapter_too_large", "validation"
    ),
    pb.ERROR_KIND_LOADING: Status(
        503, grpc.StatusCode.UNAVAILABLE, _SERVER, "adapter_loading", "generation"
    ),
    pb.ERROR_KIND_OVERLOADED: Status(
        429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", "overloaded", "overloaded"
    ),
    pb.ERROR_KIND_INVALID_REQUEST: Status(
        400, grpc.StatusCode.INVALID_ARGUMENT, _INVALID, "invalid_request", "validation"
    ),
    pb.ERROR_KIND_IN_USE: Status(
        409, grpc.StatusCode.FAILED_PRECONDITION, _INVALID, "adapter_in_use", "validation"
    ),
    pb.ERROR_KIND_UNAVAILABLE: Status(
        503, grpc.StatusCode.UNAVAILABLE, _SERVER, "unavailable", "generation"
    ),
    pb.ERROR_KIND_INTERNAL: Status(
        500, grpc.StatusCode.INTERNAL, _SERVER, "internal_error", "generation"
    ),
}


class RequestError(Exception):
    """Why one request failed: a kind, a message that says what to do, and what it is about.

    `param` names the field of the request at fault, `tensors` those of the adapter.
    """

    def __init__(
        self,
        kind: "pb.ErrorKind.ValueType",
        message: str,
        *,
        param: str | None = None,
        tensors: Sequence[str] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.tensors = tuple(tensors)
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> Status:
        """How this error looks on each surface."""
        return STATUS.get(self.kind, STATUS[pb.ERROR_KIND_INTERNAL])

    @classmethod
    def from_proto(cls, error: pb.Error) -> "RequestError":
        """Return the router's form of what a shard reported."""
        retry = error.retry_after_ms / 1000 if error.retry_after_ms else None
        return cls(error.kind, error.message, tensors=error.tensors, retry_after_s=retry)


def invalid(message: str, param: str | None = None) -> RequestError:
    """Return the error of a request that no retry will make right (400)."""
    return RequestError(pb.ERROR_KIND_INVALID_REQUEST, message, param=param)

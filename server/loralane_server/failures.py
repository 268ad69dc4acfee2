"""From typed errors to gRPC: a status, and the typed `Error` in a trailer."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from loralane_proto import shard_pb2 as pb

from loralane_server.errors import ShardError

ERROR_TRAILER = "loralane-error-bin"

_STATUS = {
    pb.ERROR_KIND_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_KIND_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    pb.ERROR_KIND_INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_KIND_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_KIND_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_KIND_LOADING: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_KIND_INTERNAL: grpc.StatusCode.INTERNAL,
}

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def typed_errors(handler: Handler) -> Handler:
    """Turn a `ShardError` of a unary handler into a status and the typed trailer."""

    @functools.wraps(handler)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        try:
            return await handler(self, request, context)
        except ShardError as error:
            code = _STATUS.get(error.kind, grpc.StatusCode.FAILED_PRECONDITION)
            trailer = ((ERROR_TRAILER, error.to_proto().SerializeToString()),)
            await context.abort(code, error.message, trailing_metadata=trailer)

    return answer  # type: ignore[return-value]  # wraps keeps the handler's signature

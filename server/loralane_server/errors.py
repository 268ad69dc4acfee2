"""Everything a shard can refuse, as one tree.

ShardError
├── AdapterError
│   ├── AdapterNotFound        no such adapter, file or revision
│   ├── AdapterForbidden       the caller's token does not reach it
│   ├── AdapterIncompatible    not for this base model, or uses something not implemented
│   ├── AdapterCorrupt         its bytes are not what they claim to be
│   ├── AdapterTooLarge        more lanes or bytes than this shard can ever hold
│   └── AdapterInUse           cannot be unloaded while rows refer to it
├── SourceUnavailable          the hub or a disk does not answer; worth retrying
├── Overloaded                 no free row, page or lane now; worth retrying
├── InvalidRequest             a request that no retry will make right
├── ModelUnsupported           the base model cannot be served exactly (raised at start only)
└── DeviceFailed               the device's memory is in no known state: the shard ends

Each carries the `ErrorKind` that crosses the wire; the router turns kinds into status codes.
"""

from collections.abc import Sequence
from typing import ClassVar

from loralane_proto import shard_pb2 as pb


class ShardError(Exception):
    """Base of all errors that a caller may see: a message that says what to do, and a kind.

    `tensors` names at most a few tensors that the error is about.
    """

    kind: "ClassVar[pb.ErrorKind.ValueType]" = pb.ERROR_KIND_INTERNAL

    def __init__(
        self, message: str, *, tensors: Sequence[str] = (), retry_after_ms: int = 0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.tensors = tuple(tensors)
        self.retry_after_ms = retry_after_ms

    def to_proto(self) -> pb.Error:
        """Return the form that crosses the wire."""
        return pb.Error(
            kind=self.kind,
            message=self.message,
            tensors=self.tensors,
            retry_after_ms=self.retry_after_ms,
        )


class AdapterError(ShardError):
    """One adapter cannot be served; nothing else is affected."""


class AdapterNotFound(AdapterError):
    """No such adapter, file or revision."""

    kind = pb.ERROR_KIND_NOT_FOUND


class AdapterForbidden(AdapterError):
    """The caller's token does not reach this adapter."""

    kind = pb.ERROR_KIND_FORBIDDEN


class AdapterIncompatible(AdapterError):
    """The adapter does not fit this base model, or uses something that is not implemented."""

    kind = pb.ERROR_KIND_INCOMPATIBLE


class AdapterCorrupt(AdapterError):
    """The adapter's bytes are not what they claim to be."""

    kind = pb.ERROR_KIND_CORRUPT


class AdapterTooLarge(AdapterError):
    """The adapter needs more lanes or bytes than this shard can ever hold."""

    kind = pb.ERROR_KIND_TOO_LARGE


class AdapterInUse(AdapterError):
    """Rows refer to the adapter; it can be unloaded when they have ended."""

    kind = pb.ERROR_KIND_IN_USE


class SourceUnavailable(ShardError):
    """The hub or a disk does not answer; the same request may succeed later."""

    kind = pb.ERROR_KIND_UNAVAILABLE


class Overloaded(ShardError):
    """No free row, page or lane now; the same request may succeed later."""

    kind = pb.ERROR_KIND_OVERLOADED


class InvalidRequest(ShardError):
    """A request that no retry will make right."""

    kind = pb.ERROR_KIND_INVALID_REQUEST


class ModelUnsupported(ShardError):
    """The base model cannot be served exactly; raised before a shard is ready."""


class DeviceFailed(ShardError):
    """A computation failed that updates memory in place: nothing there can be relied on any more.

    The engine ends with it, so that routers continue its rows elsewhere.
    """

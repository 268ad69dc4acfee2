"""The router's end of one shard: unary calls, and the one stream on which rows run.

Whatever goes wrong on the wire leaves here as a `RequestError`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loralane_proto import shard_pb2 as pb
from loralane_proto import shard_pb2_grpc

from loralane_router.errors import RequestError, invalid
from loralane_router.requests import Merge

ERROR_TRAILER: Final = "loralane-error-bin"
_MESSAGE_BYTES: Final = 64 * 2**20
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
#: Milliseconds between two pings while a call is open, and how long an answer may take. A dead
#: process is noticed at once, a silent machine within their sum. A shard must allow such pings
#: (grpc.http2.min_ping_interval_without_data_ms), or it hangs up.
_PING_MS, _ANSWER_MS = 700, 1_000
#: The same for a shard on this machine, which can only be slow: it is not given up for that.
_LOCAL_PING_MS, _LOCAL_ANSWER_MS = 2_000, 10_000
#: Seconds. Resolving may download headers, loading may download an adapter.
_QUICK_S, _RESOLVE_S, _LOAD_S = 10.0, 120.0, 900.0
_RETRY_S: Final = 1.0

T = TypeVar("T")


class RunStream:
    """The open `Run` stream: `write` admissions, `take` the steps that have arrived.

    One reader task; it calls `wake` whenever there is something to take.
    """

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[pb.RunRequest, pb.StepReply]",
        wake: Callable[[], None],
    ) -> None:
        self._call = call
        self._wake = wake
        self._steps: deque[pb.StepReply] = deque()
        self._error: RequestError | None = None
        self._reader = asyncio.create_task(self._read(), name="shard-run-reader")

    async def write(self, request: pb.RunRequest) -> None:
        """Send one message. Raises RequestError when the stream is broken."""
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as exc:
            raise request_error(exc) from exc
        except asyncio.InvalidStateError as exc:
            raise unavailable("the shard closed the stream") from exc

    def take(self) -> list[pb.StepReply]:
        """Return the steps since the last call, then raise RequestError if the stream is broken."""
        if not self._steps and self._error is not None:
            raise self._error
        steps = list(self._steps)
        self._steps.clear()
        if self._error is not None:
            self._wake()
        return steps

    async def aclose(self) -> None:
        """Close the stream; the shard cancels its rows."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        error = unavailable("the shard closed the stream")
        try:
            async for step in self._call:
                self._steps.append(step)
                self._wake()
        except grpc.aio.AioRpcError as exc:
            error = request_error(exc)
        self._error = error
        self._wake()


class ShardClient:
    """All calls to one shard. Every method raises RequestError, and nothing else, on failure."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(
            address, options=(*_CHANNEL_OPTIONS, *_pings(address))
        )
        # One generated class stands for both kinds of stub; the asynchronous one is a type only.
        self._stub: shard_pb2_grpc.ShardAsyncStub = shard_pb2_grpc.ShardStub(self._channel)  # type: ignore[assignment]

    async def close(self) -> None:
        """Disconnect."""
        await self._channel.close()

    async def info(self) -> pb.InfoReply:
        """Return what the shard serves and holds."""
        return await _wrapped(self._stub.Info(pb.InfoRequest(), timeout=_QUICK_S))

    async def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files by name."""
        parts: dict[str, bytearray] = {}
        call = self._stub.TokenizerFiles(pb.TokenizerFilesRequest(), timeout=_RESOLVE_S)
        try:
            async for chunk in call:
                parts.setdefault(chunk.name, bytearray()).extend(chunk.data)
        except grpc.aio.AioRpcError as exc:
            raise request_error(exc) from exc
        return {name: bytes(data) for name, data in parts.items()}

    async def resolve(self, asked: str | Merge, token: str | None) -> pb.Adapter:
        """Return what a reference names, or several mean together, if this token reaches it now.

        The shard begins to read it, since it is about to be used.
        """
        try:
            request = _resolve_request(asked, token or "")
        except UnicodeEncodeError:  # not chained: it would carry the token
            raise invalid("an adapter's name and token must be Unicode text", "adapter") from None
        return await _wrapped(self._stub.ResolveAdapter(request, timeout=_RESOLVE_S))

    async def validate(
        self, reference: str, token: str | None, tensors: bool
    ) -> pb.ValidateAdapterReply:
        """Return what an adapter is, or why it cannot be served; nothing is remembered."""
        try:
            request = pb.ValidateAdapterRequest(
                reference=reference, token=token or "", tensors=tensors
            )
        except UnicodeEncodeError:  # not chained: it would carry the token
            raise invalid("an adapter's name and token must be Unicode text", "adapter") from None
        timeout = _LOAD_S if tensors else _RESOLVE_S
        return await _wrapped(self._stub.ValidateAdapter(request, timeout=timeout))

    async def load(self, digest: str, ttl_s: float | None = None) -> pb.Adapter:
        """Make an adapter resident; returns when it is. `ttl_s` None = as it is."""
        request = pb.LoadAdapterRequest(digest=digest, ttl_s=ttl_s)
        return await _wrapped(self._stub.LoadAdapter(request, timeout=_LOAD_S))

    async def unload(self, digest: str) -> pb.UnloadAdapterReply:
        """Make the shard forget an adapter that no row uses."""
        request = pb.UnloadAdapterRequest(digest=digest)
        return await _wrapped(self._stub.UnloadAdapter(request, timeout=_QUICK_S))

    async def pin(self, digest: str, pinned: bool) -> pb.Adapter:
        """Protect an adapter from eviction, or no longer."""
        request = pb.PinAdapterRequest(digest=digest, pinned=pinned)
        return await _wrapped(self._stub.PinAdapter(request, timeout=_LOAD_S))

    async def list(
        self, *, limit: int = 0, after: str = "", digests: Sequence[str] = ()
    ) -> pb.ListAdaptersReply:
        """Return adapters that the shard knows, and how many: a page by digest, or those named."""
        request = pb.ListAdaptersRequest(limit=limit, after=after, digests=digests)
        return await _wrapped(self._stub.ListAdapters(request, timeout=_QUICK_S))

    async def serving(self) -> AsyncIterator[bool]:
        """Yield whether the shard takes requests: now, and after every change.

        False = it is about to go away and finishes what it has. Ends with the connection, and at
        once where the shard does not say.
        """
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            # The package's types know of no asynchronous stub.
            async for reply in stub.Watch(health_pb2.HealthCheckRequest()):  # type: ignore[attr-defined]
                yield reply.status != health_pb2.HealthCheckResponse.NOT_SERVING
        except grpc.aio.AioRpcError:
            return

    def run(self, wake: Callable[[], None]) -> RunStream:
        """Open the stream on which rows run; `wake` is called when something arrived."""
        return RunStream(self._stub.Run(), wake)


def _pings(address: str) -> tuple[tuple[str, int], ...]:
    local = address.startswith("unix:")
    every, answer = (_LOCAL_PING_MS, _LOCAL_ANSWER_MS) if local else (_PING_MS, _ANSWER_MS)
    return (
        ("grpc.keepalive_time_ms", every),
        ("grpc.keepalive_timeout_ms", answer),
        # Newer versions of gRPC wait for the answer as long as this says, by itself a minute.
        ("grpc.http2.ping_timeout_ms", answer),
    )


def _resolve_request(asked: str | Merge, token: str) -> pb.ResolveAdapterRequest:
    if isinstance(asked, str):
        return pb.ResolveAdapterRequest(reference=asked, token=token, soon=True)
    members = [pb.MergeMember(reference=name, weight=weight) for name, weight in asked.members]
    merge = pb.Merge(
        members=members,
        strategy=asked.strategy,
        density=asked.density,
        majority_sign=asked.majority_sign,
    )
    return pb.ResolveAdapterRequest(merge=merge, token=token, soon=True)


async def _wrapped(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as exc:
        raise request_error(exc) from exc


def request_error(exc: grpc.aio.AioRpcError) -> RequestError:
    """Return the error that a shard sent with a failed call, or what its status code means."""
    for key, value in exc.trailing_metadata() or ():
        if key == ERROR_TRAILER and isinstance(value, bytes):
            return RequestError.from_proto(pb.Error.FromString(value))
    detail = exc.details() or exc.code().name
    if exc.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return RequestError(pb.ERROR_KIND_INTERNAL, f"the shard failed: {detail}")
    return unavailable(f"the shard does not answer: {detail}")


def unavailable(message: str) -> RequestError:
    """Return the error of a request that may succeed once the shard is back (503)."""
    return RequestError(pb.ERROR_KIND_UNAVAILABLE, message, retry_after_s=_RETRY_S)

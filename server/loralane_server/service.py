"""The shard's gRPC face: answers on the event loop, computes nothing.

Whatever takes time runs elsewhere (the store's threads, the engine's) and is awaited here, so
that the service answers while a step runs. Errors leave as a gRPC status with the typed `Error` in
the trailer "loralane-error-bin".
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from loralane_proto import shard_pb2 as pb
from loralane_proto import shard_pb2_grpc as pb_grpc

from loralane_server.adapters.merging.derived import Merge
from loralane_server.adapters.pool import Tenant, lanes_for
from loralane_server.adapters.store.entries import AdapterSummary
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.engine import Engine
from loralane_server.errors import ShardError
from loralane_server.rows import StepEvent
from loralane_server.usage import LoadTimes
from loralane_server.wire import read_admission, read_recipe, write_capacity, write_step

ERROR_TRAILER = "loralane-error-bin"
#: A tokenizer.json of a large vocabulary is sent in pieces of this size.
_CHUNK_BYTES = 1 << 20
#: Seconds between two looks for adapters whose time to live is over.
_EXPIRY_S = 1.0

_STATUS = {
    pb.ERROR_KIND_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_KIND_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    pb.ERROR_KIND_INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_KIND_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_KIND_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_KIND_LOADING: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_KIND_INTERNAL: grpc.StatusCode.INTERNAL,
}
_TIERS = {"remote": pb.TIER_REMOTE, "disk": pb.TIER_DISK, "host": pb.TIER_HOST}

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What does not change while a shard runs."""

    model_id: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    version: str
    aliases: tuple[tuple[str, str], ...]
    #: (name, bytes) of the files that a router needs to tokenize.
    tokenizer_files: tuple[tuple[str, bytes], ...]


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


class ShardService(pb_grpc.ShardServicer):
    """Implements `Shard` over an engine and an adapter store. Lives on the event loop."""

    def __init__(self, engine: "Engine[Any]", store: AdapterStore, facts: ShardFacts) -> None:
        self._engine = engine
        self._store = store
        self._facts = facts

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoReply:  # noqa: N802
        """Say what this shard serves and how much it can hold."""
        facts = self._facts
        return pb.InfoReply(
            model_id=facts.model_id,
            architecture=facts.architecture,
            dtype=facts.dtype,
            device=facts.device,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            eos_token_ids=facts.eos_token_ids,
            capacity=write_capacity(await asyncio.wrap_future(self._engine.capacity())),
            version=facts.version,
            aliases=[pb.Alias(name=name, reference=ref) for name, ref in facts.aliases],
        )

    async def TokenizerFiles(  # noqa: N802
        self, request: pb.TokenizerFilesRequest, context: Any
    ) -> AsyncIterator[pb.FileChunk]:
        """Send the tokenizer's files in pieces."""
        for name, data in self._facts.tokenizer_files:
            for begin in range(0, len(data), _CHUNK_BYTES):
                yield pb.FileChunk(name=name, data=data[begin : begin + _CHUNK_BYTES])

    @typed_errors
    async def ResolveAdapter(  # noqa: N802
        self, request: pb.ResolveAdapterRequest, context: Any
    ) -> pb.Adapter:
        """Turn a reference, or a merge of several, into an identity, reading headers only."""
        if request.HasField("merge"):
            summary = await self._merged(request.merge, request.token)
        else:
            summary = await self._resolved(request.reference, request.token)
        return self._describe(summary, await self._tenants())

    async def ValidateAdapter(  # noqa: N802
        self, request: pb.ValidateAdapterRequest, context: Any
    ) -> pb.ValidateAdapterReply:
        """Say what an adapter is and whether it can be served."""
        try:
            future = self._store.validate(
                request.reference, request.token or None, tensors=request.tensors
            )
            found = await asyncio.wrap_future(future)
        except ShardError as error:
            return pb.ValidateAdapterReply(error=error.to_proto())
        adapter = _facts(found.summary)
        return pb.ValidateAdapterReply(adapter=adapter, notes=found.notes)

    @typed_errors
    async def LoadAdapter(  # noqa: N802
        self, request: pb.LoadAdapterRequest, context: Any
    ) -> pb.Adapter:
        """Make an adapter resident; answer when it is."""
        summary = self._store.summary(request.digest)
        await asyncio.wrap_future(self._engine.load(request.digest))
        if request.HasField("ttl_s"):
            self._engine.set_ttl(request.digest, request.ttl_s)
        return self._describe(summary, await self._tenants())

    @typed_errors
    async def UnloadAdapter(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, context: Any
    ) -> pb.UnloadAdapterReply:
        """Free an adapter's lanes and its host copy."""
        self._store.summary(request.digest)
        freed = await asyncio.wrap_future(self._engine.unload(request.digest))
        return pb.UnloadAdapterReply(freed_host_bytes=freed.host_bytes, freed_lanes=freed.lanes)

    @typed_errors
    async def PinAdapter(self, request: pb.PinAdapterRequest, context: Any) -> pb.Adapter:  # noqa: N802
        """Keep an adapter resident (loading it first), or let it be evicted again."""
        summary = self._store.summary(request.digest)
        while not await asyncio.wrap_future(self._engine.pin(request.digest, request.pinned)):
            if not request.pinned:
                break  # it holds no lanes: there is nothing to let go
            await asyncio.wrap_future(self._engine.load(request.digest))
        return self._describe(summary, await self._tenants())

    async def ListAdapters(  # noqa: N802
        self, request: pb.ListAdaptersRequest, context: Any
    ) -> pb.ListAdaptersReply:
        """Describe adapters that were resolved: a page of them, or those that are named."""
        tenants, store = await self._tenants(), self._store
        page, total = store.list(request.limit, request.after)
        if request.digests:
            named = sorted(filter(store.is_listed, set(request.digests)))
            page = tuple(store.summary(digest) for digest in named)
        adapters = [self._describe(summary, tenants) for summary in page]
        return pb.ListAdaptersReply(adapters=adapters, total=total)

    async def Run(  # noqa: N802
        self, requests: AsyncIterator[pb.RunRequest], context: Any
    ) -> AsyncIterator[pb.StepReply]:
        """Carry admissions, cancellations and hints in, one message per step out."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[StepEvent | None] = asyncio.Queue()

        def sink(event: StepEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        async def read() -> None:
            try:
                async for message in requests:
                    for admission in message.admit:
                        self._engine.admit(read_admission(admission), sink)
                    for request_id in message.cancel:
                        self._engine.cancel(request_id, sink)
                    for digest in message.prefetch:
                        self._store.prefetch(digest)
            finally:
                events.put_nowait(None)

        self._engine.listen(sink)
        reader = asyncio.create_task(read())
        try:
            while (event := await events.get()) is not None:
                yield write_step(event)
        finally:
            reader.cancel()
            self._engine.leave(sink)

    async def keep_expiring(self) -> None:
        """Forget adapters whose time to live is over, once a second, until cancelled.

        A request that found its adapter just before still gets it: the store can load it again.
        """
        while True:
            await asyncio.sleep(_EXPIRY_S)
            await asyncio.wrap_future(self._engine.expire())

    async def _resolved(self, reference: str, token: str) -> AdapterSummary:
        return await asyncio.wrap_future(self._store.resolve(reference, token or None))

    async def _merged(self, asked: pb.Merge, token: str) -> AdapterSummary:
        """Every member is resolved each time: the caller's token must reach them all."""
        recipe = read_recipe(asked)
        found = (self._resolved(member.reference, token) for member in asked.members)
        digests = tuple(member.digest for member in await asyncio.gather(*found))
        return await asyncio.wrap_future(self._store.merge(Merge(recipe, digests)))

    async def _tenants(self) -> dict[str, Tenant]:
        tenants = await asyncio.wrap_future(self._engine.tenants())
        return {tenant.digest: tenant for tenant in tenants}

    def _describe(self, summary: AdapterSummary, tenants: dict[str, Tenant]) -> pb.Adapter:
        digest = summary.digest
        tenant = tenants.get(digest)
        resident = tenant is not None and tenant.resident
        adapter = _facts(summary)
        adapter.tier = pb.TIER_DEVICE if resident else _TIERS[self._store.tier(digest)]
        adapter.rows = tenant.users if tenant else 0
        adapter.pinned = tenant.pinned if tenant else False
        adapter.load_ms = self._engine.load_ms(digest)
        adapter.last_used = self._engine.last_used(digest)
        adapter.host_bytes = self._store.host_bytes(digest)
        adapter.ttl_s = self._engine.ttl(digest)
        if adapter.load_ms:
            adapter.load_times.CopyFrom(_write_times(self._engine.load_times(digest)))
        return adapter


def _write_times(times: LoadTimes) -> pb.LoadTimes:
    return pb.LoadTimes(
        open_ms=times.open_ms,
        read_ms=times.read_ms,
        cast_ms=times.cast_ms,
        write_ms=times.write_ms,
        wait_ms=times.wait_ms,
    )


def _facts(summary: AdapterSummary) -> pb.Adapter:
    """What is true of an adapter wherever it is."""
    return pb.Adapter(
        digest=summary.digest,
        reference=summary.reference,
        rank=summary.rank,
        lanes=lanes_for(summary.rank),
        bytes=summary.bytes,
        targets=summary.targets,
        modules=summary.modules,
    )

"""The shard's gRPC face: answers on the event loop, computes nothing.

Whatever takes time runs elsewhere (the store's threads, the engine's) and is awaited here, so
that the service answers while a step runs.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from loralane_proto import shard_pb2 as pb
from loralane_proto import shard_pb2_grpc as pb_grpc

from loralane_server.adapters.merging.derived import Merge
from loralane_server.adapters.pool import Tenant
from loralane_server.adapters.store.entries import AdapterSummary
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.engine import Engine
from loralane_server.errors import ShardError
from loralane_server.failures import typed_errors
from loralane_server.rows import StepEvent
from loralane_server.wire import (
    read_admission,
    read_recipe,
    write_capacity,
    write_facts,
    write_step,
    write_times,
)

#: A tokenizer.json of a large vocabulary is sent in pieces of this size.
_CHUNK_BYTES = 1 << 20
#: Seconds between two looks for adapters whose time to live is over.
_EXPIRY_S = 1.0

_TIERS = {"remote": pb.TIER_REMOTE, "disk": pb.TIER_DISK, "host": pb.TIER_HOST}


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


class ShardService(pb_grpc.ShardServicer):
    """Implements `Shard` over an engine and an adapter store. Lives on the event loop."""

    def __init__(self, engine: Engine, store: AdapterStore, facts: ShardFacts) -> None:
        self._engine = engine
        self._store = store
        self._facts = facts

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoReply:
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

    async def TokenizerFiles(
        self, request: pb.TokenizerFilesRequest, context: Any
    ) -> AsyncIterator[pb.FileChunk]:
        """Send the tokenizer's files in pieces."""
        for name, data in self._facts.tokenizer_files:
            for begin in range(0, len(data), _CHUNK_BYTES):
                yield pb.FileChunk(name=name, data=data[begin : begin + _CHUNK_BYTES])

    @typed_errors
    async def ResolveAdapter(self, request: pb.ResolveAdapterRequest, context: Any) -> pb.Adapter:
        """Turn a reference, or a merge of several, into an identity, reading headers only.

        Asked for soon, its tensors are read ahead while the answer and the admission travel.
        """
        if request.HasField("merge"):
            summary = await self._merged(request.merge, request.token)
        else:
            summary = await self._resolved(request.reference, request.token)
        tenants = self._engine.tenants()
        if request.soon and summary.digest not in tenants:
            self._store.prefetch(summary.digest)
        return self._describe(summary, tenants)

    async def ValidateAdapter(
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
        adapter = write_facts(found.summary)
        return pb.ValidateAdapterReply(adapter=adapter, notes=found.notes)

    @typed_errors
    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.Adapter:
        """Make an adapter resident; answer when it is."""
        summary = self._store.summary(request.digest)
        await asyncio.wrap_future(self._engine.load(request.digest))
        if request.HasField("ttl_s"):
            await asyncio.wrap_future(self._engine.set_ttl(request.digest, request.ttl_s))
        return self._describe(summary, self._engine.tenants())

    @typed_errors
    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Any
    ) -> pb.UnloadAdapterReply:
        """Free an adapter's lanes and its host copy."""
        self._store.summary(request.digest)
        freed = await asyncio.wrap_future(self._engine.unload(request.digest))
        return pb.UnloadAdapterReply(freed_host_bytes=freed.host_bytes, freed_lanes=freed.lanes)

    @typed_errors
    async def PinAdapter(self, request: pb.PinAdapterRequest, context: Any) -> pb.Adapter:
        """Keep an adapter resident (loading it first), or let it be evicted again."""
        summary = self._store.summary(request.digest)
        while not await asyncio.wrap_future(self._engine.pin(request.digest, request.pinned)):
            if not request.pinned:
                break  # it holds no lanes: there is nothing to let go
            await asyncio.wrap_future(self._engine.load(request.digest))
        return self._describe(summary, self._engine.tenants())

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Any
    ) -> pb.ListAdaptersReply:
        """Describe adapters that were resolved: a page of them, or those that are named."""
        tenants, store = self._engine.tenants(), self._store
        page, total = store.list(request.limit, request.after)
        if request.digests:
            named = sorted(filter(store.is_listed, set(request.digests)))
            page = tuple(store.summary(digest) for digest in named)
        adapters = [self._describe(summary, tenants) for summary in page]
        return pb.ListAdaptersReply(adapters=adapters, total=total)

    async def Run(
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

    def _describe(self, summary: AdapterSummary, tenants: Mapping[str, Tenant]) -> pb.Adapter:
        digest = summary.digest
        tenant = tenants.get(digest)
        resident = tenant is not None and tenant.resident
        adapter = write_facts(summary)
        adapter.tier = pb.TIER_DEVICE if resident else _TIERS[self._store.tier(digest)]
        adapter.rows = tenant.users if tenant else 0
        adapter.pinned = tenant.pinned if tenant else False
        adapter.load_ms = self._engine.load_ms(digest)
        adapter.last_used = self._engine.last_used(digest)
        adapter.host_bytes = self._store.host_bytes(digest)
        adapter.ttl_s = self._engine.ttl(digest)
        if adapter.load_ms:
            adapter.load_times.CopyFrom(write_times(self._engine.load_times(digest)))
        return adapter

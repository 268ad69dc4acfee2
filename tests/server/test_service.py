"""The shard's gRPC face: what it tells of adapters, and what it does with hints."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from loralane_proto import shard_pb2 as pb
from loralane_proto import shard_pb2_grpc as pb_grpc
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.config import ShardConfig
from loralane_server.rows import Admission
from loralane_server.service import ShardFacts, ShardService

from tests.server.conftest import Listener, running
from tests.server.gated import gated

NAMES = ("r8", "r16", "r64")


@pytest.fixture
def listener(tiny: Path) -> Iterator[Listener]:
    config = ShardConfig(
        model=str(tiny / "model"),
        adapter_roots=(tiny / "adapters",),
        adapter_ttl=3600.0,
        dtype="float32",
        max_rows=2,
        lanes=128,
    )
    with running(config) as listener:
        yield listener


@pytest.fixture
async def service(listener: Listener) -> ShardService:
    shard = listener.shard
    return ShardService(shard.engine, shard.store, shard.facts)


@pytest.fixture
async def stub(service: ShardService) -> AsyncIterator[Any]:
    server = grpc.aio.server()
    pb_grpc.add_ShardServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.ShardStub(channel)
    await server.stop(None)


async def resolved(stub: Any) -> dict[str, str]:
    """Resolve all; return their digests by name."""
    found = {}
    for name in NAMES:
        adapter = await stub.ResolveAdapter(pb.ResolveAdapterRequest(reference=name))
        found[name] = adapter.digest
    return found


async def until_forgotten(store: AdapterStore, digest: str) -> None:
    while store.is_listed(digest):  # noqa: ASYNC110 - a test that hangs here fails by its timeout
        await asyncio.sleep(0.01)


async def test_adapters_are_listed_in_pages_by_digest(stub: Any) -> None:
    digests = sorted((await resolved(stub)).values())

    first = await stub.ListAdapters(pb.ListAdaptersRequest(limit=2))
    rest = await stub.ListAdapters(pb.ListAdaptersRequest(limit=2, after=digests[1]))

    assert [adapter.digest for adapter in first.adapters] == digests[:2]
    assert [adapter.digest for adapter in rest.adapters] == digests[2:]
    assert (first.total, rest.total) == (3, 3)


async def test_those_that_are_named_are_listed_as_far_as_they_are_known(stub: Any) -> None:
    digests = await resolved(stub)
    asked = [digests["r64"], "0" * 64, digests["r8"]]

    reply = await stub.ListAdapters(pb.ListAdaptersRequest(digests=asked))

    assert {adapter.digest for adapter in reply.adapters} == {digests["r8"], digests["r64"]}
    assert reply.total == 3


async def test_a_loaded_adapter_tells_where_its_time_went_and_how_long_it_lives(stub: Any) -> None:
    digest = (await resolved(stub))["r16"]

    adapter = await stub.LoadAdapter(pb.LoadAdapterRequest(digest=digest))
    longer = await stub.LoadAdapter(pb.LoadAdapterRequest(digest=digest, ttl_s=7200.0))

    assert (adapter.tier, adapter.ttl_s, longer.ttl_s) == (pb.TIER_DEVICE, 3600.0, 7200.0)
    assert adapter.host_bytes > 0
    times = adapter.load_times
    assert min(times.open_ms, times.read_ms, times.cast_ms, times.write_ms) > 0
    assert adapter.load_ms > 0


async def test_an_adapter_that_was_never_loaded_tells_no_times(stub: Any) -> None:
    digest = (await resolved(stub))["r16"]

    reply = await stub.ListAdapters(pb.ListAdaptersRequest(digests=[digest]))

    assert not reply.adapters[0].HasField("load_times")


async def test_unused_adapters_are_forgotten_and_pinned_ones_are_not(
    stub: Any, service: ShardService, listener: Listener
) -> None:
    digests, store = await resolved(stub), listener.shard.store
    for name in ("r8", "r16"):
        await stub.LoadAdapter(pb.LoadAdapterRequest(digest=digests[name], ttl_s=0.01))
    await stub.PinAdapter(pb.PinAdapterRequest(digest=digests["r8"], pinned=True))

    expiring = asyncio.create_task(service.keep_expiring())
    await until_forgotten(store, digests["r16"])
    expiring.cancel()

    reply = await stub.ListAdapters(pb.ListAdaptersRequest())
    assert {adapter.digest for adapter in reply.adapters} == {digests["r8"], digests["r64"]}
    assert store.host_bytes(digests["r16"]) == 0


async def test_a_row_whose_adapter_was_forgotten_after_it_was_found_still_gets_it(
    stub: Any, service: ShardService, listener: Listener
) -> None:
    digest = (await resolved(stub))["r16"]
    await stub.LoadAdapter(pb.LoadAdapterRequest(digest=digest, ttl_s=0.01))
    expiring = asyncio.create_task(service.keep_expiring())
    await until_forgotten(listener.shard.store, digest)
    expiring.cancel()

    call = stub.Run()
    admission = pb.Admission(request_id=1, digest=digest, prompt=[1, 2, 3], max_tokens=1)
    await call.write(pb.RunRequest(admit=[admission]))
    rows: list[pb.Row] = []
    while not rows:
        rows += (await call.read()).rows
    call.cancel()

    assert [row.finish_reason for row in rows] == [pb.FINISH_REASON_LENGTH]
    assert rows[0].cold_ms > 0


async def test_a_stream_tells_of_its_admissions_its_prefixes_and_how_fast_it_goes(
    stub: Any,
) -> None:
    call = stub.Run()
    prompt = list(range(40))

    replies: list[pb.StepReply] = []
    for request_id in (1, 2):
        admission = pb.Admission(request_id=request_id, prompt=prompt, max_tokens=3)
        await call.write(pb.RunRequest(admit=[admission]))
        ended = False
        while not ended:
            replies.append(await call.read())
            ended = any(row.finish_reason for row in replies[-1].rows)
    call.cancel()

    rows = [row for reply in replies for row in reply.rows]
    assert [(row.request_id, row.cached_tokens) for row in rows] == [
        (1, 0), (1, 0), (1, 0), (2, 32), (2, 0), (2, 0)
    ]  # fmt: skip
    assert (replies[0].admitted, replies[-1].admitted) == (0, 2)
    capacity = replies[-1].capacity
    assert (capacity.pages_cached, capacity.pending_tokens) == (2, 0)
    assert capacity.pages_free == capacity.pages_total
    assert capacity.step_ms > 0


async def test_adapters_are_found_and_listed_while_a_step_runs(tiny: Path) -> None:
    facts = ShardFacts("m", "a", "float32", "cpu", 1, 1, (), "0", aliases=(), tokenizer_files=())
    with gated(tiny) as (shard, listener):
        service = ShardService(shard.engine, shard.store, facts)
        digest = shard.digest("r16")
        shard.engine.load(digest).result(60)
        shard.device.may_step.clear()
        listener.admit(Admission(1, digest, (1, 2, 3), max_tokens=1))
        assert shard.device.is_waiting.wait(60)

        found = await service.ResolveAdapter(pb.ResolveAdapterRequest(reference="r16"), None)
        other = await service.ResolveAdapter(pb.ResolveAdapterRequest(reference="r8"), None)
        listed = await service.ListAdapters(pb.ListAdaptersRequest(digests=[digest]), None)

        assert (found.digest, found.tier, found.rows) == (digest, pb.TIER_DEVICE, 1)
        assert (other.tier, other.rows) == (pb.TIER_DISK, 0)
        assert list(listed.adapters) == [found]
        shard.device.may_step.set()
        listener.wait(1)


async def test_hints_bring_adapters_into_memory_and_unknown_ones_do_no_harm(
    stub: Any, listener: Listener
) -> None:
    digest, store = (await resolved(stub))["r16"], listener.shard.store
    call = stub.Run()

    await call.write(pb.RunRequest(prefetch=["0" * 64, digest]))
    while store.tier(digest) != "host":  # noqa: ASYNC110 - as in `until_forgotten`
        await asyncio.sleep(0.01)
    await call.write(
        pb.RunRequest(admit=[pb.Admission(request_id=1, prompt=[1, 2, 3], max_tokens=1)])
    )
    rows: list[pb.Row] = []
    while not rows:
        rows += (await call.read()).rows
    call.cancel()

    assert rows[0].finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_dry_run_leaves_nothing(stub: Any, listener: Listener) -> None:
    request = pb.ValidateAdapterRequest(reference="r16", tensors=True)

    reply = await stub.ValidateAdapter(request)
    listed = await stub.ListAdapters(pb.ListAdaptersRequest())

    assert (reply.adapter.rank, reply.adapter.lanes) == (16, 16)
    assert not reply.HasField("error")
    assert listed.total == 0
    assert listener.shard.store.cache.bytes == 0


async def test_a_dry_run_of_what_is_not_there_says_so(stub: Any) -> None:
    reply = await stub.ValidateAdapter(pb.ValidateAdapterRequest(reference="none"))

    assert reply.error.kind == pb.ERROR_KIND_NOT_FOUND
    assert not reply.HasField("adapter")

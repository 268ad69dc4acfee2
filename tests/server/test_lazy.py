"""What a shard reads, and when: headers to know an adapter, its tensors once when it is first used.

Over gRPC, as a router asks; the byte counts come from the store, the expected ones from the files.
"""

import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from loralane_proto import shard_pb2 as pb
from loralane_proto import shard_pb2_grpc as pb_grpc
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.config import ShardConfig
from loralane_server.service import ShardService

from tests.server.conftest import running

MANY = 200
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Host:
    """A shard behind a gRPC port, with lanes for one adapter, and the folder of its adapters."""

    stub: Any
    store: AdapterStore
    root: Path

    async def resolve(self, name: str) -> pb.Adapter:
        adapter: pb.Adapter = await self.stub.ResolveAdapter(
            pb.ResolveAdapterRequest(reference=name)
        )
        return adapter

    async def run(self, digest: str, rows: int = 1) -> list[list[int]]:
        """Admit so many rows with one message; return the tokens of each."""
        admissions = [
            pb.Admission(request_id=i, digest=digest, prompt=[1, 2, 3], max_tokens=4)
            for i in range(rows)
        ]
        call = self.stub.Run()
        await call.write(pb.RunRequest(admit=admissions))
        tokens: list[list[int]] = [[] for _ in range(rows)]
        running = rows
        while running:
            step = await call.read()
            for row in step.rows:
                tokens[row.request_id] += [token.id for token in row.tokens]
                assert row.finish_reason != pb.FINISH_REASON_ERROR, row.error
                running -= row.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        await call.done_writing()
        return tokens

    def sizes(self, name: str) -> tuple[int, int]:
        """Return (bytes of the header, bytes of the tensors) of an adapter's file."""
        raw = (self.root / name / WEIGHTS).read_bytes()
        header = 8 + int.from_bytes(raw[:8], "little")
        return header, len(raw) - header


@pytest.fixture(scope="module")
def root(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of many adapters."""
    folder = tmp_path_factory.mktemp("many")
    for i in range(MANY):
        shutil.copytree(tiny / "adapters" / "r8", folder / f"a{i}")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def host(tiny: Path, root: Path) -> AsyncIterator[Host]:
    config = ShardConfig(
        model=str(tiny / "model"),
        adapter_roots=(root,),
        dtype="float32",
        max_rows=64,
        lanes=8,
        threads=1,
    )
    with running(config) as listener:
        shard = listener.shard
        server = grpc.aio.server()
        pb_grpc.add_ShardServicer_to_server(
            ShardService(shard.engine, shard.store, shard.facts), server
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Host(pb_grpc.ShardStub(channel), shard.store, root)
        await server.stop(None)


async def test_knowing_two_hundred_adapters_reads_headers_only(host: Host) -> None:
    names = [f"a{i}" for i in range(MANY)]

    adapters = [await host.resolve(name) for name in names]
    again = [await host.resolve(name) for name in names]

    assert len({adapter.digest for adapter in adapters}) == MANY
    assert again == adapters
    assert host.store.header_bytes_read == sum(host.sizes(name)[0] for name in names)
    assert host.store.bytes_read == 0
    assert {adapter.tier for adapter in again} == {pb.TIER_DISK}


async def test_the_first_request_reads_the_adapters_tensors_and_the_second_nothing(
    host: Host,
) -> None:
    adapters = [await host.resolve(f"a{i}") for i in range(3)]

    first = await host.run(adapters[1].digest)
    after_first = host.store.bytes_read
    second = await host.run(adapters[1].digest)

    assert after_first == host.sizes("a1")[1] == adapters[1].bytes
    assert second == first
    assert host.store.bytes_read == after_first
    assert [(await host.resolve(f"a{i}")).tier for i in range(3)] == [
        pb.TIER_DISK, pb.TIER_DEVICE, pb.TIER_DISK
    ]  # fmt: skip


async def test_sixty_four_first_requests_at_once_read_the_tensors_once(host: Host) -> None:
    adapter = await host.resolve("a7")

    tokens = await host.run(adapter.digest, rows=64)

    assert all(row == tokens[0] and len(row) == 4 for row in tokens)
    assert host.store.bytes_read == host.sizes("a7")[1]


async def test_an_evicted_adapter_comes_back_from_memory(host: Host) -> None:
    one, other = await host.resolve("a1"), await host.resolve("a2")

    first = await host.run(one.digest)
    await host.run(other.digest)
    evicted = await host.resolve("a1")
    again = await host.run(one.digest)

    assert evicted.tier == pb.TIER_HOST
    assert again == first
    assert host.store.bytes_read == host.sizes("a1")[1] + host.sizes("a2")[1]


async def test_the_base_reads_no_adapter(host: Host) -> None:
    await host.resolve("a0")

    await host.run("", rows=4)

    assert host.store.bytes_read == 0

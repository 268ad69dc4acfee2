"""More requests than rows, more than the queue takes, and clients that leave before their turn."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio
import httpx
import pytest
from loralane_proto import inference_pb2 as pb
from loralane_proto import inference_pb2_grpc

from tests.e2e.conftest import client_of
from tests.product import (
    LONGEST,
    Served,
    World,
    assert_all_free,
    metrics,
    serve,
    stop_cleanly,
    until,
)

ROWS, QUEUE, TOKENS = 4, 24, 12
ENDLESS = LONGEST - 100
#: Room for two of the adapters that take 8 lanes.
LANES = 16
SMALL = ("", "a", "b", "c", "d", "e", "h")


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[Served]:
    flags = [f"--max-rows={ROWS}", f"--max-queue={QUEUE}", f"--lanes={LANES}"]
    with serve(*world.flags, f"--max-model-len={LONGEST}", *flags) as served:
        yield served
        stop_cleanly(served.command)


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(served) as client:
        yield client
        assert_all_free(await until(client, running=0, waiting=0))


async def ask(
    http: httpx.AsyncClient, adapter: str, prompt: str, tokens: int = TOKENS
) -> httpx.Response:
    body = {"model": adapter, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return await http.post("/v1/completions", json=body)


def text(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


async def test_more_requests_than_rows_and_lanes_wait_their_turn(http, world):
    asked = [(SMALL[i % len(SMALL)], f"tale {i:02}") for i in range(QUEUE)]

    replies = await asyncio.gather(*(ask(http, *one) for one in asked))

    expected = [world.text(adapter, prompt, TOKENS) for adapter, prompt in asked]
    assert [text(reply) for reply in replies] == expected


async def test_a_full_queue_refuses_and_serves_all_that_it_took(http, world):
    asked = [("a", f"tale {i:02}") for i in range(2 * (ROWS + QUEUE))]

    replies = await asyncio.gather(*(ask(http, *one) for one in asked))

    taken = [i for i, reply in enumerate(replies) if reply.status_code == 200]
    expected = world.texts("a", [prompt for _, prompt in asked], TOKENS)
    assert [text(replies[i]) for i in taken] == [expected[i] for i in taken]
    assert len(taken) >= QUEUE
    refused = [reply for reply in replies if reply.status_code != 200]
    assert refused
    for reply in refused:
        assert reply.status_code == 429
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert reply.json()["error"]["code"] == "overloaded"


async def test_clients_that_leave_the_queue_free_their_places(http, world):
    running = [asyncio.create_task(ask(http, "a", "tale", ENDLESS)) for _ in range(ROWS)]
    await until(http, running=ROWS)
    waiting = [asyncio.create_task(ask(http, "b", "tale", ENDLESS)) for _ in range(QUEUE)]
    await until(http, running=ROWS, waiting=QUEUE)

    await leave(waiting)
    await until(http, running=ROWS, waiting=0)
    later = asyncio.create_task(ask(http, "b", "tale 01"))
    await until(http, running=ROWS, waiting=1)
    await leave(running)

    assert text(await later) == world.text("b", "tale 01", TOKENS)


async def leave(clients: list[asyncio.Task[httpx.Response]]) -> None:
    """Close these clients' connections."""
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)


async def test_a_grpc_client_that_leaves_frees_its_row(http, served):
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(adapter="a", prompt="a", max_tokens=ENDLESS))
        await call.read()

        call.cancel()
        before = (await metrics(http))["loralane_generated_tokens_total"]
        after = (await until(http, running=0))["loralane_generated_tokens_total"]

    assert after - before < ENDLESS // 2, "it ran to its end"


async def test_an_adapter_whose_load_fails_fails_all_that_wait_and_nobody_else(http, world):
    asked = [("nan" if i % 2 else "a", f"tale {i:02}") for i in range(QUEUE)]

    replies = await asyncio.gather(*(ask(http, *one) for one in asked))

    for (adapter, prompt), reply in zip(asked, replies, strict=True):
        if adapter == "a":
            assert text(reply) == world.text("a", prompt, TOKENS)
        else:
            assert reply.status_code == 424
            assert "not finite" in reply.json()["error"]["message"]


async def test_an_adapter_that_was_repaired_is_served(http, world):
    own = world.root / "repaired"
    shutil.copytree(world.root / "nan", own)
    broken = await ask(http, "repaired", "tale 01")

    shutil.rmtree(own)
    shutil.copytree(world.root / "b", own)
    whole = await ask(http, "repaired", "tale 01")
    shutil.rmtree(own)

    assert broken.status_code == 424
    assert text(whole) == world.text("b", "tale 01", TOKENS)


async def test_an_adapter_in_memory_is_served_after_its_files_are_gone(http, world):
    own = world.root / "gone"
    shutil.copytree(world.root / "b", own)
    before = await ask(http, str(own), "tale 01")

    shutil.rmtree(own)
    after = await ask(http, str(own), "tale 02")
    deleted = await http.delete(f"/v1/adapters/{own}")
    never = await ask(http, str(own), "tale 03")

    assert text(before) == world.text("b", "tale 01", TOKENS)
    assert text(after) == world.text("b", "tale 02", TOKENS)
    assert deleted.status_code == 200
    assert never.status_code == 404


async def test_where_pins_leave_no_lanes_others_are_refused_and_the_base_is_served(http, world):
    for name in ("a", "b"):
        pinned = await http.patch(f"/v1/adapters/{name}", json={"pinned": True})
        assert pinned.status_code == 200

    refused = await ask(http, "c", "tale 01")
    base, held = await ask(http, "", "tale 01"), await ask(http, "a", "tale 01")
    for name in ("a", "b"):
        await http.patch(f"/v1/adapters/{name}", json={"pinned": False})
    served_now = await ask(http, "c", "tale 01")

    assert refused.status_code == 429
    assert "unpin" in refused.json()["error"]["message"]
    assert text(base) == world.text("", "tale 01", TOKENS)
    assert text(held) == world.text("a", "tale 01", TOKENS)
    assert text(served_now) == world.text("c", "tale 01", TOKENS)

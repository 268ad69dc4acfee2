"""gRPC for text."""

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loralane_proto import inference_pb2 as pb
from loralane_proto import inference_pb2_grpc, shard_pb2
from loralane_router.inference import InferenceServer, text_request


@pytest.fixture
async def connect():
    """Serve a router on a free port and return a channel to it."""
    servers, channels = [], []

    async def start(router) -> grpc.aio.Channel:
        servers.append(InferenceServer(router))
        port = await servers[-1].start("127.0.0.1", 0)
        channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        return channels[-1]

    yield start
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.close()


async def replies(channel, **fields) -> list[pb.GenerateReply]:
    stub = inference_pb2_grpc.InferenceStub(channel)
    return [reply async for reply in stub.Generate(pb.GenerateRequest(**fields))]


async def test_text_streams_with_usage_at_the_end(start_shard, start_router, connect):
    shard = await start_shard({"two": {"increment": 2, "cold_steps": 1}})
    channel = await connect(await start_router(shard))

    got = await replies(channel, adapter="two", prompt="a", max_tokens=3)

    assert "".join(reply.text for reply in got) == "ceg"
    assert [id for reply in got for id in reply.token_ids] == [99, 101, 103]
    assert (got[0].adapter_digest, got[0].adapter_cold_ms) == ("digest-of-two", 10.0)
    assert [reply.finish_reason for reply in got] == ["", "", "length"]
    assert got[-1].usage == pb.Usage(prompt_tokens=2, completion_tokens=3)


async def test_an_adapter_that_is_not_ready_in_time_is_an_error_or_the_base_as_asked(
    start_shard, start_router, connect
):
    shard = await start_shard({"two": {"increment": 2, "cold_steps": 1000}})
    channel = await connect(await start_router(shard))
    fields = {"adapter": "two", "prompt": "a", "max_tokens": 3, "max_wait_for_adapter_ms": 50}

    got = await replies(channel, **fields, adapter_wait_policy="base")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await replies(channel, **fields)

    assert "".join(reply.text for reply in got) == "bcd"
    assert [reply.is_fallback for reply in got] == [True, False, False]
    assert got[0].adapter_digest == ""
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "max_wait_for_adapter_ms=50" in caught.value.details()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 1_000_001),
        ("priority", -1_000_001),
        ("max_wait_for_adapter_ms", 3_600_001),
        ("adapter_wait_policy", "other"),
    ],
)
async def test_what_may_not_be_asked_is_refused_by_name(
    start_shard, start_router, connect, field, value
):
    channel = await connect(await start_router(await start_shard()))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await replies(channel, prompt="a", max_tokens=1, **{field: value})

    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in caught.value.details()


async def test_usage_tells_how_much_of_the_prompt_was_cached(start_shard, start_router, connect):
    shard = await start_shard(manual=True)
    router = await start_router(shard)
    channel = await connect(router)
    asking = asyncio.create_task(replies(channel, prompt="abc", max_tokens=2))
    await shard.until(lambda s: bool(s.rows))
    (row,) = shard.rows.values()
    row.cached_tokens = 3
    shard.step(2)

    assert (await asking)[-1].usage.cached_tokens == 3
    counted = router.metrics.registry.get_sample_value("loralane_prefix_cached_tokens_total")
    assert counted == 3


def test_a_bearer_key_in_the_metadata_is_the_callers_and_shows_nowhere():
    request = text_request(pb.GenerateRequest(prompt="a", priority=-3), "sk-1")

    assert (request.key, request.priority) == ("sk-1", -3)
    assert "sk-1" not in repr(request)


async def test_chat_ids_and_stop_work(start_shard, start_router, connect):
    shard = await start_shard()
    channel = await connect(await start_router(shard))

    chat = pb.Chat(messages=[pb.Message(role="user", content="hi")])
    await replies(channel, chat=chat, max_tokens=1)
    got = await replies(channel, token_ids=pb.TokenIds(ids=[97]), max_tokens=9, stop=["d"], seed=5)

    assert list(shard.admissions[0].prompt) == [258, 104, 105, 259]
    assert "".join(reply.text for reply in got) == "bc"
    assert got[-1].finish_reason == "stop"
    assert shard.admissions[1].sampling.seed == 5
    assert shard.admissions[1].sampling.top_p == 1.0


@pytest.mark.parametrize(
    ("fields", "code", "kind"),
    [
        ({"adapter": "no/such", "prompt": "a"}, "NOT_FOUND", shard_pb2.ERROR_KIND_NOT_FOUND),
        ({"adapter": "secret", "prompt": "a"}, "PERMISSION_DENIED", shard_pb2.ERROR_KIND_FORBIDDEN),
        ({}, "INVALID_ARGUMENT", shard_pb2.ERROR_KIND_INVALID_REQUEST),
        (
            {"prompt": "a", "top_p": 2.0},
            "INVALID_ARGUMENT",
            shard_pb2.ERROR_KIND_INVALID_REQUEST,
        ),
    ],
)
async def test_a_failure_has_the_status_of_its_kind(
    start_shard, start_router, connect, fields, code, kind
):
    shard = await start_shard({"secret": {"increment": 1, "token": "t"}})
    router = await start_router(shard)
    channel = await connect(router)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await replies(channel, **fields)

    trailer = dict(caught.value.trailing_metadata())["loralane-error-bin"]
    assert caught.value.code().name == code
    assert shard_pb2.Error.FromString(trailer).kind == kind
    labels = {"surface": "grpc", "status": code}
    assert router.metrics.registry.get_sample_value("loralane_requests_total", labels) == 1


async def test_a_client_that_goes_away_frees_its_row(start_shard, start_router, connect):
    shard = await start_shard(manual=True)
    channel = await connect(await start_router(shard))
    stub = inference_pb2_grpc.InferenceStub(channel)
    call = stub.Generate(pb.GenerateRequest(prompt="a", max_tokens=50))
    await shard.until(lambda s: bool(s.rows))
    shard.step()
    await call.read()

    call.cancel()
    await shard.until(lambda s: bool(s.cancels))

    assert shard.cancels == list(shard.rows)


async def test_health_follows_the_shard(start_shard, start_router, connect):
    shard = await start_shard()
    channel = await connect(await start_router(shard))
    health = health_pb2_grpc.HealthStub(channel)
    status = health_pb2.HealthCheckResponse

    watch = health.Watch(health_pb2.HealthCheckRequest(service="loralane.inference.v1.Inference"))
    seen = [(await watch.read()).status]
    await shard.stop()
    seen.append((await asyncio.wait_for(watch.read(), 10)).status)
    watch.cancel()

    assert seen == [status.SERVING, status.NOT_SERVING]
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == status.NOT_SERVING

"""A shard that dies, comes back, or was never there."""

import asyncio

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.config import RouterConfig
from loralane_router.errors import RequestError
from loralane_router.requests import Parameters, TextRequest
from loralane_router.router import Router

ASK = TextRequest("", "a", Parameters(max_tokens=20))


async def until_ready(router: Router, wanted: bool) -> None:
    async with asyncio.timeout(20):
        async for ready in router.ready_changes():
            if ready == wanted:
                return


async def test_every_live_request_ends_with_one_error_when_the_shard_dies(
    start_shard, start_router
):
    shard = await start_shard(rows_total=1, manual=True)
    router = await start_router(shard)
    running, waiting = await router.open(ASK), await router.open(ASK)
    shard.step()
    first = await anext(aiter(running))

    await shard.stop()
    await until_ready(router, False)

    assert first.text == "b"
    for generation in (running, waiting):
        with pytest.raises(RequestError) as caught:
            await anext(aiter(generation))
        assert caught.value.status.http == 503
        assert caught.value.retry_after_s
        assert [delta async for delta in generation] == []
    with pytest.raises(RequestError) as caught:
        await router.open(ASK)
    assert caught.value.status.http == 503
    assert router.info.model_id == "org/counter"


async def test_the_router_is_ready_again_when_the_shard_is_back(start_shard, start_router):
    shard = await start_shard()
    router = await start_router(shard)
    await shard.stop()
    await until_ready(router, False)

    await shard.start()
    await until_ready(router, True)
    generation = await router.open(TextRequest("", "a", Parameters(max_tokens=2)))

    assert "".join([delta.text async for delta in generation]) == "bc"


async def test_a_router_may_start_before_its_shard(start_shard):
    shard = await start_shard()
    await shard.stop()
    router = Router(RouterConfig(shards=(f"127.0.0.1:{shard.port}",)))

    await router.start()
    with pytest.raises(RequestError, match="not connected"):
        await router.open(ASK)
    with pytest.raises(RequestError, match="not reached"):
        _ = router.info
    await shard.start()
    await until_ready(router, True)

    assert router.info.device == "abacus"
    await router.close()


async def test_closing_the_router_ends_its_requests(start_shard, start_router):
    router = await start_router(await start_shard(manual=True))
    generation = await router.open(ASK)

    await router.close()
    await router.close()

    with pytest.raises(RequestError, match="closed"):
        await anext(aiter(generation))
    assert not router.ready


async def test_a_shard_without_a_tokenizer_is_asked_again(start_shard, good_tokenizer_files):
    shard = await start_shard(files={"tokenizer_config.json": b"{}"})
    router = Router(RouterConfig(shards=(f"127.0.0.1:{shard.port}",)))
    await router.start()
    await shard.until(lambda s: s.file_requests > 0)
    early = router.ready

    shard.files = good_tokenizer_files
    await until_ready(router, True)

    assert not early
    await router.close()


async def test_a_shard_that_was_replaced_while_opening_is_not_given_old_ids(
    start_shard, start_router
):
    shard = await start_shard({"two": {"increment": 2}})
    router = await start_router(shard)
    resolve, go = shard.ResolveAdapter, asyncio.Event()

    async def slow(request, context):
        await go.wait()
        return await resolve(request, context)

    shard.ResolveAdapter = slow
    opening = asyncio.create_task(router.open(TextRequest("two", "a", Parameters())))
    await asyncio.sleep(0)
    await shard.stop()

    with pytest.raises(RequestError) as caught:
        await opening
    assert caught.value.kind == pb.ERROR_KIND_UNAVAILABLE

"""A pin belongs to a name: it follows when the files that the name means are replaced."""

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.errors import RequestError
from loralane_router.requests import Parameters, TextRequest


async def ask(router) -> str:
    generation = await router.open(TextRequest("mine", "a", Parameters(max_tokens=2)))
    return "".join([delta.text async for delta in generation])


def pinned(shard) -> list[str]:
    return [name for name, adapter in shard.adapters.items() if adapter.pinned]


async def test_a_pin_follows_where_the_lanes_hold_only_the_old_or_the_new(
    start_shard, start_router
):
    adapters = {"old": {"increment": 2}, "new": {"increment": 3}}
    shard = await start_shard(adapters, aliases={"mine": "old"}, lanes_total=8)
    router = await start_router(shard)
    await router.pin_adapter("mine", True)

    shard.aliases["mine"] = "new"

    assert [await ask(router), await ask(router)] == ["dg", "dg"]
    assert pinned(shard) == ["new"]


async def test_a_pin_stays_while_the_new_files_are_broken_and_follows_when_they_are_whole(
    start_shard, start_router
):
    adapters = {"old": {"increment": 2}, "broken": {"increment": 3}, "new": {"increment": 4}}
    shard = await start_shard(adapters, aliases={"mine": "old"})
    shard.adapters["broken"].broken = pb.Error(kind=pb.ERROR_KIND_CORRUPT, message="NaN")
    router = await start_router(shard)
    await router.pin_adapter("mine", True)

    shard.aliases["mine"] = "broken"
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            await ask(router)
        assert caught.value.status.http == 424
        assert pinned(shard) == ["old"]
    shard.aliases["mine"] = "new"

    assert await ask(router) == "ei"
    assert pinned(shard) == ["new"]

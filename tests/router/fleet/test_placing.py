"""A shard that has no place for an adapter, beside one that has."""

import pytest
from loralane_router.errors import RequestError
from loralane_router.requests import Parameters, TextRequest

TWO = {"two": {"increment": 2}}
WIDE = {"two": {"increment": 2, "lanes": 16}}
#: Holds all lanes of a shard that has eight.
PINNED = {"pinned": {"increment": 3, "pinned": True, "resident": True}}


def ask(adapter: str = "", max_tokens: int = 2) -> TextRequest:
    return TextRequest(adapter, "a", Parameters(max_tokens=max_tokens))


@pytest.fixture
def start_pair(start_shard, start_router):
    """Start a router with a narrow shard, which would answer at once, and a wide one with a queue.

    Returns both, the router, and those who wait.
    """

    async def start(adapters):
        narrow = await start_shard(adapters, lanes_total=8)
        own = {"two": adapters["two"], "crowd": {"increment": 1}}
        wide = await start_shard(own, rows_total=1, aliases={"here": "crowd"}, manual=True)
        for shard in (narrow, wide):
            shard.unloaded.add("digest-of-two")  # not known before it is asked for
        router = await start_router(narrow, wide)
        return narrow, wide, router, [await router.open(ask("here")) for _ in range(8)]

    return start


@pytest.mark.parametrize("adapters", [TWO | PINNED, WIDE])
async def test_a_request_goes_where_its_adapter_has_a_place_though_it_waits_there(
    adapters, start_pair
):
    narrow, wide, router, crowd = await start_pair(adapters)

    generation = await router.open(ask("two"))
    for waiting in crowd:
        await waiting.aclose()
    wide.step(9)

    assert "".join([delta.text async for delta in generation]) == "ce"
    assert [reference for reference, _ in narrow.resolved] == ["two"]
    assert narrow.admissions == []
    router.check()


async def test_an_adapter_is_loaded_and_pinned_where_there_is_a_place(start_pair):
    narrow, wide, router, crowd = await start_pair(TWO | PINNED)

    pinned = await router.pin_adapter("two", True)
    loaded = await router.load_adapter("mine", "two", None)

    assert (pinned.facts.pinned, loaded.facts.tier) == (True, "device")
    assert wide.adapters["two"].pinned
    assert not narrow.adapters["two"].resident
    for waiting in crowd:
        await waiting.aclose()


async def test_where_no_shard_has_a_place_the_reason_is_told(start_shard, start_router):
    shards = [await start_shard(TWO | PINNED, lanes_total=8) for _ in range(2)]
    router = await start_router(*shards)

    with pytest.raises(RequestError, match="unpin one") as caught:
        await router.open(ask("two"))

    assert caught.value.status.http == 429


async def test_an_alias_that_only_a_full_shard_has_is_told_why(start_shard, start_router):
    full = await start_shard(TWO | PINNED, lanes_total=8, aliases={"mine": "two"})
    router = await start_router(full, await start_shard(TWO))

    with pytest.raises(RequestError, match="unpin one"):
        await router.open(ask("mine"))

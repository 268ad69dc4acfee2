"""Adapters of several shards, as operators see and change them."""

import asyncio

import pytest
from loralane_router.adapters.facts import AdapterFacts
from loralane_router.adapters.listing import merged
from loralane_router.errors import RequestError
from loralane_router.requests import Parameters, TextRequest

#: More than any of these tests has.
ALL = 100


def two(**fields) -> dict[str, dict]:
    return {"two": {"increment": 2, **fields}}


async def text(router, adapter: str) -> str:
    generation = await router.open(TextRequest(adapter, "a", Parameters(max_tokens=2)))
    return "".join([delta.text async for delta in generation])


async def test_the_list_has_every_name_once_and_says_where_it_is(start_shard, start_router):
    one = await start_shard(two() | {"only-here": {"increment": 3}})
    other = await start_shard(two(resident=True))
    router = await start_router(one, other)

    page = await router.list_adapters(ALL)

    assert [entry.name for entry in page.entries] == ["only-here", "two"]
    assert page.total == 2
    both = page.entries[1]
    assert both.facts.tier == "device"
    assert [(at.shard, at.facts.tier) for at in both.shards] == [
        (one.address, "disk"),
        (other.address, "device"),
    ]
    assert [at.shard for at in page.entries[0].shards] == [one.address]


async def test_one_shard_alone_says_nothing_of_shards(start_shard, start_router):
    router = await start_router(await start_shard(two()))

    (entry,) = (await router.list_adapters(ALL)).entries

    assert entry.shards == ()


async def test_equal_names_of_other_bytes_are_one_row_with_both_digests(start_shard, start_router):
    one, other = await start_shard(two(digest="x")), await start_shard(two(digest="y"))
    router = await start_router(one, other)

    (entry,) = (await router.list_adapters(ALL)).entries

    assert (entry.name, [at.facts.digest for at in entry.shards]) == ("two", ["x", "y"])


async def test_a_digest_that_a_name_no_longer_means_on_one_shard_is_a_row_of_its_own(
    start_shard, start_router
):
    one, other = await start_shard(two(digest="old")), await start_shard(two(digest="old"))
    router = await start_router(one, other)
    one.adapters["two, before"] = one.adapters.pop("two")
    one.adapters["two"] = type(one.adapters["two, before"])(2, digest="new", resident=True)
    registry = router.fleet.links[0].registry
    await registry.resolve(router.fleet.links[0].shard, "two", None)

    entries = {entry.name: entry for entry in router.adapters(ALL).entries}

    assert sorted(entries) == ["old", "two"]
    assert [at.facts.digest for at in entries["old"].shards] == ["old", "old"]
    assert entries["two"].facts.digest == "new"


async def test_an_alias_goes_for_its_adapter_on_all_shards(start_shard, start_router):
    one = await start_shard(two(resident=True), aliases={"deux": "two"})
    other = await start_shard(two())
    router = await start_router(one, other)
    await text(router, "deux")

    (entry,) = (await router.list_adapters(ALL)).entries

    assert (entry.name, entry.reference) == ("deux", "two")
    assert [at.shard for at in entry.shards] == [one.address, other.address]


async def test_a_shard_that_is_gone_is_not_in_the_list(start_shard, start_router):
    one, other = await start_shard(two()), await start_shard({"three": {"increment": 3}})
    router = await start_router(one, other)
    await other.stop()
    await asyncio.wait_for(router.fleet.until(lambda f: len(f.ready_links) == 1), 20)

    names = [entry.name for entry in (await router.list_adapters(ALL)).entries]
    await one.stop()
    await asyncio.wait_for(router.fleet.until(lambda f: not f.ready), 20)

    assert names == ["two"]
    assert [entry.name for entry in router.adapters(ALL).entries] == ["three", "two"]


async def test_a_name_that_was_given_on_one_shard_is_one_on_all(start_shard, start_router):
    one, other = [await start_shard({"org/two": {"increment": 2}}) for _ in range(2)]
    router = await start_router(one, other)

    await router.load_adapter("mine", "org/two", None)
    loaded = one if one.adapters["org/two"].resident else other
    await loaded.stop()
    await asyncio.wait_for(router.fleet.until(lambda f: len(f.ready_links) == 1), 20)

    assert await text(router, "mine") == "ce"
    assert [entry.name for entry in router.adapters(ALL).entries] == ["mine"]


async def test_unloading_reaches_every_shard_that_knows_it(start_shard, start_router):
    adapter = {"org/two": {"increment": 2, "resident": True}}
    shards = [await start_shard(adapter), await start_shard(adapter), await start_shard()]
    router = await start_router(*shards)
    await router.load_adapter("mine", "org/two", None)

    freed = await router.unload_adapter("mine")

    assert freed == (2000, 16)
    assert [len(shard.unloaded) for shard in shards] == [1, 1, 0]
    assert router.adapter("mine") is None
    assert router.adapters(ALL).entries == ()
    router.check()


async def test_a_name_is_taken_back_though_its_shard_was_restarted_and_knows_nothing(
    start_shard, start_router
):
    shard = await start_shard({"org/two": {"increment": 2}})
    router = await start_router(shard)
    await router.load_adapter("mine", "org/two", None)
    await shard.stop()
    await asyncio.wait_for(router.fleet.until(lambda f: not f.ready), 20)
    shard.unloaded.add("digest-of-org/two")
    await shard.start()
    await asyncio.wait_for(router.wait_ready(), 20)

    freed = await router.unload_adapter("mine")

    assert freed == (0, 0)
    assert router.adapter("mine") is None
    with pytest.raises(RequestError) as caught:
        await router.unload_adapter("mine")
    assert caught.value.status.http == 404


async def test_a_name_outlives_an_unloading_that_failed_on_one_shard(start_shard, start_router):
    adapter = {"org/two": {"increment": 2, "resident": True}}
    one, other = [await start_shard(adapter) for _ in range(2)]
    router = await start_router(one, other)
    await router.load_adapter("mine", "org/two", None)
    other.used_by_others.add("digest-of-org/two")

    with pytest.raises(RequestError):
        await router.unload_adapter("mine")
    entry = router.adapter("mine")
    other.used_by_others.clear()
    freed = await router.unload_adapter("mine")

    assert entry is not None
    assert [at.shard for at in entry.shards] == [other.address]
    assert freed == (1000, 8)
    assert router.adapter("mine") is None


async def test_an_adapter_in_use_on_any_shard_is_unloaded_on_none(start_shard, start_router):
    shards = [await start_shard(two(resident=True), manual=True) for _ in range(2)]
    router = await start_router(*shards)
    running = await router.open(TextRequest("two", "a", Parameters(max_tokens=9)))

    with pytest.raises(RequestError) as caught:
        await router.unload_adapter("two")

    assert caught.value.status.http == 409
    assert [shard.unloaded for shard in shards] == [set(), set()]
    await running.aclose()


async def test_a_pin_is_put_where_the_adapter_is_resident_and_taken_off_everywhere(
    start_shard, start_router
):
    cold = await start_shard(two())
    warm = [await start_shard(two(resident=True)) for _ in range(2)]
    router = await start_router(cold, *warm)

    entry = await router.pin_adapter("two", True)
    pinned = [shard.adapters["two"].pinned for shard in (cold, *warm)]
    after = await router.pin_adapter("two", False)

    assert pinned == [False, True, True]
    assert (entry.facts.pinned, after.facts.pinned) == (True, False)
    assert not any(shard.adapters["two"].pinned for shard in (cold, *warm))


async def test_a_pin_of_what_is_nowhere_resident_is_put_on_one_shard(start_shard, start_router):
    shards = [await start_shard(two()) for _ in range(3)]
    router = await start_router(*shards)

    entry = await router.pin_adapter("two", True)

    assert [shard.adapters["two"].pinned for shard in shards].count(True) == 1
    assert entry.facts.pinned


async def test_a_dry_run_asks_one_shard(start_shard, start_router):
    router = await start_router(*[await start_shard(two()) for _ in range(2)])

    facts, _ = await router.validate_adapter("two", None, tensors=False)

    assert facts.digest == "digest-of-two"


def test_merged_facts_are_those_of_the_best_tier_with_sums():
    disk = AdapterFacts("x", tier="disk", rows=0, host_bytes=5, last_used=3.0, bytes=7)
    host = AdapterFacts("y", tier="host", rows=2, host_bytes=6, last_used=2.0, bytes=8, pinned=True)
    device = AdapterFacts("z", tier="device", rows=3, host_bytes=1, last_used=1.0, bytes=9)

    facts = merged([disk, host, device])

    assert (facts.digest, facts.tier, facts.bytes) == ("z", "device", 9)
    assert (facts.rows, facts.host_bytes, facts.last_used, facts.pinned) == (5, 12, 3.0, True)
    assert merged([host]) is host
    assert merged([]).digest == ""

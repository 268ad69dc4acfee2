"""Adapters by the names that users give them."""

import gc
import tracemalloc
from dataclasses import replace

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.adapters.listing import Listing
from loralane_router.adapters.names import Names
from loralane_router.adapters.registry import Registry
from loralane_router.errors import RequestError
from loralane_router.requests import Parameters, TextRequest

#: More than any of these tests has.
ALL = 100


async def text(router, adapter: str) -> str:
    generation = await router.open(TextRequest(adapter, "a", Parameters(max_tokens=2)))
    return "".join([delta.text async for delta in generation])


async def test_an_alias_of_the_shard_is_a_name(start_shard, start_router):
    shard = await start_shard({"org/two": {"increment": 2}}, aliases={"deux": "org/two"})
    router = await start_router(shard)

    assert await text(router, "deux") == await text(router, "org/two") == "ce"
    (entry,) = router.adapters(ALL).entries
    assert (entry.name, entry.reference, entry.facts.digest) == (
        "deux",
        "org/two",
        "digest-of-org/two",
    )


async def test_a_loaded_adapter_is_resident_and_has_its_name(start_shard, start_router):
    shard = await start_shard({"org/two": {"increment": 2, "token": "t"}})
    router = await start_router(shard)

    entry = await router.load_adapter("mine", "org/two", "t")

    facts = entry.facts
    assert (entry.name, facts.tier, facts.lanes, facts.modules) == (
        "mine",
        "device",
        8,
        ("q_proj", "v_proj"),
    )
    with pytest.raises(RequestError) as caught:
        await text(router, "mine")
    assert caught.value.status.http == 403


async def test_an_unloaded_adapter_loses_its_lanes_and_its_name(start_shard, start_router):
    shard = await start_shard({"org/two": {"increment": 2}})
    router = await start_router(shard)
    await router.load_adapter("mine", "org/two", None)

    freed = await router.unload_adapter("mine")

    assert freed == (1000, 8)
    with pytest.raises(RequestError) as caught:
        await text(router, "mine")
    assert caught.value.status.http == 404
    assert await text(router, "org/two") == "ce"


async def test_an_adapter_in_use_is_not_unloaded(start_shard, start_router):
    shard = await start_shard({"two": {"increment": 2}}, rows_total=1, manual=True)
    router = await start_router(shard)
    request = TextRequest("two", "a", Parameters(max_tokens=9))
    running, waiting = await router.open(request), await router.open(request)

    with pytest.raises(RequestError) as caught:
        await router.unload_adapter("two")

    assert caught.value.status.http == 409
    await running.aclose()
    await waiting.aclose()


async def test_unloading_what_nobody_knows_is_not_found(start_shard, start_router):
    router = await start_router(await start_shard())

    with pytest.raises(RequestError) as caught:
        await router.unload_adapter("nothing")

    assert caught.value.status.http == 404


@pytest.mark.parametrize("name", ["", "org/counter", "counter", "a\nb", "x" * 300])
async def test_some_names_cannot_be_given(start_shard, start_router, name):
    router = await start_router(await start_shard({"two": {"increment": 2}}))

    with pytest.raises(RequestError) as caught:
        await router.load_adapter(name, "two", None)

    assert (caught.value.status.http, caught.value.param) == (400, "name")


async def test_a_name_can_be_given_to_another_adapter(start_shard, start_router):
    shard = await start_shard({"two": {"increment": 2}, "three": {"increment": 3}})
    router = await start_router(shard)
    await router.load_adapter("prod", "two", None)

    before = await text(router, "prod")
    await router.load_adapter("prod", "three", None)

    assert (before, await text(router, "prod")) == ("ce", "dg")
    assert {entry.name for entry in router.adapters(ALL).entries} == {"prod", "two"}


async def test_a_replaced_adapter_is_another_digest(start_shard, start_router):
    shard = await start_shard({"two": {"increment": 2}})
    router = await start_router(shard)
    old = await router.open(TextRequest("two", "a", Parameters(max_tokens=1)))
    assert [delta.text async for delta in old] == ["c"]

    shard.adapters["two"].digest = "digest-of-new-two"
    new = await router.open(TextRequest("two", "a", Parameters(max_tokens=1)))

    assert (old.adapter_digest, new.adapter_digest) == ("digest-of-two", "digest-of-new-two")
    assert [delta.text async for delta in new] == ["c"]


@pytest.mark.parametrize("name", ["two", "/root/two"])
async def test_an_adapter_is_unloaded_by_any_name_that_led_to_it(start_shard, start_router, name):
    shard = await start_shard({"two": {"increment": 2}, "/root/two": {"increment": 2}})
    shard.adapters["/root/two"].digest = shard.adapters["two"].digest
    router = await start_router(shard)
    await text(router, "two")
    await text(router, "/root/two")

    freed = await router.unload_adapter(name)

    assert freed == (1000, 8)
    assert router.adapters(ALL).entries == ()


async def test_the_list_comes_from_the_shard(start_shard, start_router):
    shard = await start_shard(
        {"b": {"increment": 2}, "a": {"increment": 3}}, aliases={"z": "not/yet"}
    )
    router = await start_router(shard)
    await router.pin_adapter("b", True)

    entries = (await router.list_adapters(ALL)).entries

    assert [(e.name, e.facts.pinned, e.facts.tier) for e in entries] == [
        ("a", False, "disk"),
        ("b", True, "device"),
        ("z", False, "remote"),
    ]
    assert router.adapters(ALL).entries == entries


async def test_unknown_names_leave_nothing_behind(start_shard, start_router):
    router = await start_router(await start_shard())

    for number in range(50):
        with pytest.raises(RequestError):
            await text(router, f"no/such-{number}")

    registry = router.fleet.links[0].registry
    assert [*registry._known, *registry._digests, *registry._called] == []
    assert router.fleet.names.aliases() == set()
    registry.check()
    assert router.fleet.links[0].dispatcher.waiting == 0
    router.check()


async def test_tokens_are_not_in_any_repr(start_shard):
    request = TextRequest("two", "a", Parameters(), token="hf_secret")

    assert "hf_secret" not in repr(request)


async def test_the_shard_is_asked_for_its_own_aliases_by_name(start_shard, start_router):
    shard = await start_shard({"org/two": {"increment": 2}}, aliases={"deux": "org/two"})
    router = await start_router(shard)

    generation = await router.open(TextRequest("deux", (5,), Parameters(max_tokens=1)))
    await generation.aclose()

    assert [reference for reference, _ in shard.resolved] == ["deux"]
    assert [(e.name, e.reference) for e in router.adapters(ALL).entries] == [("deux", "org/two")]


async def test_an_alias_of_an_alias_means_what_that_one_meant(start_shard, start_router):
    shard = await start_shard({"org/two": {"increment": 2}})
    router = await start_router(shard)
    await router.load_adapter("v", "org/two", None)
    await router.load_adapter("w", "v", None)

    generation = await router.open(TextRequest("w", (5,), Parameters(max_tokens=1)))

    assert generation.adapter_digest == router.adapters(ALL).entries[0].facts.digest
    await generation.aclose()


async def test_pages_cover_every_name_once_in_order(start_shard, start_router):
    shard = await start_shard({f"org/{n:02}": {"increment": 1} for n in range(25)})
    router = await start_router(shard)
    await router.load_adapter("b", "org/07", None)

    names, after, sizes = [], "", []
    while True:
        page = await router.list_adapters(10, after)
        names += [entry.name for entry in page.entries]
        sizes.append(len(page.entries))
        if not page.has_more:
            break
        after = names[-1]

    others = [f"org/{n:02}" for n in range(25) if n != 7]
    assert (names, sizes, page.total) == (["b", *others], [10, 10, 5], 25)


async def test_a_page_asks_for_its_own_adapters_only(start_shard, start_router):
    shard = await start_shard({f"org/{n:02}": {"increment": 1} for n in range(25)})
    router = await start_router(shard)
    shard.listings.clear()
    shard.adapters["org/03"].resident = True

    page = await router.list_adapters(2, "org/02")

    assert [(e.name, e.facts.tier) for e in page.entries] == [
        ("org/03", "device"),
        ("org/04", "disk"),
    ]
    (request,) = shard.listings
    assert request.digests == ["digest-of-org/03", "digest-of-org/04"]


async def test_what_came_and_went_on_the_shard_shows_in_the_next_list(start_shard, start_router):
    shard = await start_shard({"kept": {"increment": 2}, "gone": {"increment": 2}})
    router = await start_router(shard)
    shard.adapters["new"] = shard.adapters.pop("gone")
    shard.adapters["new"].digest = "digest-of-new"

    page = await router.list_adapters(ALL)

    assert [entry.name for entry in page.entries] == ["kept", "new"]
    router.check()


async def test_adapters_that_a_shard_knows_are_taken_over_page_by_page(start_shard, start_router):
    shard = await start_shard({f"org/{n:04}": {"increment": 1} for n in range(2001)})

    router = await start_router(shard)

    assert router.adapters(ALL).total == 2001
    behind = [request.after for request in shard.listings]
    assert behind == ["", "digest-of-org/0999", "digest-of-org/1999"]


async def test_an_old_adapter_whose_name_means_another_goes_by_its_digest(
    start_shard, start_router
):
    shard = await start_shard({"two": {"increment": 2}})
    router = await start_router(shard)
    await text(router, "two")
    shard.adapters["two, before"] = shard.adapters["two"]
    shard.adapters["two"] = replace(shard.adapters["two"], digest="new")
    await text(router, "two")

    names = [entry.name for entry in router.adapters(ALL).entries]
    freed = await router.unload_adapter("digest-of-two")

    assert names == ["digest-of-two", "two"]
    assert freed == (1000, 8)
    assert [entry.facts.digest for entry in router.adapters(ALL).entries] == ["new"]


async def test_pinning_and_unloading_ask_for_no_list(start_shard, start_router):
    shard = await start_shard({f"org/{n:02}": {"increment": 1} for n in range(9)})
    router = await start_router(shard)
    shard.listings.clear()

    await router.pin_adapter("org/01", True)
    await router.pin_adapter("org/01", False)
    await router.unload_adapter("org/01")

    assert shard.listings == []


async def test_an_adapter_that_the_shard_forgot_by_itself_is_unloaded_all_the_same(
    start_shard, start_router
):
    shard = await start_shard({"two": {"increment": 2}})
    router = await start_router(shard)
    await router.load_adapter("mine", "two", None)
    shard.unloaded.add("digest-of-two")

    freed = await router.unload_adapter("mine")

    assert freed == (0, 0)
    assert router.adapter("mine") is None


async def test_what_only_the_shard_knows_can_be_unloaded_too(start_shard, start_router):
    shard = await start_shard({"two": {"increment": 2}})
    router = await start_router(shard)
    shard.adapters["three"] = replace(shard.adapters["two"], digest="by-another-router")

    freed = await router.unload_adapter("three")

    assert freed == (1000, 0)
    assert "by-another-router" in shard.unloaded


async def test_what_is_in_memory_goes_by_the_name_it_was_last_called(start_shard, start_router):
    shard = await start_shard({name: {"increment": 2} for name in ("one", "two", "org/three")})
    router = await start_router(shard)
    await router.load_adapter("mine", "org/three", None)
    await text(router, "two")

    held = [name for name, _ in router.fleet.links[0].registry.held("device")]

    assert held == ["two", "mine"]
    router.check()


async def test_a_time_to_live_reaches_the_shard_only_if_it_is_given(start_shard, start_router):
    shard = await start_shard({"two": {"increment": 2}})
    router = await start_router(shard)

    first = await router.load_adapter("mine", "two", None, ttl_s=60.0)
    second = await router.load_adapter("mine", "two", None)
    third = await router.load_adapter("mine", "two", None, ttl_s=0.0)

    assert [entry.facts.ttl_s for entry in (first, second, third)] == [60.0, 60.0, 0.0]


async def test_a_dry_run_tells_what_an_adapter_is_and_leaves_nothing(start_shard, start_router):
    shard = await start_shard({"two": {"increment": 2}})
    router = await start_router(shard)
    before = router.adapters(ALL)

    facts, notes = await router.validate_adapter("two", None, tensors=True)
    with pytest.raises(RequestError) as caught:
        await router.validate_adapter("none", None, tensors=False)

    assert (facts.digest, facts.lanes, notes) == ("digest-of-two", 8, ("its tensors were read",))
    assert caught.value.status.http == 404
    assert router.adapters(ALL) == before


def test_ten_thousand_adapters_take_less_than_10_mb():
    names = Names(None)
    known, listing = Registry(names), Listing(names)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

    gc.collect()
    tracemalloc.start()
    for number in range(10_000):
        described = pb.Adapter(
            digest=f"{number:064x}",
            reference=f"/srv/adapters/tenant-{number:05}/production",
            tier=pb.TIER_DISK,
            rank=16,
            lanes=16,
            bytes=10_000_000 + number,
            targets=224,
            modules=modules,
            last_used=1.7e9 + number,
            load_ms=12.5,
            load_times=pb.LoadTimes(open_ms=1, read_ms=2, cast_ms=3, write_ms=4, wait_ms=5),
        )
        known.remember(described)
    page = listing.page({"shard": known}, 100, "/srv/adapters/tenant-05000")
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (page.total, page.has_more, len(page.entries)) == (10_000, True, 100)
    assert used <= 10_000_000, f"{used / 10_000:.0f} bytes each"
    known.check()

"""Several shards behind one router: who is chosen, who is refused, who comes and goes."""

import asyncio

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from loralane_proto import shard_pb2 as pb
from loralane_router.config import RouterConfig
from loralane_router.errors import RequestError
from loralane_router.fleet.fleet import Fleet
from loralane_router.metrics.counters import Metrics
from loralane_router.requests import Merge, Parameters, TextRequest

from tests.router.conftest import FakeAdapter, FakeShard

TWO = {"two": {"increment": 2}}
RESIDENT = {"two": {"increment": 2, "resident": True}}


def ask(adapter: str = "", max_tokens: int = 2, **fields) -> TextRequest:
    return TextRequest(adapter, "a", Parameters(max_tokens=max_tokens), **fields)


async def text(router, request: TextRequest) -> str:
    generation = await router.open(request)
    return "".join([delta.text async for delta in generation])


async def failure(router, request: TextRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await text(router, request)
    return caught.value


async def until_ready(router, count: int) -> None:
    """Return when so many shards are connected."""
    async with asyncio.timeout(20):
        await router.fleet.until(lambda fleet: len(fleet.ready_links) == count)


class Unresolving(FakeShard):
    """Never answers when it is asked for an adapter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked = asyncio.Event()

    async def ResolveAdapter(self, request, context):
        self.asked.set()
        await asyncio.Event().wait()


def admitted(*shards) -> list[int]:
    return [len(shard.admissions) for shard in shards]


async def test_a_request_goes_where_its_adapter_is_resident(start_shard, start_router):
    cold, warm = await start_shard(TWO), await start_shard(RESIDENT)
    router = await start_router(cold, warm)

    texts = [await text(router, ask("two")) for _ in range(4)]

    assert texts == ["ce"] * 4
    assert admitted(cold, warm) == [0, 4]
    assert {reference for reference, _ in warm.resolved} == {"two"}
    router.check()


async def test_requests_for_the_base_are_shared_out(start_shard, start_router):
    shards = [await start_shard(rows_total=2, manual=True) for _ in range(3)]
    router = await start_router(*shards)

    running = [await router.open(ask()) for _ in range(6)]
    for shard in shards:
        await shard.until(lambda s: len(s.rows) == 2)

    assert admitted(*shards) == [2, 2, 2]
    for generation in running:
        await generation.aclose()
    router.check()


async def test_a_hot_adapter_spreads_when_its_shard_is_full(start_shard, start_router):
    cold = await start_shard(TWO, rows_total=1, manual=True)
    warm = await start_shard(RESIDENT, rows_total=1, manual=True)
    router = await start_router(cold, warm)

    first, second = await router.open(ask("two")), await router.open(ask("two"))
    await cold.until(lambda s: bool(s.rows))

    assert admitted(cold, warm) == [1, 1]
    assert first.adapter_digest == second.adapter_digest == "digest-of-two"
    await first.aclose()
    await second.aclose()


async def test_a_burst_that_arrives_at_once_is_not_sent_to_one_shard(start_shard, start_router):
    shards = [await start_shard(RESIDENT, rows_total=4, manual=True) for _ in range(2)]
    router = await start_router(*shards)

    running = await asyncio.gather(*(router.open(ask("two")) for _ in range(8)))
    for shard in shards:
        await shard.until(lambda s: len(s.rows) == 4)

    assert admitted(*shards) == [4, 4]
    for generation in running:
        await generation.aclose()


async def test_each_shards_own_digest_is_believed(start_shard, start_router):
    one = await start_shard({"two": {"increment": 2, "digest": "of-one"}})
    other = await start_shard({"two": {"increment": 2, "digest": "of-other", "resident": True}})
    router = await start_router(one, other)

    generation = await router.open(ask("two"))
    first = [delta.text async for delta in generation]
    await other.stop()
    await until_ready(router, 1)
    second = await router.open(ask("two"))

    assert (generation.adapter_digest, first) == ("of-other", ["c", "e"])
    assert (second.adapter_digest, [delta.text async for delta in second]) == ("of-one", ["c", "e"])
    router.check()


async def test_a_merge_goes_where_it_was_made(start_shard, start_router):
    shards = [await start_shard(TWO) for _ in range(2)]
    router = await start_router(*shards)
    merge = Merge((("two", 2.0),))

    texts = [await text(router, ask(merge=merge)) for _ in range(4)]

    assert texts == ["ei"] * 4
    assert sorted(admitted(*shards)) == [0, 4]


async def test_a_shard_that_is_gone_is_not_chosen_and_one_that_is_back_is(
    start_shard, start_router
):
    cold, warm = await start_shard(TWO), await start_shard(RESIDENT)
    router = await start_router(cold, warm)

    await warm.stop()
    await until_ready(router, 1)
    without = await text(router, ask("two"))
    alone = admitted(cold, warm)
    await warm.start()
    await until_ready(router, 2)
    for _ in range(4):
        await text(router, ask())

    assert (without, alone) == ("ce", [1, 0])
    assert admitted(cold, warm) == [3, 2]
    router.check()


async def test_a_router_is_ready_as_soon_as_one_shard_is(start_shard, start_router):
    here, gone = await start_shard(), await start_shard()
    await gone.stop()
    router = await start_router(here, gone, wait_for=1)

    assert router.ready
    assert await text(router, ask()) == "bc"
    assert admitted(here, gone) == [1, 0]


async def test_with_no_shard_left_requests_are_told_to_come_back(start_shard, start_router):
    shards = [await start_shard() for _ in range(2)]
    router = await start_router(*shards)
    for shard in shards:
        await shard.stop()
    await until_ready(router, 0)

    error = await failure(router, ask())

    assert (error.status.http, error.retry_after_s) == (503, 1.0)
    assert "no shard is connected" in error.message
    assert not router.ready


async def test_a_shard_that_goes_while_it_resolves_is_replaced_by_another(
    start_shard, start_router
):
    cold = await start_shard(TWO)
    warm = Unresolving({"two": FakeAdapter(2, resident=True)})
    await warm.start()
    router = await start_router(cold, warm)

    opening = asyncio.create_task(text(router, ask("two")))
    await warm.asked.wait()
    await warm.stop()

    assert await opening == "ce"
    assert admitted(cold, warm) == [1, 0]
    router.check()


async def test_what_one_shard_refuses_is_not_asked_of_another(start_shard, start_router):
    shards = [await start_shard({"two": {"increment": 2, "token": "t"}}) for _ in range(2)]
    router = await start_router(*shards)

    unknown = await failure(router, ask("none"))
    forbidden = await failure(router, ask("two", token="wrong"))

    assert (unknown.status.http, forbidden.status.http) == (404, 403)
    assert sum(len(shard.resolved) for shard in shards) == 2


async def test_a_shard_of_another_model_is_refused_once_and_used_when_it_is_replaced(
    start_shard, start_router, caplog
):
    ours, other = await start_shard(), await start_shard(max_model_len=32)
    router = await start_router(ours, other, wait_for=1)
    if router.fleet.ready_links[0].address == other.address:  # it was the first to connect
        ours, other = other, ours
    (refused,) = (link for link in router.fleet.links if link.address == other.address)
    await router.fleet.until(lambda fleet: "another model" in refused.connection.problem)

    for _ in range(3):
        assert await text(router, ask()) == "bc"

    assert admitted(ours, other) == [3, 0]
    lines = [record.getMessage() for record in caplog.records if "another model" in record.message]
    assert len(lines) == 1
    assert other.address in lines[0]
    assert f"max_model_len {other.max_model_len} is not {ours.max_model_len}" in lines[0]

    other.max_model_len = ours.max_model_len
    await until_ready(router, 2)


async def test_when_all_shards_have_left_the_next_says_what_the_model_is(start_shard, start_router):
    shards = [await start_shard() for _ in range(2)]
    router = await start_router(*shards)
    for shard in shards:
        await shard.stop()
    await until_ready(router, 0)

    for shard in shards:
        shard.max_model_len = 32
        await shard.start()
    await until_ready(router, 2)

    assert router.info.max_model_len == 32


async def test_an_alias_that_one_shard_has_leads_to_that_shard(start_shard, start_router):
    plain = await start_shard(TWO)
    named = await start_shard(TWO, aliases={"deux": "two"})
    router = await start_router(plain, named)

    texts = [await text(router, ask("deux")) for _ in range(3)]
    await named.stop()
    await until_ready(router, 1)
    error = await failure(router, ask("deux"))

    assert texts == ["ce"] * 3
    assert admitted(plain, named) == [0, 3]
    assert error.status.http == 503


class Dns:
    """Answers with what the test put there; an OSError is raised."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, name: str, port: int) -> list[str]:
        self.asked.append((name, port))
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


@pytest.fixture
async def start_fleet():
    fleets: list[Fleet] = []

    async def start(*shards: str, dns: Dns) -> Fleet:
        fleet = Fleet(RouterConfig(shards=shards), Metrics(), dns)
        fleets.append(fleet)
        await fleet.start()
        return fleet

    yield start
    for fleet in fleets:
        await fleet.close()


async def ready_are(fleet: Fleet, *shards) -> None:
    wanted = {shard.address for shard in shards}
    async with asyncio.timeout(20):
        await fleet.until(lambda f: {link.address for link in f.ready_links} == wanted)


async def test_the_addresses_of_a_name_are_shards(start_shard, start_fleet):
    shards = [await start_shard() for _ in range(2)]
    dns = Dns([shard.address for shard in shards])

    fleet = await start_fleet("dns:shards.internal:8101", dns=dns)
    await ready_are(fleet, *shards)

    assert dns.asked[0] == ("shards.internal", 8101)
    assert fleet.several


async def test_a_new_address_is_a_new_shard_and_a_gone_one_serves_while_it_lives(
    start_shard, start_fleet
):
    old, new = await start_shard(), await start_shard()
    dns = Dns([old.address])
    fleet = await start_fleet("dns:shards:1", dns=dns)
    await ready_are(fleet, old)

    dns.answer = [new.address]
    await fleet.look()
    await ready_are(fleet, old, new)
    await old.stop()
    await ready_are(fleet, new)
    await fleet.look()

    assert [link.address for link in fleet.links] == [new.address]
    fleet.check()


async def test_a_name_that_cannot_be_looked_up_keeps_its_shards(start_shard, start_fleet, caplog):
    shard = await start_shard()
    dns = Dns([shard.address])
    fleet = await start_fleet("dns:shards:1", dns=dns)
    await ready_are(fleet, shard)

    dns.answer = OSError("no such name")
    await fleet.look()
    await fleet.look()

    assert [link.address for link in fleet.ready_links] == [shard.address]
    failures = [r for r in caplog.records if "cannot be looked up" in r.getMessage()]
    assert len(failures) == 1


async def test_gauges_tell_shards_apart_by_their_addresses(start_shard, start_router):
    up, down = await start_shard(rows_total=3), await start_shard()
    router = await start_router(up, down)
    await down.stop()
    await until_ready(router, 1)

    def value(name: str, shard) -> float | None:
        labels = {"shard": shard.address}
        return router.metrics.registry.get_sample_value(f"loralane_{name}", labels)

    assert (value("shard_up", up), value("shard_up", down)) == (1, 0)
    assert (value("rows", up), value("rows", down)) == (3, 0)
    assert (value("requests_waiting", up), value("requests_running", up)) == (0, 0)
    assert router.capacity["rows_total"] == 3


async def test_a_pin_that_a_shard_refuses_is_the_callers_error(start_shard, start_router):
    broken = pb.Error(kind=pb.ERROR_KIND_CORRUPT, message="NaN")
    shards = [await start_shard({"two": {"increment": 2, "broken": broken}}) for _ in range(2)]
    router = await start_router(*shards)

    with pytest.raises(RequestError) as caught:
        await router.pin_adapter("two", True)

    assert caught.value.status.http == 424


class Announcing(FakeShard):
    """Says how it is, as real shards do."""

    def add_services(self, server) -> None:
        super().add_services(server)
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)


async def test_a_shard_that_is_about_to_go_finishes_what_it_has_and_gets_nothing_new(
    start_shard, start_router
):
    leaving, other = Announcing(manual=True), await start_shard(manual=True, rows_total=8)
    await leaving.start()
    await leaving.health.set("", health_pb2.HealthCheckResponse.SERVING)
    router = await start_router(leaving, other)
    running = [await router.open(ask()) for _ in range(2)]
    await leaving.until(lambda s: bool(s.rows))

    await leaving.health.enter_graceful_shutdown()
    await until_ready(router, 1)
    later = [await router.open(ask()) for _ in range(3)]
    await other.until(lambda s: len(s.rows) == 4)
    for shard in (leaving, other):
        shard.step(2)

    for generation in (*running, *later):
        assert "".join([delta.text async for delta in generation]) == "bc"
    assert admitted(leaving, other) == [1, 4]
    await router.close()
    await leaving.stop()


async def test_a_shard_that_is_about_to_go_is_not_let_go_with_requests_on_it(start_fleet):
    leaving = Announcing()
    await leaving.start()
    dns = Dns([leaving.address])
    fleet = await start_fleet("dns:shards:1", dns=dns)
    await ready_are(fleet, leaving)

    await leaving.health.enter_graceful_shutdown()
    await ready_are(fleet)
    dns.answer = []
    await fleet.look()
    kept = [link.address for link in fleet.links if link.connected]
    (link,) = fleet.links
    await leaving.stop()
    await fleet.until(lambda f: not link.connected)
    await fleet.look()

    assert kept == [leaving.address]
    assert fleet.links == ()


class Relay:
    """Passes bytes on to a shard, until the line falls silent: nothing is closed then."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._passing = asyncio.Event()
        self._passing.set()
        self._ways: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for way in self._ways:
            way.cancel()
        await asyncio.gather(*self._ways, return_exceptions=True)
        await self._server.wait_closed()

    def silence(self) -> None:
        self._passing.clear()

    def speak(self) -> None:
        self._passing.set()

    async def _relay(self, reader, writer) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [self._pass(reader, other_writer), self._pass(other_reader, writer)]
        self._ways |= {asyncio.create_task(way) for way in ways}

    async def _pass(self, reader, writer) -> None:
        try:
            while data := await reader.read(65536):
                await self._passing.wait()
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()


async def test_a_silent_shard_is_out_of_rotation_until_it_speaks_again(start_shard, start_router):
    silent, other = await start_shard(), await start_shard()
    relay = Relay(silent.port)
    await relay.start()
    router = await start_router(relay, other)

    relay.silence()
    await until_ready(router, 1)
    texts = [await text(router, ask()) for _ in range(2)]
    relay.speak()
    await until_ready(router, 2)

    assert texts == ["bc", "bc"]
    assert admitted(silent, other) == [0, 2]
    await router.close()
    await relay.stop()

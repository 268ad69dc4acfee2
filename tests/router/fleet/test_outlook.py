"""What the choice between shards is told of one of them."""

from dataclasses import replace

from loralane_proto import shard_pb2 as pb
from loralane_router.adapters.names import Names
from loralane_router.adapters.registry import Registry
from loralane_router.fleet.load import Load, load_of
from loralane_router.fleet.outlook import Outlook
from loralane_router.fleet.routing import Need, ShardView
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.ledger import Ledger
from loralane_router.queueing.queues import Queues

VIEW = ShardView(rows_total=4, rows_free=3, waiting=1, queued_tokens=10)


class Busy:
    """A dispatcher that is busy in the way that it is told."""

    def __init__(self, *wanted: str) -> None:
        self.now = Load(VIEW, frozenset(wanted))

    def load(self) -> Load:
        return self.now


def outlook(*wanted: str, **tiers: "pb.Tier.ValueType") -> Outlook:
    """Return that of a shard whose adapters, named as their digests, are in these tiers."""
    registry = Registry(Names(None))
    for digest, tier in tiers.items():
        registry.remember(pb.Adapter(digest=digest, reference=digest, lanes=8, tier=tier))
    return Outlook(registry, Busy(*wanted))


def need(digest: str = "", tokens: int = 5) -> Need:
    return Need(tokens, lanes=8, digest=digest)


def test_the_tier_is_the_one_that_the_shard_reported():
    shard = outlook(a=pb.TIER_DEVICE, b=pb.TIER_HOST, c=pb.TIER_DISK)

    tiers = [shard.view(name, need()).tier for name in "abcd"]

    assert tiers == ["device", "host", "disk", "remote"]


def test_an_adapter_of_another_name_is_known_by_its_digest():
    shard = outlook(a=pb.TIER_DEVICE)

    assert shard.view("alias", need("a")).tier == "device"
    assert shard.view("alias", need()).tier == "remote"


def test_the_base_needs_no_loading():
    assert outlook().view("", Need(5)).tier == "device"


def test_an_adapter_that_requests_wait_for_is_being_loaded():
    shard = outlook("a", "b", a=pb.TIER_DEVICE, b=pb.TIER_DISK)

    assert shard.view("a", need()).tier == "device"
    assert shard.view("b", need()).tier == "loading"
    assert shard.view("b", need()).loads == 1


def test_a_request_that_is_being_resolved_counts_as_one_that_waits():
    shard = outlook(a=pb.TIER_DISK)

    with shard.expecting("a", need(tokens=7)), shard.expecting("a", need(tokens=8)):
        during = shard.view("a", need())
        shard.check()
    after = shard.view("a", need())
    shard.check()

    assert (during.waiting, during.queued_tokens) == (3, 25)
    assert (during.tier, during.loads) == ("loading", 1)
    assert after == replace(VIEW, tier="disk")


def test_what_is_resident_is_not_counted_as_a_load_while_it_is_resolved():
    shard = outlook("b", a=pb.TIER_DEVICE, b=pb.TIER_HOST)

    with shard.expecting("a", need()), shard.expecting("b", need()), shard.expecting("", Need(1)):
        during = shard.view("a", need())

    assert (during.waiting, during.loads, during.tier) == (4, 1, "device")


def test_an_adapter_that_came_to_the_device_is_no_load_any_more():
    registry = Registry(Names(None))
    registry.remember(pb.Adapter(digest="a", reference="a", lanes=8, tier=pb.TIER_DISK))
    busy = Busy("a")
    shard = Outlook(registry, busy)
    before = shard.view("a", need()).loads

    registry.observe([pb.Residency(digest="a", tier=pb.TIER_DEVICE)])
    busy.now = Load(VIEW, frozenset({"a"}))  # a step came, so the load is another one

    assert (before, shard.view("a", need()).loads) == (1, 0)


def test_the_load_is_what_was_reported_and_what_was_sent_since():
    capacity = pb.Capacity(
        rows_total=4,
        rows_free=3,
        pages_total=64,
        pages_free=60,
        page_tokens=4,
        lanes_total=32,
        lanes_free=24,
        lanes_in_use=8,
        pending_tokens=100,
        step_ms=2.5,
        token_ms=0.5,
    )
    ledger, queues = Ledger(capacity), Queues()
    ledger.take(Ask(1, "sent", 2, 8, 0.0, tokens=7), now=0.0)
    queues.append(Ask(2, "waits", 2, 16, 0.0, tokens=20))
    queues.append(Ask(3, "sent", 2, 8, 0.0, tokens=30))
    queues.append(Ask(4, "", 2, 0, 0.0, tokens=1))

    load = load_of(queues, ledger)

    view = load.view
    assert (view.rows_total, view.rows_free, view.waiting) == (4, 2, 3)
    assert (view.pending_tokens, view.queued_tokens) == (107, 51)
    assert (view.step_ms, view.token_ms) == (2.5, 0.5)
    assert (view.lanes_total, view.lanes_in_use) == (32, 8 + 8 + 16)
    assert load.wanted >= {"sent", "waits"}

"""Metrics whose labels come and go."""

from collections.abc import Mapping

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.adapters.facts import AdapterFacts
from loralane_router.metrics.exposition import Exposition, most_resident
from loralane_router.metrics.snapshots import ShardState, Snapshot, Work
from loralane_router.metrics.usage import AdapterUsage
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

IDLE = Work(0, 0, frozenset(), frozenset())
CAPACITY = pb.Capacity(pages_total=200, pages_free=150, page_tokens=16, lanes_total=64)


def shard(**changes) -> ShardState:
    values = {
        "address": "a:1",
        "up": True,
        "capacity": CAPACITY,
        "work": IDLE,
        "tiers": {},
        "on_device": (),
        "on_host": (),
    }
    return ShardState(**(values | changes))


def snapshot(*shards: ShardState, **changes) -> Snapshot:
    values = {
        "model_name": "org/base",
        "shards": shards or [shard()],
        "several": len(shards) > 1,
        "usage": AdapterUsage().rows(),
        "now": 1_700_000_000.5,
    }
    return Snapshot(**(values | changes))


def page(shown: Snapshot) -> str:
    registry = CollectorRegistry()
    registry.register(Exposition(lambda: shown))
    return generate_latest(registry).decode()


def samples(shown: Snapshot, name: str) -> list[tuple[Mapping[str, str], float]]:
    families = text_string_to_metric_families(page(shown))
    found = (sample for family in families for sample in family.samples if sample.name == name)
    return [(sample.labels, sample.value) for sample in found]


def test_adapters_at_work_are_one_series_whose_value_is_the_time():
    work = Work(3, 2, frozenset({"b", "a"}), frozenset({"a", "c"}))

    found = samples(snapshot(shard(work=work)), "vllm:lora_requests_info")

    assert found == [
        (
            {"max_lora": "8", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"},
            1_700_000_000.5,
        )
    ]


def test_adapters_in_memory_have_their_level_and_pin():
    on_host = [("on-host", AdapterFacts("d1", tier="host", lanes=8))]
    on_device = [("on-device", AdapterFacts("d2", tier="device", lanes=16, pinned=True))]

    shown = snapshot(shard(on_host=on_host, on_device=on_device))

    assert samples(shown, "vllm:lora_adapter_loaded") == [
        ({"adapter_name": "on-device", "level": "gpu", "pinned": "true"}, 1),
        ({"adapter_name": "on-host", "level": "cpu", "pinned": "false"}, 1),
    ]
    base = {"model_name": "org/base"}
    assert samples(shown, "vllm:num_gpu_loaded_lora_adapters") == [(base, 1)]
    assert samples(shown, "vllm:max_gpu_lora_adapters") == [(base, 4)]


def test_what_is_pinned_on_one_shard_is_pinned():
    here = shard(on_device=[("x", AdapterFacts("d", tier="device"))])
    there = shard(on_device=[("x", AdapterFacts("d", tier="device", pinned=True))])

    found = samples(snapshot(here, there), "vllm:lora_adapter_loaded")

    assert found == [({"adapter_name": "x", "level": "gpu", "pinned": "true"}, 1)]


def test_a_name_that_two_adapters_had_is_the_latest_ones():
    on_device = [("x", AdapterFacts("new", tier="device"))]
    on_host = [("x", AdapterFacts("old", tier="host"))]

    found = samples(
        snapshot(shard(on_device=on_device, on_host=on_host)), "vllm:lora_adapter_loaded"
    )

    assert [labels["level"] for labels, _ in found] == ["gpu"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_requests_running", 3), ("num_requests_waiting", 2), ("kv_cache_usage_perc", 0.25)],
)
def test_what_endpoint_pickers_read_has_the_models_name(name, value):
    found = samples(snapshot(shard(work=Work(3, 2, frozenset(), frozenset()))), f"vllm:{name}")

    assert found == [({"model_name": "org/base"}, value)]


def test_without_a_shard_only_what_the_router_counted_is_written():
    usage = AdapterUsage()
    usage.begin("d" * 64, "mine")

    shown = snapshot(shard(capacity=None, up=False), model_name=None, usage=usage.rows())

    assert "vllm:" not in page(shown)
    assert samples(shown, "loralane_adapter_requests_total") == [
        ({"adapter": "mine", "digest": "d" * 16}, 1),
        ({"adapter": "other", "digest": ""}, 0),
    ]


def test_tiers_are_counted_zeros_too():
    found = samples(snapshot(shard(tiers={"device": 2, "disk": 1})), "loralane_adapters")

    assert {labels["tier"]: value for labels, value in found} == {
        "remote": 0,
        "disk": 1,
        "host": 0,
        "device": 2,
    }


def test_the_page_stays_small_whatever_the_names_are_and_however_many():
    long = "n" * 1000
    usage = AdapterUsage()
    for number in range(10_000):
        usage.begin(f"{number:064}", f"{number}{long}")
    held = [(f"{n}{long}", AdapterFacts(f"{n:064}", tier="device")) for n in range(10_000)]
    crowd = frozenset(f"{number}{long}" for number in range(1024))

    work = Work(32, 992, crowd, frozenset(f"w{name}" for name in crowd))
    text = page(snapshot(shard(on_device=held, work=work), usage=usage.rows()))

    assert len(text) <= 200_000
    assert text.count("vllm:lora_adapter_loaded{") > 10


def test_a_name_with_quotes_breaks_no_line():
    usage = AdapterUsage()
    usage.begin("d", 'a"b\\c')

    found = samples(snapshot(usage=usage.rows()), "loralane_adapter_requests_total")

    assert found[0][0]["adapter"] == 'a"b\\c'


@pytest.mark.parametrize(
    ("lanes", "resident", "most"), [(64, [], 8), (64, [16], 4), (64, [8, 16, 24], 4), (0, [], 0)]
)
def test_how_many_fit_follows_the_mean_size_of_those_there(lanes, resident, most):
    facts = [AdapterFacts(str(i), lanes=size) for i, size in enumerate(resident)]

    assert most_resident(lanes, facts) == most


def test_shards_are_told_apart_by_their_addresses_and_summed_for_endpoint_pickers():
    facts = AdapterFacts("d", tier="device", lanes=16)
    one = shard(address="a:1", work=Work(1, 2, frozenset({"x"}), frozenset({"y"})))
    other = shard(
        address="b:2",
        work=Work(3, 4, frozenset({"y"}), frozenset()),
        capacity=pb.Capacity(pages_total=100, pages_free=0, page_tokens=16, lanes_total=32),
        tiers={"device": 1},
        on_device=[("x", facts)],
    )
    down = shard(address="c:3", up=False, capacity=None)

    shown = snapshot(one, other, down)

    up = samples(shown, "loralane_shard_up")
    assert up == [({"shard": "a:1"}, 1), ({"shard": "b:2"}, 1), ({"shard": "c:3"}, 0)]
    assert [value for _, value in samples(shown, "loralane_requests_waiting")] == [2, 4, 0]
    assert [value for _, value in samples(shown, "loralane_pages")] == [200, 100, 0]
    assert ({"tier": "device", "shard": "b:2"}, 1) in samples(shown, "loralane_adapters")
    assert [value for _, value in samples(shown, "vllm:num_requests_running")] == [4]
    assert [value for _, value in samples(shown, "vllm:kv_cache_usage_perc")] == [0.5]
    ((labels, _),) = samples(shown, "vllm:lora_requests_info")
    assert (labels["running_lora_adapters"], labels["waiting_lora_adapters"]) == ("x,y", "")
    assert [value for _, value in samples(shown, "vllm:max_gpu_lora_adapters")] == [6]


def test_one_shard_has_no_label():
    shown = snapshot(shard(work=Work(1, 0, frozenset(), frozenset())))

    assert samples(shown, "loralane_shard_up") == [({}, 1)]
    assert samples(shown, "loralane_requests_running") == [({}, 1)]


def test_a_shard_says_how_many_graphs_it_declared_and_compiled():
    there = shard(capacity=pb.Capacity(graphs_declared=40, graphs_compiled=41))

    shown = snapshot(there)

    assert samples(shown, "loralane_graphs_declared") == [({}, 40)]
    assert samples(shown, "loralane_graphs_compiled_total") == [({}, 41)]

"""Metrics of shards and adapters, which come and go: written anew from a snapshot at every scrape.

So there is never a stale series, and the page stays small whatever is registered: adapters with a
row of their own are bounded (`usage`), and lists of names end where `_NAMES_BYTES` is reached.

The `vllm:` names are those that endpoint pickers of llm-d and of the Kubernetes Gateway API read:
requests waiting and running, KV cache, `lora_requests_info` (adapters at work) and
`lora_adapter_loaded` (adapters in memory, `level` gpu = its lanes are on the device).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Final

from loralane_proto import shard_pb2 as pb
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from loralane_router.adapters.facts import TIER_NAMES, AdapterFacts
from loralane_router.metrics.snapshots import ShardState, Snapshot, Work, joint, summed
from loralane_router.metrics.usage import UsageRow

#: Bytes of adapter names in one list.
_NAMES_BYTES: Final = 16_000
#: Bytes around a name in a series of its own.
_SERIES_BYTES: Final = 64
#: A longer name loses its middle in a label that is for people.
_LABEL_CHARACTERS: Final = 96
#: Lanes of the smallest adapter.
_LANE_PAGE: Final = 8
_LEVELS: Final = {"device": "gpu", "host": "cpu"}


class Exposition(Collector):
    """Writes the metrics of what `snapshot` returns."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        snapshot = self._snapshot()
        yield from _shards(snapshot)
        yield _tiers(snapshot)
        yield from _usage(snapshot.usage)
        live = [shard for shard in snapshot.shards if shard.capacity is not None]
        if live and snapshot.model_name is not None:
            work = joint(shard.work for shard in live)
            yield from _serving(snapshot.model_name, live, work)
            yield from _adapters(snapshot.model_name, live, work, snapshot.now)


#: (name, what it is, how it is found) of the gauges of a shard; 0 while it is not connected.
_SHARD_GAUGES: Final[Sequence[tuple[str, str, Callable[[pb.Capacity], float]]]] = (
    ("rows", "Rows of the shard", lambda c: c.rows_total),
    ("rows_free", "Free rows of the shard", lambda c: c.rows_free),
    ("pages", "KV pages of the shard", lambda c: c.pages_total),
    ("pages_free", "KV pages of the shard that no row owns", lambda c: c.pages_free),
    ("pages_cached", "KV pages that only the prefix cache keeps", lambda c: c.pages_cached),
    ("lanes", "Lanes of the pool", lambda c: c.lanes_total),
    ("lanes_free", "Lanes owned by no adapter", lambda c: c.lanes_free),
    (
        "lanes_in_use",
        "Lanes of adapters that rows use or that are pinned",
        lambda c: c.lanes_in_use,
    ),
    (
        "pending_tokens",
        "Tokens that rows still have to compute before each can be sampled",
        lambda c: c.pending_tokens,
    ),
    ("graphs_declared", "Graphs that steps may need", lambda c: c.graphs_declared),
)


def _shards(snapshot: Snapshot) -> Iterator[Metric]:
    """What is true of each shard; its address is a label where there may be several."""
    labels = ["shard"] if snapshot.several else []

    def family(
        name: str,
        text: str,
        value: Callable[[ShardState], float],
        kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
    ) -> Metric:
        made = kind(f"loralane_{name}", text, labels=labels)
        for shard in snapshot.shards:
            made.add_metric([shard.address] if labels else [], value(shard))
        return made

    yield family("shard_up", "1 while the shard answers", lambda shard: shard.up)
    yield family("requests_waiting", "Requests in queues", lambda shard: shard.work.waiting)
    yield family("requests_running", "Requests on the shard", lambda shard: shard.work.running)
    for name, text, of in _SHARD_GAUGES:
        yield family(name, text, partial(_of_capacity, of))
    text = "Graphs compiled; more than declared = a step had to wait for one"
    compiled = partial(_of_capacity, lambda c: c.graphs_compiled)
    yield family("graphs_compiled", text, compiled, CounterMetricFamily)


def _of_capacity(of: Callable[[pb.Capacity], float], shard: ShardState) -> float:
    return 0 if shard.capacity is None else of(shard.capacity)


def most_resident(lanes: int, resident: Sequence[AdapterFacts]) -> int:
    """Return how many adapters fit into so many lanes, of the mean size of those there."""
    taken = sum(facts.lanes for facts in resident)
    return lanes * len(resident) // taken if taken else lanes // _LANE_PAGE


def _tiers(snapshot: Snapshot) -> Metric:
    text = "Adapters that the shard was last known to know, by tier"
    labels = ["tier", "shard"] if snapshot.several else ["tier"]
    family = GaugeMetricFamily("loralane_adapters", text, labels=labels)
    for shard in snapshot.shards:
        for name in TIER_NAMES.values():
            values = [name, shard.address] if snapshot.several else [name]
            family.add_metric(values, shard.tiers.get(name, 0))
    return family


def _usage(rows: Sequence[UsageRow]) -> Iterator[Metric]:
    """The sums by adapter. A summary without quantiles: buckets would be too many series."""
    labels = ["adapter", "digest"]
    of = [([_short(row.adapter), row.digest[:16]], row.usage) for row in rows]
    counters = (
        ("requests", "Requests accepted", "requests"),
        ("prompt_tokens", "Prompt tokens of requests that had a first token", "prompt_tokens"),
        ("generated_tokens", "Tokens generated", "generated_tokens"),
        ("cold_starts", "Requests that waited on the shard for the adapter", "cold_starts"),
        ("cold_wait_seconds", "How long they waited, in all", "cold_s"),
    )
    for name, text, field in counters:
        counter = CounterMetricFamily(f"loralane_adapter_{name}", text, labels=labels)
        for values, usage in of:
            counter.add_metric(values, getattr(usage, field))
        yield counter
    text = "From acceptance to the first token, by adapter"
    first = SummaryMetricFamily("loralane_adapter_time_to_first_token_seconds", text, labels=labels)
    for values, usage in of:
        first.add_metric(values, usage.first_tokens, usage.first_token_s)
    yield first


def _serving(model_name: str, live: Sequence[ShardState], work: Work) -> Iterator[Metric]:
    capacities = [shard.capacity for shard in live if shard.capacity is not None]
    total = summed(capacities)
    pages, used = total["pages_total"], total["pages_total"] - total["pages_free"]
    gauges = (
        ("num_requests_running", "Requests on the shard", work.running),
        ("num_requests_waiting", "Requests in queues", work.waiting),
        ("kv_cache_usage_perc", "KV pages in use; 1 = all", used / max(1, pages)),
    )
    for name, text, value in gauges:
        yield _gauge(f"vllm:{name}", text, {"model_name": model_name}, value)
    labels = {"block_size": capacities[0].page_tokens, "num_gpu_blocks": pages}
    yield _gauge("vllm:cache_config_info", "KV pages and their tokens", labels, 1)


def _adapters(
    model_name: str, live: Sequence[ShardState], work: Work, now: float
) -> Iterator[Metric]:
    """An adapter that several shards hold has room taken, and counts, on each of them."""
    resident = [facts for shard in live for _, facts in shard.on_device]
    lanes = sum(shard.capacity.lanes_total for shard in live if shard.capacity is not None)
    most = most_resident(lanes, resident)
    labels = {
        "max_lora": most,
        "running_lora_adapters": _joined(work.running_adapters),
        # Whose requests run is not waiting: pickers add the two up.
        "waiting_lora_adapters": _joined(work.waiting_adapters - work.running_adapters),
    }
    yield _gauge("vllm:lora_requests_info", "Adapters at work; unix seconds", labels, now)
    model = {"model_name": model_name}
    yield _gauge(
        "vllm:num_gpu_loaded_lora_adapters", "Adapters on the device", model, len(resident)
    )
    yield _gauge("vllm:max_gpu_lora_adapters", "Adapters that fit there", model, most)
    on_device = chain.from_iterable(shard.on_device for shard in live)
    pinned = {facts.digest for facts in resident if facts.pinned}
    yield _loaded(chain(on_device, *(shard.on_host for shard in live)), pinned)


def _loaded(held: Iterable[tuple[str, AdapterFacts]], pinned: Set[str]) -> Metric:
    """One series a name: where two adapters had it, the first is meant.

    `pinned`: the digests of those that are pinned on any shard.
    """
    text = "Adapters in memory; gpu = on the device"
    family = GaugeMetricFamily(
        "vllm:lora_adapter_loaded", text, labels=["adapter_name", "level", "pinned"]
    )
    left, written = _NAMES_BYTES, set[str]()
    for name, facts in held:
        left -= len(name.encode()) + _SERIES_BYTES
        if left < 0:
            break
        if name not in written:
            family.add_metric([name, _LEVELS[facts.tier], str(facts.digest in pinned).lower()], 1)
            written.add(name)
    return family


def _gauge(name: str, text: str, labels: Mapping[str, object], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric([str(value) for value in labels.values()], value)
    return family


def _joined(names: frozenset[str]) -> str:
    """Return names, in order, as far as they fit."""
    left, found = _NAMES_BYTES, []
    for name in sorted(names):
        left -= len(name.encode()) + 1
        if left < 0:
            break
        found.append(name)
    return ",".join(found)


def _short(name: str) -> str:
    half = _LABEL_CHARACTERS // 2
    return name if len(name) <= _LABEL_CHARACTERS else f"{name[:half]}...{name[-half:]}"

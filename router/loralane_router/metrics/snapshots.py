"""What metrics say, at one moment: of each shard, and of several together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import AdapterFacts
from loralane_router.metrics.usage import UsageRow

#: Fields of a capacity that several shards have together.
_SUMMED: Final = (
    "rows_total",
    "rows_free",
    "pages_total",
    "pages_free",
    "lanes_total",
    "lanes_free",
    "lanes_in_use",
)


@dataclass(frozen=True, slots=True)
class Work:
    """Requests under way, and the names of the adapters that they asked for."""

    running: int
    waiting: int
    running_adapters: frozenset[str]
    waiting_adapters: frozenset[str]


@dataclass(frozen=True, slots=True)
class ShardState:
    """One shard at one moment."""

    address: str
    up: bool
    #: None while it is not connected.
    capacity: pb.Capacity | None
    work: Work
    #: Adapters that it knows, or was last known to know, in each tier.
    tiers: Mapping[str, int]
    #: (name, facts) of resident adapters, and of those in host memory: the latest first.
    on_device: Sequence[tuple[str, AdapterFacts]]
    on_host: Iterable[tuple[str, AdapterFacts]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is written."""

    #: None while no shard is connected.
    model_name: str | None
    shards: Sequence[ShardState]
    #: Whether the shards are told apart by their addresses: there may be more than one.
    several: bool
    usage: Sequence[UsageRow]
    #: Unix seconds.
    now: float


def summed(capacities: Iterable[pb.Capacity]) -> dict[str, int]:
    """Return rows, pages and lanes of several shards together, by the fields' names."""
    total = dict.fromkeys(_SUMMED, 0)
    for capacity in capacities:
        for name in _SUMMED:
            total[name] += getattr(capacity, name)
    return total


def joint(works: Iterable[Work]) -> Work:
    """Return what is under way on several shards together."""
    all_work = list(works)
    return Work(
        sum(work.running for work in all_work),
        sum(work.waiting for work in all_work),
        frozenset().union(*(work.running_adapters for work in all_work)),
        frozenset().union(*(work.waiting_adapters for work in all_work)),
    )

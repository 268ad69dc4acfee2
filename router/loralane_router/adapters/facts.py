"""What is known of one adapter: small frozen records, since a router may know many thousands.

Texts and tuples that many adapters have in common are one object; a router that knows 10,000
adapters spends less than 1 kB on each.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from loralane_proto import shard_pb2 as pb

#: How tiers are called outside the wire.
TIER_NAMES: "Final[dict[pb.Tier.ValueType, str]]" = {
    pb.TIER_REMOTE: "remote",
    pb.TIER_DISK: "disk",
    pb.TIER_HOST: "host",
    pb.TIER_DEVICE: "device",
}


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """What a load was spent on: milliseconds, summed over layers; reading and writing overlap."""

    open_ms: float
    read_ms: float
    cast_ms: float
    write_ms: float
    wait_ms: float


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """One adapter as a shard last described it. Units: bytes, milliseconds, unix seconds."""

    #: "" for an alias that nobody used yet, and for the base.
    digest: str = ""
    #: What it was first named on the shard.
    reference: str = ""
    #: "remote", "disk", "host" or "device".
    tier: str = "remote"
    rank: int = 0
    lanes: int = 0
    bytes: int = 0
    #: Of it in the shard's host cache.
    host_bytes: int = 0
    #: Number of (layer, module) that it changes.
    targets: int = 0
    modules: tuple[str, ...] = ()
    #: Running rows that use it.
    rows: int = 0
    pinned: bool = False
    #: Seconds without use after which it is forgotten; 0 = never.
    ttl_s: float = 0.0
    #: 0 = never used.
    last_used: float = 0.0
    #: 0 = never loaded.
    load_ms: float = 0.0
    load_times: LoadTimes | None = None

    @property
    def is_cold(self) -> bool:
        """Whether its tensors must be read before it can serve."""
        return self.tier in ("remote", "disk")


#: The base model: no adapter at all.
BASE: Final = AdapterFacts()


def facts_of(adapter: pb.Adapter) -> AdapterFacts:
    """Return the record of what a shard said. Zeros are one object, as are equal module lists."""
    return AdapterFacts(
        digest=adapter.digest,
        reference=adapter.reference,
        tier=TIER_NAMES.get(adapter.tier, "remote"),
        rank=adapter.rank,
        lanes=adapter.lanes,
        bytes=adapter.bytes,
        host_bytes=adapter.host_bytes,
        targets=adapter.targets,
        modules=_shared(tuple(adapter.modules)),
        rows=adapter.rows,
        pinned=adapter.pinned,
        ttl_s=adapter.ttl_s or 0.0,
        last_used=adapter.last_used or 0.0,
        load_ms=adapter.load_ms or 0.0,
        load_times=_load_times(adapter.load_times) if adapter.HasField("load_times") else None,
    )


def _load_times(times: pb.LoadTimes) -> LoadTimes:
    return LoadTimes(times.open_ms, times.read_ms, times.cast_ms, times.write_ms, times.wait_ms)


@lru_cache(maxsize=1024)
def _shared(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first tuple that was equal to this one."""
    return modules


@dataclass(frozen=True, slots=True)
class AtShard:
    """An adapter on one of several shards, which may know other bytes by the same name."""

    #: Its address.
    shard: str
    facts: AdapterFacts


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One adapter under one name."""

    #: What requests call it: an alias, a reference, or its digest where its reference means
    #: another adapter by now.
    name: str
    #: What the name stands for.
    reference: str
    #: As the shard describes it that holds it best; rows and bytes on hosts are those of all.
    facts: AdapterFacts
    #: Where it is known, if there are several shards; on each, first what the name means there.
    shards: tuple[AtShard, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the adapters, in the order of their names."""

    entries: tuple[AdapterEntry, ...]
    #: Names in all.
    total: int
    has_more: bool

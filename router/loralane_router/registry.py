"""What users call adapters, and what the shard was last seen to know about them.

A name is resolved by the shard for every request: it checks this caller's token for this adapter
and notices files that were replaced. So nothing that decides a request is cached here.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.errors import RequestError, invalid
from loralane_router.metrics import TIER_NAMES
from loralane_router.shards import ShardClient

#: More adapters than this are not remembered, the longest known goes first.
_MOST_KNOWN: Final = 10_000
_MOST_NAME_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One adapter as users see it. Units: bytes, milliseconds, unix seconds."""

    #: The alias, or the reference where it has none.
    name: str
    reference: str
    #: "" for an alias that nobody used yet.
    digest: str
    #: "remote", "disk", "host" or "device".
    tier: str
    rank: int
    lanes: int
    bytes: int
    #: Number of (layer, module) that it changes.
    targets: int
    modules: tuple[str, ...]
    #: Running rows that use it.
    rows: int
    pinned: bool
    load_ms: float
    last_used: float


class Registry:
    """Aliases and known adapters. Owned by the router, on its event loop."""

    def __init__(self, served_model_name: str | None) -> None:
        self._served_model_name = served_model_name
        self._base_names: frozenset[str] = frozenset({""})
        #: Given to the shard with --adapter; replaced on every connection.
        self._configured: dict[str, str] = {}
        #: Given through `load`; these go before the configured ones.
        self._loaded: dict[str, str] = {}
        #: By digest.
        self._known: dict[str, pb.Adapter] = {}
        #: The digest that a name had when it was last resolved, by `_sent`; the latest last.
        self._digests: dict[str, str] = {}

    def connect(self, info: pb.InfoReply) -> None:
        """Take over a shard's aliases and the names of its base model."""
        names = {"", info.model_id, info.model_id.rstrip("/").rpartition("/")[2]}
        self._base_names = frozenset(names | {self._served_model_name or ""})
        self._configured = {alias.name: alias.reference for alias in info.aliases}

    def is_base(self, name: str) -> bool:
        """Whether a name means the base model. An alias goes before a base name."""
        return name in self._base_names and name not in self._aliases

    async def resolve(self, shard: ShardClient, name: str, token: str | None) -> pb.Adapter:
        """Return the adapter that a name means now. Raises RequestError if it cannot be had."""
        sent = self._sent(name)
        adapter = await shard.resolve(sent, token)
        self.remember(adapter)
        self._name(sent, adapter.digest)
        return adapter

    async def refresh(self, shard: ShardClient) -> list[pb.Adapter]:
        """Ask the shard for all it knows, which replaces what was known."""
        adapters = await shard.list()
        self._known = {adapter.digest: adapter for adapter in adapters[-_MOST_KNOWN:]}
        return adapters

    def update(self, name: str, adapter: pb.Adapter) -> AdapterEntry:
        """Take over what the shard said about one adapter; return it as its user sees it."""
        self.remember(adapter)
        return _entry(name, adapter, self._aliases.get(name, adapter.reference))

    def observe(self, changes: Iterable[pb.Residency]) -> None:
        """Take over residency changes."""
        for change in changes:
            known = self._known.get(change.digest)
            if known is not None:
                known.tier = change.tier

    def add_alias(self, name: str, reference: str, digest: str) -> None:
        """Call a reference, or what another alias stands for, by a name from now on."""
        if name != reference:
            sent = self._sent(reference)
            self._loaded[name] = sent
            self._name(sent, digest)

    def check_alias(self, name: str) -> None:
        """Raise RequestError (400) for a name that no adapter may have."""
        if name in self._base_names:
            raise invalid(f"{name!r} means the base model; choose another name", "name")
        if len(name) > _MOST_NAME_CHARACTERS or not name.isprintable():
            raise invalid(
                f"a name has at most {_MOST_NAME_CHARACTERS} printable characters", "name"
            )

    def forget(self, adapter: pb.Adapter) -> None:
        """Drop an unloaded adapter and the aliases that `add_alias` gave it."""
        gone = {name for name, digest in self._digests.items() if digest == adapter.digest}
        for name in gone:
            del self._digests[name]
        self._loaded = {name: sent for name, sent in self._loaded.items() if sent not in gone}
        self._known.pop(adapter.digest, None)

    def find(self, name: str) -> pb.Adapter | None:
        """Return a known adapter by alias, reference or digest."""
        sent = self._sent(name)
        digest = self._digests.get(sent, sent)
        if digest in self._known:
            return self._known[digest]
        same = (adapter for adapter in self._known.values() if adapter.reference == sent)
        return next(same, None)

    def entries(self) -> list[AdapterEntry]:
        """Return one entry per alias, then the known adapters that have none; by name."""
        aliased = {name: self.find(name) for name in self._aliases}
        named = {adapter.digest for adapter in aliased.values() if adapter is not None}
        entries = [
            _entry(name, adapter or pb.Adapter(tier=pb.TIER_REMOTE), self._aliases[name])
            for name, adapter in aliased.items()
        ]
        others = [adapter for adapter in self._known.values() if adapter.digest not in named]
        entries += [_entry(adapter.reference, adapter, adapter.reference) for adapter in others]
        return sorted(entries, key=lambda entry: entry.name)

    def tiers(self) -> "Collection[pb.Tier.ValueType]":
        """Return the tier of every known adapter."""
        return [adapter.tier for adapter in self._known.values()]

    def _sent(self, name: str) -> str:
        """Return what the shard is asked for. It knows the configured aliases by itself.

        So those are the operator's: they may lead anywhere, with the shard's own login.
        """
        return self._loaded.get(name, name)

    @property
    def _aliases(self) -> dict[str, str]:
        return self._configured | self._loaded

    def _name(self, sent: str, digest: str) -> None:
        self._digests.pop(sent, None)
        self._digests[sent] = digest
        if len(self._digests) > _MOST_KNOWN:
            del self._digests[next(iter(self._digests))]

    def remember(self, adapter: pb.Adapter) -> pb.Adapter:
        """Take over what the shard said about one adapter, and return it."""
        self._known[adapter.digest] = adapter
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return adapter


def not_found(name: str) -> RequestError:
    """Return the error of naming an adapter that the shard does not hold."""
    return RequestError(
        pb.ERROR_KIND_NOT_FOUND, f"the shard knows no adapter {name!r}; load it first", param="name"
    )


def _entry(name: str, adapter: pb.Adapter, reference: str) -> AdapterEntry:
    return AdapterEntry(
        name=name,
        reference=reference,
        digest=adapter.digest,
        tier=TIER_NAMES.get(adapter.tier, "remote"),
        rank=adapter.rank,
        lanes=adapter.lanes,
        bytes=adapter.bytes,
        targets=adapter.targets,
        modules=tuple(adapter.modules),
        rows=adapter.rows,
        pinned=adapter.pinned,
        load_ms=adapter.load_ms,
        last_used=adapter.last_used,
    )

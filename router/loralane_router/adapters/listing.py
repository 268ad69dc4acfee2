"""The adapters of all shards as one list, by name.

A name stands for what it leads to on each shard: one digest as a rule, another one where the files
differ. Whatever has one of these digests belongs to the name, on every shard.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from loralane_router.adapters.facts import BASE, AdapterEntry, AdapterFacts, AtShard, Page
from loralane_router.adapters.names import Names
from loralane_router.adapters.registry import Registry

#: The best first.
_TIERS: Final = ("device", "host", "disk", "remote")

#: (name, the digests that belong to it)
_Row = tuple[str, tuple[str, ...]]


class Listing:
    """Pages of adapters; what they are made of belongs to `Names` and the registries."""

    def __init__(self, names: Names) -> None:
        self._names = names
        #: In order; made again when `_made_of` is no longer true.
        self._rows: list[_Row] = []
        self._made_of: object = None

    def page(self, at: Mapping[str, Registry], limit: int, after: str) -> Page:
        """Return so many adapters whose names come after `after`; an alias goes for its adapter.

        `at`: the registries of the shards that count, by address.
        """
        rows = self._ordered(at)
        first = bisect_right(rows, after, key=lambda row: row[0])
        entries = tuple(self._entry(at, *row) for row in rows[first : first + limit])
        return Page(entries, len(rows), first + limit < len(rows))

    def entry(self, at: Mapping[str, Registry], name: str) -> AdapterEntry | None:
        """Return what a name means: an alias, used or not, or a known adapter."""
        found = [facts.digest for r in at.values() if (facts := r.find(name)) is not None]
        if not found and self._names.aliased(name) is None:
            return None
        return self._entry(at, name, tuple(dict.fromkeys(found)))

    def _ordered(self, at: Mapping[str, Registry]) -> list[_Row]:
        made_of = (self._names.changes, [(r, r.changes) for r in at.values()])
        if self._made_of != made_of:
            self._rows = sorted(_rows(self._names.aliases(), list(at.values())))
            self._made_of = made_of
        return self._rows

    def _entry(self, at: Mapping[str, Registry], name: str, digests: Sequence[str]) -> AdapterEntry:
        places = tuple(_places(at, name, digests))
        facts = merged([place.facts for place in places])
        reference = self._names.aliased(name) or facts.reference
        return AdapterEntry(name, reference, facts, places if len(at) > 1 else ())


def merged(everywhere: Sequence[AdapterFacts]) -> AdapterFacts:
    """Return one description of an adapter that several shards describe; none = BASE.

    What it is comes from the shard that has it in the best tier, with the most rows; rows and host
    bytes are added up; it is pinned if it is anywhere.
    """
    if len(everywhere) < 2:
        return everywhere[0] if everywhere else BASE
    best = min(everywhere, key=lambda facts: (_TIERS.index(facts.tier), -facts.rows))
    return replace(
        best,
        rows=sum(facts.rows for facts in everywhere),
        host_bytes=sum(facts.host_bytes for facts in everywhere),
        pinned=any(facts.pinned for facts in everywhere),
        last_used=max(facts.last_used for facts in everywhere),
    )


def _rows(aliases: Iterable[str], registries: Sequence[Registry]) -> Iterator[_Row]:
    """Yield each name once: the aliases, then those of adapters that no alias leads to."""
    aliased = set[str]()
    for alias in aliases:
        found = {facts.digest for r in registries if (facts := r.find(alias)) is not None}
        aliased |= found
        yield alias, tuple(found)
    names: dict[str, str] = {}
    for registry in registries:
        for name, digest in registry.own_names():
            # Where a shard says that the reference means another one by now, the digest is left.
            if digest not in aliased and (name == digest or digest not in names):
                names[digest] = name
    by_name = defaultdict[str, list[str]](list)
    for digest, name in names.items():
        by_name[name].append(digest)
    for name, digests in by_name.items():
        yield name, tuple(digests)


def _places(at: Mapping[str, Registry], name: str, digests: Sequence[str]) -> Iterator[AtShard]:
    """Yield each shard with what it has of these; first, what the name leads to there."""
    for address, registry in at.items():
        meant = registry.find(name)
        first = [] if meant is None or meant.digest not in digests else [meant.digest]
        for digest in dict.fromkeys([*first, *digests]):
            if (facts := registry.known(digest)) is not None:
                yield AtShard(address, facts)

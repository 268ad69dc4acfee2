"""What operators do with adapters: list, load, validate, unload, pin; on all shards that matter."""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import AdapterEntry, AdapterFacts, Page, facts_of
from loralane_router.adapters.listing import Listing, merged
from loralane_router.adapters.registry import Registry, not_found
from loralane_router.errors import RequestError
from loralane_router.fleet.fleet import Fleet
from loralane_router.fleet.link import Link


class Administration:
    """The adapters of one router's shards. Its coroutines raise RequestError."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._listing = Listing(fleet.names)

    def page(self, limit: int, after: str) -> Page:
        """Return adapters as last seen, without asking a shard."""
        return self._listing.page(self._registries(), limit, after)

    def entry(self, name: str) -> AdapterEntry | None:
        """Return what a name was last seen to mean."""
        return self._listing.entry(self._registries(), name)

    async def listed(self, limit: int, after: str) -> Page:
        """Return a page of adapters as the shards describe them now."""
        asked = _digests(self.page(limit, after).entries)
        links = self._fleet.connected()
        await _on_all(link.registry.freshen(link.shard, asked) for link in links)
        page = self.page(limit, after)
        for link in links:
            known = (link.registry.known(digest) for digest in _digests(page.entries))
            link.dispatcher.note_pins([facts for facts in known if facts is not None])
        return page

    async def load(
        self, name: str, reference: str, token: str | None, ttl_s: float | None
    ) -> AdapterEntry:
        """Give `reference` a name and make it resident on one shard."""
        names = self._fleet.names
        names.check_alias(name)
        link = (await self._fleet.placing.place(reference, token)).link
        shard = link.shard
        facts = await link.resolve_and(reference, token, lambda digest: shard.load(digest, ttl_s))
        if name != reference:
            names.add(name, reference)
            link.registry.called(name, facts)
        return self._entry(name, facts)

    async def validate(
        self, reference: str, token: str | None, tensors: bool
    ) -> tuple[AdapterFacts, tuple[str, ...]]:
        """Return what an adapter is, and oddities that change nothing; remember nothing."""
        shard = self._fleet.placing.choose(reference).shard
        reply = await shard.validate(self._fleet.names.sent(reference), token, tensors)
        if reply.HasField("error"):
            raise RequestError.from_proto(reply.error)
        return facts_of(reply.adapter), tuple(reply.notes)

    async def unload(self, name: str) -> tuple[int, int]:
        """Make every shard forget an adapter; return (freed host bytes, freed lanes).

        Its names are forgotten last: after an error they still lead to what is left of it.
        """
        found = await self._found(name)
        if not found:
            # Given to it before a shard was restarted, a name goes though nobody knows the adapter.
            if not self._fleet.names.take_back(name):
                raise not_found(name)
            return 0, 0
        if any(link.dispatcher.needs(facts.digest) for link, facts in found):
            raise RequestError(
                pb.ERROR_KIND_IN_USE,
                f"requests wait for adapter {name!r} or use it; unload it when they have ended",
            )
        unloaded = [await link.unload(facts) for link, facts in found]
        self._fleet.names.forget(sent for each in unloaded for sent in each.names)
        return sum(each.host_bytes for each in unloaded), sum(each.lanes for each in unloaded)

    async def pin(self, name: str, pinned: bool) -> AdapterEntry:
        """Protect an adapter from eviction, or no longer.

        Where it is resident (or pinned, to undo that); if nowhere, on one shard that is chosen.
        """
        found = await self._found(name)
        there = [(link, facts) for link, facts in found if _has_lanes(facts) or facts.pinned]
        if there or len(found) == 1:
            done = [await _pinned(link, facts, pinned) for link, facts in there or found]
            return self._entry(name, merged(done))
        link = (await self._fleet.placing.place(name, None)).link
        shard = link.shard
        facts = await link.resolve_and(name, None, lambda digest: shard.pin(digest, pinned))
        return self._entry(name, facts)

    async def _found(self, name: str) -> list[tuple[Link, AdapterFacts]]:
        """Return the shards that know an adapter, by any name that leads to it on one of them."""
        links = self._fleet.connected()
        await _on_all(link.registry.search(link.shard, name) for link in links)
        entry = self._listing.entry({link.address: link.registry for link in links}, name)
        if entry is None:
            return []
        if len(links) == 1:
            return [(links[0], entry.facts)] if entry.facts.digest else []
        at: dict[str, AdapterFacts] = {}
        for place in entry.shards:
            at.setdefault(place.shard, place.facts)
        return [(link, at[link.address]) for link in links if link.address in at]

    def _entry(self, name: str, facts: AdapterFacts) -> AdapterEntry:
        """Return an adapter as the one sees it who has just named it."""
        known = self.entry(name)
        if known is None:
            return AdapterEntry(name, facts.reference, facts)
        if known.shards:
            return known
        return AdapterEntry(name, known.reference, facts)

    def _registries(self) -> Mapping[str, Registry]:
        """Return what is known of the connected shards; if there is none, what was last known."""
        links = self._fleet.ready_links or self._fleet.links
        return {link.address: link.registry for link in links}


def _has_lanes(facts: AdapterFacts) -> bool:
    return facts.tier == "device"


async def _pinned(link: Link, facts: AdapterFacts, pinned: bool) -> AdapterFacts:
    return link.updated(await link.shard.pin(facts.digest, pinned))


def _digests(entries: Iterable[AdapterEntry]) -> set[str]:
    return {facts.digest for entry in entries for facts in _everywhere(entry)} - {""}


def _everywhere(entry: AdapterEntry) -> Iterator[AdapterFacts]:
    yield entry.facts
    yield from (place.facts for place in entry.shards)


async def _on_all(calls: Iterable[Coroutine[object, object, object]]) -> None:
    """Make a call on every shard; raises RequestError if none of them succeeds."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    failed = [result for result in done if isinstance(result, BaseException)]
    for error in failed:
        if len(failed) == len(done) or not isinstance(error, RequestError):
            raise error

"""What operators do with adapters: list, load, validate, unload, pin."""

from loralane_proto import shard_pb2 as pb

from loralane_router.errors import RequestError
from loralane_router.facts import AdapterEntry, AdapterFacts, Page, facts_of
from loralane_router.fleet import Fleet
from loralane_router.link import Link
from loralane_router.registry import not_found


class Administration:
    """The adapters of one router's shards. Every method raises RequestError."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def page(self, limit: int, after: str) -> Page:
        """Return adapters as last seen, without asking a shard."""
        return self._fleet.links[0].registry.page(limit, after)

    def entry(self, name: str) -> AdapterEntry | None:
        """Return what a name was last seen to mean."""
        return self._fleet.links[0].registry.entry(name)

    async def listed(self, limit: int, after: str) -> Page:
        """Return a page of adapters as the shard describes them now."""
        link = self._fleet.choose()
        page = await link.registry.listed(link.shard, limit, after)
        link.note_pins(entry.facts for entry in page.entries)
        return page

    async def load(
        self, name: str, reference: str, token: str | None, ttl_s: float | None
    ) -> AdapterEntry:
        """Give `reference` a name and make it resident."""
        link = self._fleet.choose()
        shard = link.shard
        link.registry.check_alias(name)
        facts = await link.resolve_and(reference, token, lambda digest: shard.load(digest, ttl_s))
        link.registry.add_alias(name, reference, facts)
        return _entry(link, name, facts)

    async def validate(
        self, reference: str, token: str | None, tensors: bool
    ) -> tuple[AdapterFacts, tuple[str, ...]]:
        """Return what an adapter is, and oddities that change nothing; remember nothing."""
        link = self._fleet.choose()
        sent = link.registry.sent(reference)
        reply = await link.shard.validate(sent, token, tensors)
        if reply.HasField("error"):
            raise RequestError.from_proto(reply.error)
        return facts_of(reply.adapter), tuple(reply.notes)

    async def unload(self, name: str) -> tuple[int, int]:
        """Forget an adapter; return (freed host bytes, freed lanes)."""
        link = self._fleet.choose()
        facts = await link.registry.search(link.shard, name)
        if facts is None:
            raise not_found(name)
        if link.dispatcher.needs(facts.digest):
            raise RequestError(
                pb.ERROR_KIND_IN_USE,
                f"requests wait for adapter {name!r} or use it; unload it when they have ended",
            )
        return await link.unload(facts)

    async def pin(self, name: str, pinned: bool) -> AdapterEntry:
        """Protect an adapter from eviction, or no longer."""
        link = self._fleet.choose()
        shard = link.shard
        facts = await link.registry.search(shard, name)
        if facts is not None:
            facts = link.updated(await shard.pin(facts.digest, pinned))
        else:
            facts = await link.resolve_and(name, None, lambda digest: shard.pin(digest, pinned))
        return _entry(link, name, facts)


def _entry(link: Link, name: str, facts: AdapterFacts) -> AdapterEntry:
    """Return an adapter as the one sees it who has just named it."""
    known = link.registry.entry(name)
    return AdapterEntry(name, facts.reference if known is None else known.reference, facts)

"""What one shard was last seen to know about adapters, by the names that users give them.

A name is resolved by the shard for every request: it checks this caller's token for this adapter
and notices files that were replaced. So nothing that decides a request is cached here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import TIER_NAMES, AdapterFacts, facts_of
from loralane_router.adapters.known import KnownAdapters
from loralane_router.adapters.names import Names
from loralane_router.errors import RequestError, invalid
from loralane_router.fleet.shards import ShardClient
from loralane_router.requests import Merge

#: More adapters than this are not remembered, the longest known goes first.
_MOST_KNOWN: Final = 20_000
#: Adapters that the shard is asked for at a time.
_SYNC_PAGE: Final = 1_000


class Registry:
    """The adapters of one shard. Owned by its link, on the router's event loop."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._known = KnownAdapters()
        #: The digest that a name or merge had when it was last resolved, as the shard was asked
        #: for it; the latest last.
        self._digests: dict[str | Merge, str] = {}
        #: What an adapter was last called by a request, by digest; of known adapters only.
        self._called: dict[str, str] = {}
        #: Grows when an adapter comes or goes, or a name leads elsewhere.
        self.changes = 0

    async def resolve(
        self, shard: ShardClient, asked: str | Merge, token: str | None
    ) -> AdapterFacts:
        """Return the adapter that a name, or a merge of names, means now.

        Raises RequestError if it cannot be had.
        """
        sent = self.sent(asked)
        facts = self.remember(await shard.resolve(sent, token))
        self._name(sent, facts)
        if isinstance(asked, str):
            self._called[facts.digest] = asked
        return facts

    def name_again(self, asked: str | Merge, facts: AdapterFacts) -> None:
        """Let a name stand for what it stood for before it was last resolved."""
        if facts.digest in self._known:
            self._name(self.sent(asked), facts)

    async def sync(self, shard: ShardClient) -> None:
        """Take over all that the shard knows, a page at a time, and forget what it does not."""
        before, found, after = set(self._known), set[str](), ""
        while len(found) < _MOST_KNOWN:
            reply = await shard.list(limit=_SYNC_PAGE, after=after)
            found |= {self.remember(adapter).digest for adapter in reply.adapters}
            if len(reply.adapters) < _SYNC_PAGE:
                break
            after = reply.adapters[-1].digest
        for digest in before - found:
            self._drop(digest)

    async def freshen(self, shard: ShardClient, digests: Iterable[str]) -> None:
        """Ask the shard for these adapters; for all of them if it knows others than it did.

        Raises RequestError.
        """
        asked = sorted(digest for digest in digests if digest in self._known)
        reply = await shard.list(digests=asked) if asked else await shard.list(limit=1)
        answered = {self.remember(adapter).digest for adapter in reply.adapters}
        if not answered.issuperset(asked) or self._is_short_of(reply.total):
            await self.sync(shard)

    async def search(self, shard: ShardClient, name: str) -> AdapterFacts | None:
        """Return an adapter that the shard knows, by alias, reference or digest."""
        if (facts := self.find(name)) is not None:
            return facts
        if self._is_short_of((await shard.list(limit=1)).total):
            await self.sync(shard)
        return self.find(name)

    def observe(self, changes: Iterable[pb.Residency]) -> None:
        """Take over residency changes."""
        for change in changes:
            known = self._known.get(change.digest)
            if known is not None:
                self._put(replace(known, tier=TIER_NAMES.get(change.tier, "remote")))

    def called(self, name: str, facts: AdapterFacts) -> None:
        """Let an alias that was just given lead to this adapter."""
        self._called[facts.digest] = name
        self._name(self.sent(name), facts)

    def forget(self, digest: str) -> set[str]:
        """Drop an unloaded adapter; return the names that led to it, as the shard was asked."""
        gone = [name for name, known in self._digests.items() if known == digest]
        for name in gone:
            del self._digests[name]
        self._drop(digest)
        return {name for name in gone if isinstance(name, str)}

    def find(self, asked: str | Merge) -> AdapterFacts | None:
        """Return a known adapter by alias, reference, digest or merge."""
        sent = self.sent(asked)
        digest = self._digests.get(sent, sent)
        return self._known.get(digest) if isinstance(digest, str) else None

    def is_resident(self, digest: str) -> bool:
        """Whether an adapter's lanes are in the shard's pool, as far as it has said."""
        facts = self._known.get(digest)
        return facts is not None and facts.tier == "device"

    def known(self, digest: str) -> AdapterFacts | None:
        """Return what is known of an adapter, None if nothing is."""
        return self._known.get(digest)

    def own_names(self) -> Iterator[tuple[str, str]]:
        """Yield (name, digest) of every adapter: its reference while that still leads to it.

        Else its digest.
        """
        for digest in self._known:
            reference = self._known[digest].reference
            yield (reference if self._digests.get(reference) == digest else digest), digest

    def remember(self, adapter: pb.Adapter) -> AdapterFacts:
        """Take over what the shard said about one adapter, and return it."""
        facts = facts_of(adapter)
        known = self._known.get(facts.digest)
        if known is not None:  # one text for one digest and reference, however often described
            facts = replace(facts, digest=known.digest, reference=known.reference)
        self._put(facts)
        if self._digests.get(facts.reference) not in self._known:
            self._name(facts.reference, facts)
        if len(self._known) > _MOST_KNOWN:
            self._drop(next(iter(self._known)))
        return facts

    @property
    def tiers(self) -> Mapping[str, int]:
        """How many known adapters are in each tier."""
        return self._known.tiers

    def held(self, tier: str) -> Iterator[tuple[str, AdapterFacts]]:
        """Yield (name, facts) of what is in the device or host tier, the latest change first."""
        for facts in self._known.held(tier):
            yield self._called.get(facts.digest, facts.reference), facts

    def sent(self, asked: str | Merge) -> str | Merge:
        """Return what the shard is asked for. Raises RequestError for a merge of the base (400)."""
        if isinstance(asked, str):
            return self._names.sent(asked)
        for name, _ in asked.members:
            if self._names.is_base(name):
                raise invalid(f"{name!r} means the base model, which is no adapter to merge")
        return replace(asked, members=tuple((self._names.sent(n), w) for n, w in asked.members))

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._known.check()
        assert self._called.keys() <= set(self._known)

    def _is_short_of(self, total: int) -> bool:
        return min(total, _MOST_KNOWN) != len(self._known)

    def _name(self, sent: str | Merge, facts: AdapterFacts) -> None:
        if self._digests.pop(sent, None) != facts.digest:
            self.changes += 1
        self._digests[facts.reference if sent == facts.reference else sent] = facts.digest
        if len(self._digests) > 2 * _MOST_KNOWN:
            del self._digests[next(iter(self._digests))]

    def _put(self, facts: AdapterFacts) -> None:
        if self._known.put(facts):
            self.changes += 1

    def _drop(self, digest: str) -> None:
        if self._known.drop(digest):
            self._called.pop(digest, None)
            self.changes += 1


def not_found(name: str) -> RequestError:
    """Return the error of naming an adapter that the shard does not hold."""
    return RequestError(
        pb.ERROR_KIND_NOT_FOUND,
        f"the shard knows no adapter {name!r}; GET /v1/adapters lists those that it knows",
        param="name",
    )

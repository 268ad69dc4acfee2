"""What users call adapters, and what the shard was last seen to know about them.

A name is resolved by the shard for every request: it checks this caller's token for this adapter
and notices files that were replaced. So nothing that decides a request is cached here.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.errors import RequestError, invalid
from loralane_router.facts import BASE, TIER_NAMES, AdapterEntry, AdapterFacts, Page, facts_of
from loralane_router.known import KnownAdapters
from loralane_router.requests import Merge
from loralane_router.shards import ShardClient

#: More adapters than this are not remembered, the longest known goes first.
_MOST_KNOWN: Final = 20_000
_MOST_NAME_CHARACTERS: Final = 256
#: Adapters that the shard is asked for at a time.
_SYNC_PAGE: Final = 1_000


class Registry:
    """Aliases and known adapters. Owned by the router, on its event loop."""

    def __init__(self, served_model_name: str | None) -> None:
        self._served_model_name = served_model_name
        self._base_names: frozenset[str] = frozenset({""})
        #: Given to the shard with --adapter; replaced on every connection.
        self._configured: dict[str, str] = {}
        #: Given through `load`; these go before the configured ones.
        self._loaded: dict[str, str] = {}
        self._known = KnownAdapters()
        #: The digest that a name had when it was last resolved, by `_sent`; the latest last.
        self._digests: dict[str, str] = {}
        #: What an adapter was last called by a request, by digest; of known adapters only.
        self._called: dict[str, str] = {}
        #: (name, digest) of every row in order; None after a change.
        self._rows: list[tuple[str, str]] | None = None

    def connect(self, info: pb.InfoReply) -> None:
        """Take over a shard's aliases and the names of its base model."""
        names = {"", info.model_id, info.model_id.rstrip("/").rpartition("/")[2]}
        self._base_names = frozenset(names | {self._served_model_name or ""})
        self._configured = {alias.name: alias.reference for alias in info.aliases}
        self._rows = None

    def is_base(self, name: str) -> bool:
        """Whether a name means the base model. An alias goes before a base name."""
        return name in self._base_names and self._aliased(name) is None

    async def resolve(
        self, shard: ShardClient, asked: str | Merge, token: str | None
    ) -> AdapterFacts:
        """Return the adapter that a name, or a merge of names, means now.

        Raises RequestError if it cannot be had.
        """
        if isinstance(asked, Merge):
            return self.remember(await shard.resolve(self._merge_sent(asked), token))
        sent = self.sent(asked)
        facts = self.remember(await shard.resolve(sent, token))
        self._name(sent, facts)
        self._called[facts.digest] = asked
        return facts

    def name_again(self, asked: str, facts: AdapterFacts) -> None:
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

    async def listed(self, shard: ShardClient, limit: int, after: str) -> Page:
        """Return a page of what the shard knows now; all of it is asked for only if that changed.

        Raises RequestError.
        """
        if not await self._freshen(shard, self.page(limit, after)):
            await self.sync(shard)
        return self.page(limit, after)

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
                self._put(replace(known, tier=TIER_NAMES[change.tier]))

    def add_alias(self, name: str, reference: str, facts: AdapterFacts) -> None:
        """Call a reference, or what another alias stands for, by a name from now on."""
        if name != reference:
            sent = self.sent(reference)
            self._loaded[name] = sent
            self._called[facts.digest] = name
            self._name(sent, facts)
            self._rows = None

    def check_alias(self, name: str) -> None:
        """Raise RequestError (400) for a name that no adapter may have."""
        if name in self._base_names:
            raise invalid(f"{name!r} means the base model; choose another name", "name")
        if len(name) > _MOST_NAME_CHARACTERS or not name.isprintable():
            raise invalid(
                f"a name has at most {_MOST_NAME_CHARACTERS} printable characters", "name"
            )

    def forget(self, digest: str) -> None:
        """Drop an unloaded adapter and the aliases that `add_alias` gave it."""
        gone = {name for name, known in self._digests.items() if known == digest}
        for name in gone:
            del self._digests[name]
        self._loaded = {name: sent for name, sent in self._loaded.items() if sent not in gone}
        self._drop(digest)

    def find(self, name: str) -> AdapterFacts | None:
        """Return a known adapter by alias, reference or digest."""
        sent = self.sent(name)
        return self._known.get(self._digests.get(sent, sent))

    def entry(self, name: str) -> AdapterEntry | None:
        """Return what a name means: an alias, used or not, or a known adapter."""
        facts, reference = self.find(name), self._aliased(name)
        if facts is None and reference is None:
            return None
        facts = facts or BASE
        return AdapterEntry(name, reference or facts.reference, facts)

    def page(self, limit: int, after: str = "") -> Page:
        """Return so many adapters whose names come after `after`; an alias goes for its adapter."""
        rows = self._ordered()
        first = bisect_right(rows, after, key=lambda row: row[0])
        entries = tuple(self._entry(*row) for row in rows[first : first + limit])
        return Page(entries, len(rows), first + limit < len(rows))

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

    def sent(self, name: str) -> str:
        """Return what the shard is asked for. It knows the configured aliases by itself.

        So those are the operator's: they may lead anywhere, with the shard's own login.
        """
        return self._loaded.get(name, name)

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._known.check()
        assert self._called.keys() <= set(self._known)

    def _merge_sent(self, merge: Merge) -> Merge:
        """Return the merge as the shard is asked for it. Raises RequestError for the base (400)."""
        for name, _ in merge.members:
            if self.is_base(name):
                raise invalid(f"{name!r} means the base model, which is no adapter to merge")
        return replace(merge, members=tuple((self.sent(name), w) for name, w in merge.members))

    async def _freshen(self, shard: ShardClient, page: Page) -> bool:
        """Ask the shard for the adapters of a page; return whether it knows the same adapters."""
        asked = {entry.facts.digest for entry in page.entries} - {""}
        reply = await shard.list(digests=sorted(asked)) if asked else await shard.list(limit=1)
        answered = {self.remember(adapter).digest for adapter in reply.adapters}
        return asked <= answered and not self._is_short_of(reply.total)

    def _is_short_of(self, total: int) -> bool:
        return min(total, _MOST_KNOWN) != len(self._known)

    def _aliased(self, name: str) -> str | None:
        """Return what an alias stands for, None if the name is no alias."""
        loaded = self._loaded.get(name)
        return self._configured.get(name) if loaded is None else loaded

    def _ordered(self) -> list[tuple[str, str]]:
        if self._rows is None:
            aliases = self._configured.keys() | self._loaded.keys()
            rows = [(name, facts.digest if (facts := self.find(name)) else "") for name in aliases]
            aliased = {digest for _, digest in rows}
            rows += [(self._own_name(d), d) for d in self._known if d not in aliased]
            self._rows = sorted(rows)
        return self._rows

    def _own_name(self, digest: str) -> str:
        """Return the reference of an adapter without alias, while it still leads to it."""
        reference = self._known[digest].reference
        return reference if self._digests.get(reference) == digest else digest

    def _entry(self, name: str, digest: str) -> AdapterEntry:
        facts = self._known.get(digest) or BASE
        return AdapterEntry(name, self._aliased(name) or facts.reference, facts)

    def _name(self, sent: str, facts: AdapterFacts) -> None:
        if self._digests.pop(sent, None) != facts.digest:
            self._rows = None
        self._digests[facts.reference if sent == facts.reference else sent] = facts.digest
        if len(self._digests) > 2 * _MOST_KNOWN:
            del self._digests[next(iter(self._digests))]

    def _put(self, facts: AdapterFacts) -> None:
        if self._known.put(facts):
            self._rows = None

    def _drop(self, digest: str) -> None:
        if self._known.drop(digest):
            self._called.pop(digest, None)
            self._rows = None


def not_found(name: str) -> RequestError:
    """Return the error of naming an adapter that the shard does not hold."""
    return RequestError(
        pb.ERROR_KIND_NOT_FOUND,
        f"the shard knows no adapter {name!r}; GET /v1/adapters lists those that it knows",
        param="name",
    )

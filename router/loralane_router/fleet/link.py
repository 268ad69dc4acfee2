"""One shard as the router holds it: its connection, dispatcher, and what it knows of adapters."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import BASE, AdapterFacts
from loralane_router.adapters.names import Names
from loralane_router.adapters.registry import Registry
from loralane_router.errors import RequestError
from loralane_router.fleet.connection import Connection
from loralane_router.fleet.outlook import Outlook
from loralane_router.fleet.shards import ShardClient
from loralane_router.metrics.counters import Metrics
from loralane_router.metrics.snapshots import ShardState
from loralane_router.model import CommonModel
from loralane_router.queueing.crowd import Crowd
from loralane_router.queueing.dispatch import Dispatcher, HandBack
from loralane_router.queueing.entry import Entry
from loralane_router.queueing.fairness import FairShares
from loralane_router.requests import Merge


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What unloading freed, and the names that led to the adapter, as the shard was asked."""

    host_bytes: int
    lanes: int
    names: frozenset[str]


class Link:
    """Everything of one shard. Digests are this shard's own and mean nothing to another."""

    def __init__(
        self,
        address: str,
        names: Names,
        model: CommonModel,
        metrics: Metrics,
        hand_back: HandBack,
        on_change: Callable[[], None],
        shares: FairShares,
        crowd: Crowd,
    ) -> None:
        self.address = address
        self.registry = Registry(names)
        self.dispatcher = Dispatcher(
            metrics,
            hand_back,
            shares=shares,
            is_resident=self.registry.is_resident,
            crowd=crowd,
        )
        self.connection = Connection(
            address, self.dispatcher, self.registry, names, model, metrics, on_change
        )
        self.outlook = Outlook(self.registry, self.dispatcher)
        self._names = names

    @property
    def ready(self) -> bool:
        """Whether the shard answers and takes requests."""
        # A connection that breaks gives its requests back before it says that it is gone.
        return self.connection.ready and self.connected

    @property
    def connected(self) -> bool:
        """Whether rows can run; a shard that is about to go finishes those that it has."""
        return self.dispatcher.capacity is not None

    @property
    def shard(self) -> ShardClient:
        """The shard's client. Raises RequestError (503) while it is not connected."""
        return self.connection.shard

    async def resolve(self, asked: str | Merge, token: str | None) -> AdapterFacts:
        """Return the adapter that a request names, loadable here for this caller's token.

        One without a digest is the base model. Raises RequestError.
        """
        if not isinstance(asked, Merge) and self._names.is_base(asked):
            return BASE
        before = None if isinstance(asked, Merge) else self.registry.find(asked)
        facts = await self.registry.resolve(self.shard, asked, token)
        if before is not None and before.pinned and before.digest != facts.digest:
            # Its files were replaced: the pin belongs to the name's adapter, not to old bytes.
            facts = await self._move_pin(str(asked), before, facts)
        self.dispatcher.note_pins([facts])
        return facts

    def submit(self, entry: Entry) -> None:
        """Take a request that was just accepted."""
        self._adopt(entry)
        self.dispatcher.submit(entry)

    def resume(self, entry: Entry) -> None:
        """Take a request that another shard has begun."""
        self._adopt(entry)
        self.dispatcher.resume(entry)

    def _adopt(self, entry: Entry) -> None:
        """Let its adapter be resolved here once more, in case that it is unloaded before."""
        again = partial(self.resolve, entry.asked, entry.token)
        entry.resolve_again = again if entry.ask.digest else None

    async def resolve_and(
        self, name: str, token: str | None, act: Callable[[str], Awaitable[pb.Adapter]]
    ) -> AdapterFacts:
        """Act on the adapter that a name means, once more if it was unloaded in between."""
        resolved = await self.registry.resolve(self.shard, name, token)
        try:
            return self.updated(await act(resolved.digest))
        except RequestError as error:
            if error.kind != pb.ERROR_KIND_NOT_FOUND:
                raise
        resolved = await self.registry.resolve(self.shard, name, token)
        return self.updated(await act(resolved.digest))

    async def unload(self, facts: AdapterFacts) -> Unloaded:
        """Make the shard forget an adapter."""
        try:
            reply = await self.shard.unload(facts.digest)
        except RequestError as error:
            if error.kind != pb.ERROR_KIND_NOT_FOUND:
                raise
            reply = pb.UnloadAdapterReply()  # it went by itself: unused too long, or replaced
        self.dispatcher.note_unloaded(facts.digest)
        names = self.registry.forget(facts.digest)
        return Unloaded(reply.freed_host_bytes, reply.freed_lanes, frozenset(names))

    def updated(self, adapter: pb.Adapter) -> AdapterFacts:
        """Take over what the shard said about an adapter, its pin included."""
        facts = self.registry.remember(adapter)
        self.dispatcher.note_pins([facts])
        return facts

    def state(self) -> ShardState:
        """Return what metrics say of this shard."""
        return ShardState(
            address=self.address,
            up=self.connected,
            capacity=self.dispatcher.capacity,
            work=self.dispatcher.work(),
            tiers=self.registry.tiers,
            on_device=tuple(self.registry.held("device")),
            on_host=self.registry.held("host"),
        )

    def check(self) -> None:
        """Assert what must hold between calls."""
        self.dispatcher.check()
        self.registry.check()
        self.outlook.check()

    async def _move_pin(self, name: str, old: AdapterFacts, new: AdapterFacts) -> AdapterFacts:
        """Pin what a name means now instead of what it meant; the old makes room for the new.

        Where that fails (RequestError, or the client leaves), the name keeps the old and its pin:
        the next request that names it tries again.
        """
        shard = self.shard
        try:
            self.updated(await shard.pin(old.digest, False))
            return self.updated(await shard.pin(new.digest, True))
        except BaseException:
            self.registry.name_again(name, old)
            with suppress(RequestError):
                self.updated(await shard.pin(old.digest, True))
            raise

"""The shards behind one router: a link to each, and which of them a request goes to."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.config import RouterConfig
from loralane_router.deadlines import AdapterWait
from loralane_router.discovery import Discovery, Lookup, lookup
from loralane_router.errors import RequestError
from loralane_router.facts import AdapterFacts
from loralane_router.fairness import FairShares
from loralane_router.link import Link
from loralane_router.metrics import Metrics
from loralane_router.model import CommonModel, Model
from loralane_router.names import Names
from loralane_router.replay import Replays
from loralane_router.requests import Merge
from loralane_router.routing import Need, choose
from loralane_router.shards import unavailable

#: Lanes of an adapter of which nothing is known yet: the smallest that there are.
_UNKNOWN_LANES: Final = 8

#: Seconds between two looks at DNS.
_LOOK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes, and its adapter there."""

    link: Link
    adapter: AdapterFacts
    #: Whether it is the base in an adapter's place, which was not ready in time.
    is_fallback: bool = False


class Fleet:
    """All links of one router, on its event loop. Ready while at least one shard is."""

    def __init__(self, config: RouterConfig, metrics: Metrics, lookup: Lookup = lookup) -> None:
        self.names = Names(config.served_model_name)
        #: Whose turn it is, on all shards.
        self.shares = FairShares(config.weights)
        self._model = CommonModel()
        self._metrics = metrics
        self._replays = Replays(self, metrics)
        #: Set and replaced whenever a shard comes or goes.
        self._changed = asyncio.Event()
        #: How many requests were given a shard.
        self._choices = 0
        self._discovery = Discovery(config.shards, lookup)
        self._looking: asyncio.Task[None] | None = None
        self._links = {address: self._link(address) for address in self._discovery.addresses}

    @property
    def links(self) -> tuple[Link, ...]:
        """Every shard that is known, connected or not."""
        return tuple(self._links.values())

    @property
    def ready_links(self) -> tuple[Link, ...]:
        """The shards that answer."""
        return tuple(link for link in self._links.values() if link.ready)

    @property
    def several(self) -> bool:
        """Whether there may be more than one shard, so that answers say which is meant."""
        return len(self._links) > 1 or self._discovery.asks

    @property
    def ready(self) -> bool:
        """Whether any shard answers."""
        return any(link.ready for link in self._links.values())

    @property
    def model(self) -> Model:
        """The model as last seen. Raises RequestError (503) before the first connection."""
        return self._model.model

    @property
    def waiting(self) -> int:
        """How many requests wait for admission, on all shards."""
        return sum(link.dispatcher.waiting for link in self._links.values())

    @property
    def waiting_tokens(self) -> int:
        """How many tokens the prompts of those have."""
        return sum(link.dispatcher.waiting_tokens for link in self._links.values())

    @property
    def tokens_per_s(self) -> float:
        """How many prompt tokens leave the queues in a second lately; 0 = not known."""
        return sum(link.dispatcher.tokens_per_s for link in self._links.values())

    @property
    def free_rows(self) -> int:
        """How many requests could start now, as far as rows go."""
        return sum(link.dispatcher.free_rows for link in self._links.values())

    async def start(self) -> None:
        """Begin to connect to every shard; does not wait for any."""
        for link in self.links:
            await link.connection.start()
        if self._discovery.asks:
            self._looking = asyncio.create_task(self._keep_looking(), name="discovery")

    async def close(self) -> None:
        """Disconnect; every request ends with an error. Idempotent."""
        self._replays.close()
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(*(link.connection.close() for link in self.links))

    async def until(self, holds: Callable[["Fleet"], bool]) -> None:
        """Return when something is true; it is looked at whenever a shard comes or goes."""
        while not holds(self):
            await self._changed.wait()

    async def look(self) -> None:
        """Ask again which shards there are: new ones are connected to.

        One that is no longer named is let go once its connection is down, so that an answer of DNS
        alone cuts nobody's stream.
        """
        await self._discovery.look()
        named = self._discovery.addresses
        for address in named:
            if address not in self._links:
                self._links[address] = self._link(address)
                await self._links[address].connection.start()
        for link in self.links:
            if link.address not in named and not link.ready:
                del self._links[link.address]
                self.names.disconnect(link.address)
                await link.connection.close()

    async def changes(self) -> AsyncIterator[bool]:
        """Yield `ready`: now, and after every change."""
        while True:
            told = self.ready
            yield told
            while self.ready == told:
                await self._changed.wait()

    def _link(self, address: str) -> Link:
        return Link(
            address,
            self.names,
            self._model,
            self._metrics,
            self._replays.take_over,
            self._note_change,
            self.shares,
        )

    async def _keep_looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def connected(self) -> tuple[Link, ...]:
        """Return the shards that answer. Raises RequestError (503) if there is none."""
        links = self.ready_links
        if not links:
            what = "no shard is connected" if self.several else "the shard is not connected"
            raise unavailable(f"{what}; try again when the router is ready")
        return links

    def choose(
        self, asked: str | Merge, need: Need | None = None, avoid: frozenset[str] = frozenset()
    ) -> Link:
        """Return the shard where a request would have its first token soonest.

        `need`: what `need` said of it; None = it has no prompt. `avoid`: addresses of shards that
        it must not go to. Raises RequestError (503) if there is none.
        """
        links = [link for link in self._able(asked) if link.address not in avoid]
        if not links:
            raise unavailable("no other shard is connected; try again later")
        need = need or self.need(asked, 0)
        views = [link.outlook.view(asked, need) for link in links]
        self._choices += 1
        return links[choose(views, need, self._choices)]

    def _able(self, asked: str | Merge) -> list[Link]:
        """Return the shards that can know a name. Raises RequestError (503) if there is none."""
        links = self.connected()
        names = [name for name, _ in asked.members] if isinstance(asked, Merge) else [asked]
        able = [
            link
            for link in links
            if all(self.names.leads_anywhere(name, link.address) for name in names)
        ]
        if not able:
            raise unavailable("no shard that was given this alias is connected; try again later")
        return able

    def need(self, asked: str | Merge, tokens: int) -> Need:
        """Return what a request needs, as far as it is known before its adapter is resolved."""
        if not isinstance(asked, Merge) and self.names.is_base(asked):
            return Need(tokens)
        for link in self._links.values():
            if (facts := link.registry.find(asked)) is not None:
                return Need(tokens, facts.lanes, facts.bytes, facts.digest)
        return Need(tokens, lanes=_UNKNOWN_LANES)

    async def place(
        self,
        asked: str | Merge,
        token: str | None,
        avoid: frozenset[str] = frozenset(),
        tokens: int = 0,
    ) -> Placement:
        """Choose a shard and resolve the adapter there; another one if it went meanwhile.

        The caller submits the request without waiting for anything else. Raises RequestError: what
        resolving says, or 503 if no shard is left.
        """
        need = self.need(asked, tokens)
        while True:
            link = self.choose(asked, need, avoid)
            try:
                with link.outlook.expecting(asked, need):
                    adapter = await link.resolve(asked, token)
                if link.ready:
                    return Placement(link, adapter)
                error = unavailable("the shard went away; try again")
            except RequestError as failed:
                error = failed
            # Its source cannot be reached, or the shard, whose connection is about to break.
            avoid |= {link.address}
            if error.kind != pb.ERROR_KIND_UNAVAILABLE or not self._others(avoid):
                raise error

    async def place_in_time(
        self,
        asked: str | Merge,
        token: str | None,
        wait: AdapterWait | None,
        avoid: frozenset[str] = frozenset(),
        tokens: int = 0,
    ) -> Placement:
        """Do as `place`, but no longer than the request waits for its adapter.

        What resolving takes is part of that wait. When it is over the base is placed instead, if
        the request allows it. Raises RequestError as `place`, or as `AdapterWait.error`.
        """
        if wait is None:
            return await self.place(asked, token, avoid, tokens)
        try:
            async with asyncio.timeout(wait.ends - time.monotonic()):
                return await self.place(asked, token, avoid, tokens)
        except TimeoutError:
            self._metrics.adapter_waits_ended.labels(wait.policy).inc()
            if wait.policy == "fail":
                raise wait.error(_called(asked), time.monotonic()) from None
        base = await self.place("", None, avoid, tokens)
        return replace(base, is_fallback=True)

    def _others(self, avoid: frozenset[str]) -> bool:
        return any(link.address not in avoid for link in self.ready_links)

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._replays.check()
        for link in self.links:
            link.check()


def _called(asked: str | Merge) -> str:
    return asked if isinstance(asked, str) else " + ".join(name for name, _ in asked.members)

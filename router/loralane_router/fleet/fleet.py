"""The shards behind one router: a link to each, whether it was named or is found in DNS."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

from loralane_router.adapters.names import Names
from loralane_router.config import RouterConfig
from loralane_router.fleet.discovery import Discovery, Lookup, lookup
from loralane_router.fleet.link import Link
from loralane_router.fleet.placing import Placing
from loralane_router.fleet.replay import Replays
from loralane_router.fleet.shards import unavailable
from loralane_router.metrics.counters import Metrics
from loralane_router.model import CommonModel, Model
from loralane_router.queueing.crowd import Crowd
from loralane_router.queueing.fairness import FairShares

#: Seconds between two looks at DNS.
_LOOK_S: Final = 5.0


class Fleet:
    """All links of one router, on its event loop. Ready while at least one shard is."""

    def __init__(self, config: RouterConfig, metrics: Metrics, lookup: Lookup = lookup) -> None:
        self.names = Names(config.served_model_name)
        #: Whose turn it is, on all shards.
        self.shares = FairShares(config.weights)
        #: Who waits for any shard, or is on the way to one.
        self.crowd = Crowd(self.shares.weight_of)
        self._model = CommonModel()
        self._metrics = metrics
        self.placing = Placing(self, metrics)
        self._replays = Replays(self.placing, metrics)
        #: Set and replaced whenever a shard comes or goes.
        self._changed = asyncio.Event()
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
        return tuple([link for link in self._links.values() if link.ready])

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

    def connected(self) -> tuple[Link, ...]:
        """Return the shards that answer. Raises RequestError (503) if there is none."""
        links = self.ready_links
        if not links:
            what = "no shard is connected" if self.several else "the shard is not connected"
            raise unavailable(f"{what}; try again when the router is ready")
        return links

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
            if link.address not in named and not link.connected:
                del self._links[link.address]
                self.names.disconnect(link.address)
                await link.connection.close()
                self._model.let_go(link.address)

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
            self.crowd,
        )

    async def _keep_looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._replays.check()
        self.crowd.check()
        self._model.check(link.address for link in self.ready_links)
        for address, link in self._links.items():
            assert link.address == address
            link.check()

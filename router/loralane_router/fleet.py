"""The shards behind one router: a link to each, and which of them a request goes to."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from loralane_proto import shard_pb2 as pb

from loralane_router.config import RouterConfig
from loralane_router.errors import RequestError
from loralane_router.exposition import Work
from loralane_router.facts import AdapterFacts
from loralane_router.link import Link
from loralane_router.metrics import Metrics
from loralane_router.model import Model
from loralane_router.registry import Registry
from loralane_router.replay import Replays
from loralane_router.requests import Merge
from loralane_router.shards import unavailable


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes, and its adapter there."""

    link: Link
    adapter: AdapterFacts


class Fleet:
    """All links of one router, on its event loop. Ready while at least one shard is."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self._replays = Replays(self, metrics)
        self._links = {
            address: Link(
                address, Registry(config.served_model_name), metrics, self._replays.take_over
            )
            for address in config.shards
        }

    @property
    def links(self) -> tuple[Link, ...]:
        """Every shard that is known, connected or not."""
        return tuple(self._links.values())

    @property
    def ready_links(self) -> tuple[Link, ...]:
        """The shards that answer."""
        return tuple(link for link in self._links.values() if link.ready)

    @property
    def ready(self) -> bool:
        """Whether any shard answers."""
        return any(link.ready for link in self._links.values())

    @property
    def model(self) -> Model:
        """The model as last seen. Raises RequestError (503) before the first connection."""
        return self.links[0].connection.model

    @property
    def waiting(self) -> int:
        """How many requests wait for admission, on all shards."""
        return sum(link.dispatcher.waiting for link in self._links.values())

    @property
    def rows(self) -> int:
        """How many requests run at once, at most."""
        return sum(link.dispatcher.rows for link in self._links.values())

    @property
    def free_rows(self) -> int:
        """How many requests could start now, as far as rows go."""
        return sum(link.dispatcher.free_rows for link in self._links.values())

    def work(self) -> Work:
        """Return how many requests run and wait, and for which adapters."""
        return self.links[0].dispatcher.work()

    async def start(self) -> None:
        """Begin to connect to every shard; does not wait for any."""
        for link in self.links:
            await link.connection.start()

    async def close(self) -> None:
        """Disconnect; every request ends with an error. Idempotent."""
        self._replays.close()
        await asyncio.gather(*(link.connection.close() for link in self.links))

    def changes(self) -> AsyncIterator[bool]:
        """Return `ready`: now, and after every change."""
        return self.links[0].connection.changes()

    def choose(self, avoid: frozenset[str] = frozenset()) -> Link:
        """Return the ready shard that a request should go to, none of the addresses in `avoid`.

        Raises RequestError (503) if there is none.
        """
        for link in self.ready_links:
            if link.address not in avoid:
                return link
        raise unavailable("the shard is not connected; try again when the router is ready")

    async def place(
        self, asked: str | Merge, token: str | None, avoid: frozenset[str] = frozenset()
    ) -> Placement:
        """Choose a shard and resolve the adapter there; another one if it went meanwhile.

        Raises RequestError: what resolving says, or 503 if no shard is left.
        """
        while True:
            link = self.choose(avoid)
            try:
                return Placement(link, await link.resolve(asked, token))
            except RequestError as error:
                # Its source cannot be reached, or the shard, whose connection is about to break.
                unreachable = error.kind == pb.ERROR_KIND_UNAVAILABLE
                avoid |= {link.address}
                if not unreachable or not any(r.address not in avoid for r in self.ready_links):
                    raise

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._replays.check()
        for link in self.links:
            link.check()

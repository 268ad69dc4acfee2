"""Which shard a request goes to: chosen by `routing`, where its adapter can be resolved."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import BASE, AdapterFacts
from loralane_router.adapters.names import Names
from loralane_router.errors import RequestError
from loralane_router.fleet import routing
from loralane_router.fleet.link import Link
from loralane_router.fleet.routing import Need
from loralane_router.fleet.shards import unavailable
from loralane_router.metrics.counters import Metrics
from loralane_router.queueing.deadlines import AdapterWait
from loralane_router.requests import Merge

#: Lanes of an adapter of which nothing is known yet: the smallest that there are.
_UNKNOWN_LANES: Final = 8
#: What is true of one shard alone: it or its source cannot be reached, pinned adapters hold its
#: lanes, it has too few. All else is true of the request.
_MAY_WORK_ELSEWHERE: Final = frozenset(
    {pb.ERROR_KIND_UNAVAILABLE, pb.ERROR_KIND_OVERLOADED, pb.ERROR_KIND_TOO_LARGE}
)


class Shards(Protocol):
    """What is needed of a fleet."""

    names: Names

    @property
    def links(self) -> Sequence[Link]:
        """Every shard that is known, connected or not."""
        ...

    @property
    def ready_links(self) -> Sequence[Link]:
        """The shards that answer."""
        ...

    def connected(self) -> Sequence[Link]:
        """Return the same. Raises RequestError (503) if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes, and its adapter there."""

    link: Link
    adapter: AdapterFacts
    #: Whether it is the base in an adapter's place, which was not ready in time.
    is_fallback: bool = False


class Placing:
    """Gives requests their shards. Owned by the fleet, on the router's event loop."""

    def __init__(self, shards: Shards, metrics: Metrics) -> None:
        self._shards = shards
        self._metrics = metrics
        #: How many shards were chosen.
        self._choices = 0

    @property
    def ready_links(self) -> Sequence[Link]:
        """The shards that answer."""
        return self._shards.ready_links

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
        return links[routing.choose(views, need, self._choices)]

    def need(self, asked: str | Merge, tokens: int) -> Need:
        """Return what a request needs, as far as it is known before its adapter is resolved."""
        facts = self.last_seen(asked)
        if facts is None:
            return Need(tokens, lanes=_UNKNOWN_LANES)
        if not facts.digest:
            return Need(tokens)
        return Need(tokens, facts.lanes, facts.bytes, facts.digest)

    def last_seen(self, asked: str | Merge) -> AdapterFacts | None:
        """Return an adapter as some shard last described it; None if it was never asked for."""
        if not isinstance(asked, Merge) and self._shards.names.is_base(asked):
            return BASE
        found = (link.registry.find(asked) for link in self._shards.links)
        return next((facts for facts in found if facts is not None), None)

    async def place(
        self,
        asked: str | Merge,
        token: str | None,
        avoid: frozenset[str] = frozenset(),
        tokens: int = 0,
    ) -> Placement:
        """Choose a shard and resolve the adapter there; another one if it has no place for it.

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
                    link.dispatcher.check_lanes(adapter)
                    return Placement(link, adapter)
                error = unavailable("the shard went away; try again")
            except RequestError as failed:
                error = failed
            avoid |= {link.address}
            if error.kind not in _MAY_WORK_ELSEWHERE or not self._others(asked, avoid):
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

    def _able(self, asked: str | Merge) -> list[Link]:
        """Return the shards that can know a name. Raises RequestError (503) if there is none."""
        able = [link for link in self._shards.connected() if self._is_able(link, asked)]
        if not able:
            raise unavailable("no shard that was given this alias is connected; try again later")
        return able

    def _is_able(self, link: Link, asked: str | Merge) -> bool:
        names = [name for name, _ in asked.members] if isinstance(asked, Merge) else [asked]
        return all(self._shards.names.means_the_same(name, link.address) for name in names)

    def _others(self, asked: str | Merge, avoid: frozenset[str]) -> bool:
        others = (link for link in self._shards.ready_links if link.address not in avoid)
        return any(self._is_able(link, asked) for link in others)


def _called(asked: str | Merge) -> str:
    return asked if isinstance(asked, str) else " + ".join(name for name, _ in asked.members)

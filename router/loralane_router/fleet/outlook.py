"""What a request would meet on one shard: the view that the choice between shards is made by.

A request counts from the moment that the shard is chosen for it: while its adapter is resolved
there, the dispatcher does not know of it yet, and others that arrive meanwhile must.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from loralane_router.adapters.facts import AdapterFacts
from loralane_router.adapters.registry import Registry
from loralane_router.fleet.load import Load
from loralane_router.fleet.routing import Need, ShardView
from loralane_router.queueing.dispatch import Dispatcher
from loralane_router.requests import Merge


class Outlook:
    """One shard's queue and adapters as a `ShardView`. Owned by its link."""

    def __init__(self, registry: Registry, dispatcher: Dispatcher) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        #: Requests that are being resolved here, and the tokens of their prompts.
        self._coming = 0
        self._coming_tokens = 0
        #: Names of adapters that such requests make the shard read, each as often as it is asked.
        self._fetching: Counter[str | Merge] = Counter()
        #: The digests in `_cold_in` that are not on the device.
        self._cold: frozenset[str] = frozenset()
        self._cold_in: Load | None = None

    def view(self, asked: str | Merge, need: Need) -> ShardView:
        """Return what is known of this shard, and of the adapter that is asked for, here."""
        load = self._dispatcher.load()
        cold = self._cold_of(load)
        return replace(
            load.view,
            waiting=load.view.waiting + self._coming,
            queued_tokens=load.view.queued_tokens + self._coming_tokens,
            loads=len(cold) + len(self._fetching),
            tier=self._tier(asked, need, cold),
        )

    @contextmanager
    def expecting(self, asked: str | Merge, need: Need) -> Iterator[None]:
        """Count a request as one that waits while its adapter is being resolved here."""
        cold = self._cold_of(self._dispatcher.load())
        fetched = self._tier(asked, need, cold) not in ("device", "loading")
        self._coming += 1
        self._coming_tokens += need.tokens
        if fetched or asked in self._fetching:
            self._fetching[asked] += 1
            fetched = True
        try:
            yield
        finally:
            self._coming -= 1
            self._coming_tokens -= need.tokens
            if fetched:
                self._fetching -= Counter([asked])

    def check(self) -> None:
        """Assert that what is counted is there."""
        assert self._coming >= self._fetching.total()
        assert self._coming_tokens >= 0
        assert all(number > 0 for number in self._fetching.values())

    def _tier(self, asked: str | Merge, need: Need, cold: frozenset[str]) -> str:
        if not need.lanes:
            return "device"
        facts = self._registry.find(asked) or self._registry.known(need.digest)
        if facts is not None and facts.tier == "device":
            return "device"
        if asked in self._fetching or (facts is not None and facts.digest in cold):
            return "loading"
        return "remote" if facts is None else facts.tier

    def _cold_of(self, load: Load) -> frozenset[str]:
        """Return the adapters that requests here want and that are not on the device."""
        if self._cold_in is not load:
            known = self._registry.known
            self._cold = frozenset(digest for digest in load.wanted if _is_cold(known(digest)))
            self._cold_in = load
        return self._cold


def _is_cold(facts: AdapterFacts | None) -> bool:
    return facts is None or facts.tier != "device"

"""Whose turn it is: virtual token counters, one for each flow.

A flow is what shares are given to: an adapter, or an API key that has a weight. Its counter is what
it was served, in weighted tokens; who waits with the least counter goes first. Whoever begins to
wait is lifted to the least counter among those who wait already: nobody saves up a share that was
not asked for. (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.)

**What this guarantees.** Let two flows wait from t to u, on each shard that serves either of them,
for requests that fit whenever a row is given away. With P the longest prompt, M the longest answer,
R the rows of these shards and w the lesser weight, neither is served more than

    B = (PROMPT_COST * P + ANSWER_COST * M * R) / w

weighted tokens more than the other, beyond what the other's counter led by at t (which is caught
up) and what it got by age (`admission`: one admission in eight may go by age). For a request is
admitted by share only while its flow's counter is the lesser. That adds its prompt; afterwards the
flow gains only what its rows, at most R, have still to generate, while the other's counter does not
fall. So counters that have waited together stay within B, and what is served within 2 B. A flow
that has its share of the rows may stand aside (`kept_rows`); beside it B is LEAD * R / w more.
"""

from typing import Final

from loralane_router.queueing.lazy_heap import LazyHeap
from loralane_router.queueing.weights import Weights

#: Weighted tokens: a prompt is computed many tokens at a time, an answer one a step.
PROMPT_COST: Final = 1
ANSWER_COST: Final = 2
#: Counters kept of flows that do not wait, and digests known by a name with a weight.
_MOST_IDLE: Final = 4096


class FairShares:
    """Counters of all flows of one router; every dispatcher of it charges them.

    A flow that does not wait is forgotten when its counter is no greater than the least of those
    who wait: it would be lifted to that anyway. Beyond `_MOST_IDLE` such flows the one that has
    been idle longest is forgotten too. All it gains is what it was served beyond others when it
    last waited, at most B above, once; a client that names a fresh adapter gains as much.
    """

    def __init__(self, weights: Weights | None = None) -> None:
        self._weights = Weights() if weights is None else weights
        #: Weights by digest, of adapters that were named by a name with a weight.
        self._by_digest: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        #: Waiting requests by flow.
        self._waiting: dict[str, int] = {}
        #: Flows that have a counter and do not wait, the longest idle first.
        self._idle: dict[str, None] = {}
        #: The least counter among those who wait; while nobody does, what the last one had.
        self._floor = 0.0
        self._by_counter: LazyHeap[str] = LazyHeap(self._counters.__getitem__)

    def flow_of(self, key: str | None, adapter: str, digest: str) -> str:
        """Return the flow of a request: its API key's, if that has a weight, or its adapter's.

        adapter: as the request named it ("" = the base), which may give the digest a weight; the
        greatest, where several names do.
        """
        if (flow := self.key_flow(key)) is not None:
            return flow
        if (weight := self._weights.adapters.get(adapter)) is not None:
            self._by_digest[digest] = max(weight, self._by_digest.pop(digest, 0.0))
            if len(self._by_digest) > _MOST_IDLE:
                del self._by_digest[next(iter(self._by_digest))]
        return digest

    def key_flow(self, key: str | None) -> str | None:
        """Return the flow of an API key that has a weight, whatever it asks for; else None."""
        return self._weights.key_flow(key)

    def weight_of(self, flow: str) -> float:
        """Return the weight of a flow; 1 unless it was given another."""
        return self._weights.keys.get(flow) or self._by_digest.get(flow, 1.0)

    def counter(self, flow: str) -> float:
        """Return what a flow was served, in weighted tokens, or was lifted to."""
        return self._counters.get(flow, self._floor)

    def enter(self, flow: str) -> None:
        """Count one more waiting request of a flow."""
        if flow not in self._waiting:
            self._counters[flow] = max(self.counter(flow), self._least())
            self._idle.pop(flow, None)
            self._waiting[flow] = 0
            self._by_counter.put(flow)
        self._waiting[flow] += 1

    def leave(self, flow: str) -> None:
        """Count one waiting request of a flow less: admitted (charge it first), or gone."""
        self._waiting[flow] -= 1
        if self._waiting[flow]:
            return
        self._least()
        del self._waiting[flow]
        self._by_counter.remove(flow)
        self._idle[flow] = None
        if not self._waiting:
            self._floor = max(self._floor, self._counters[flow])
        self._forget()

    def charge(self, flow: str, *, prompt: int = 0, generated: int = 0) -> None:
        """Count what a flow was served: tokens of a prompt that is admitted, tokens generated."""
        cost = (PROMPT_COST * prompt + ANSWER_COST * generated) / self.weight_of(flow)
        is_new = flow not in self._counters
        self._counters[flow] = self.counter(flow) + cost
        if is_new:
            self._idle[flow] = None
            self._forget()

    def check(self) -> None:
        """Assert that each counter belongs to a flow that waits or is idle, and the bounds."""
        assert self._counters.keys() == self._waiting.keys() | self._idle.keys()
        assert not self._waiting.keys() & self._idle.keys()
        assert all(count > 0 for count in self._waiting.values())
        assert len(self._by_counter) == len(self._waiting)
        assert all(self._counters[flow] >= self._floor for flow in self._waiting)
        assert max(len(self._by_digest), len(self._idle)) <= _MOST_IDLE
        self._by_counter.check()

    def _least(self) -> float:
        """Return the least counter among those who wait; it never falls."""
        first = self._by_counter.first()
        if first is not None:
            self._floor = max(self._floor, self._counters[first])
        return self._floor

    def _forget(self) -> None:
        while self._idle:
            longest = next(iter(self._idle))
            if self._counters[longest] > self._floor and len(self._idle) <= _MOST_IDLE:
                break
            del self._idle[longest], self._counters[longest]

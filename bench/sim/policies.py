"""Rules for choosing a shard: the product's, and those that others use.

The others see more than they would in life: counts and residency without any delay, except where
the delay is what is known of them (llm-d).
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeAlias

from loralane_router.fleet.routing import Need, choose

from bench.sim.front import Front
from bench.sim.shard import Row

#: Bounded loads: how far above the mean a load may be (what the documentation of Envoy suggests).
_BOUND: Final = 1.25
#: llm-d reads metrics so often, seconds; a shard's KV cache holds so many tokens.
_SCRAPE_S: Final = 0.05
_KV_TOKENS: Final = 80_000
_SEED: Final = 0

#: From all shards, a request and the time to the index of the shard. Called once for each request,
#: in the order in which they come.
Policy: TypeAlias = Callable[[Sequence[Front], Row, float], int]


def expected_time() -> Policy:
    """Return the product's own: `routing.choose`."""
    turns = count()

    def policy(fronts: Sequence[Front], row: Row, now: float) -> int:
        need = Need(tokens=row.prompt, lanes=1, digest=row.adapter)
        return choose([front.view(row.adapter) for front in fronts], need, next(turns))

    return policy


def any_shard() -> Policy:
    """Return the rule that does not look."""
    rng = random.Random(_SEED)
    return lambda fronts, row, now: rng.randrange(len(fronts))


def round_robin() -> Policy:
    """Return the rule by which shards take turns."""
    turns = count()
    return lambda fronts, row, now: next(turns) % len(fronts)


def least_loaded() -> Policy:
    """Return the rule that takes the one with the fewest requests, of several any."""
    rng = random.Random(_SEED)
    return lambda fronts, row, now: min(
        range(len(fronts)), key=lambda i: (fronts[i].requests, rng.random())
    )


def power_of_two() -> Policy:
    """Return the rule that draws two and takes the one with fewer requests."""
    rng = random.Random(_SEED)
    return lambda fronts, row, now: _fewer(fronts, rng.sample(range(len(fronts)), 2))


def bounded_hash() -> Policy:
    """Return the rule that takes the adapter's home, or the next of its homes below the bound.

    Homes are in the order of rendezvous hashing; the bound is 1.25 times the mean of requests.
    """
    homes: dict[str, list[int]] = {}

    def policy(fronts: Sequence[Front], row: Row, now: float) -> int:
        if row.adapter not in homes:
            homes[row.adapter] = sorted(range(len(fronts)), key=lambda i: _hash(row.adapter, i))
        total = sum(front.requests for front in fronts) + 1
        bound = math.ceil(_BOUND * total / len(fronts))
        return next(i for i in homes[row.adapter] if fronts[i].requests < bound)

    return policy


def ray_multiplex() -> Policy:
    """Return Ray Serve's rule for multiplexed models.

    Of two that hold the adapter and have a free row, the one with fewer requests; without any, of
    two of those with the fewest adapters.
    """
    rng = random.Random(_SEED)

    def policy(fronts: Sequence[Front], row: Row, now: float) -> int:
        holders = [
            i for i, front in enumerate(fronts) if front.holds(row.adapter) and front.has_free_rows
        ]
        if not holders:
            counts = [(front.adapters, rng.random(), i) for i, front in enumerate(fronts)]
            holders = [i for _, _, i in sorted(counts)[:2]]
        return _fewer(fronts, rng.sample(holders, min(2, len(holders))))

    return policy


@dataclass(frozen=True, slots=True)
class _Scraped:
    running: frozenset[str]
    waiting: frozenset[str]
    queue: int
    kv_tokens: int

    def adapter_score(self, adapter: str, slots: int) -> float:
        if adapter in self.running:
            return 1.0
        if len(self.running) + len(self.waiting) < slots:
            return 0.8
        return 0.6 if adapter in self.waiting else 0.0


def llm_d() -> Policy:
    """Return llm-d's rule as it is coded: the greatest sum of three scores on scraped metrics.

    Adapter: 1 if a request that runs uses it, 0.8 if there is room for one more, 0.6 if one waits
    for it, else 0. Queue: 1 for the shortest, 0 for the longest. KV cache: the share that is free.
    """
    rng = random.Random(_SEED)
    scraped: list[_Scraped] = []
    scraped_at = -math.inf

    def policy(fronts: Sequence[Front], row: Row, now: float) -> int:
        nonlocal scraped_at
        if now - scraped_at >= _SCRAPE_S:
            scraped_at = now
            scraped[:] = [_Scraped(*front.metrics()) for front in fronts]
        queues = [shard.queue for shard in scraped]
        longest, spread = max(queues), max(queues) - min(queues)
        scores = [
            shard.adapter_score(row.adapter, front.slots)
            + ((longest - shard.queue) / spread if spread else 1.0)
            + max(0.0, 1 - shard.kv_tokens / _KV_TOKENS)
            for shard, front in zip(scraped, fronts, strict=True)
        ]
        best = max(scores) - 1e-9
        return rng.choice([i for i, score in enumerate(scores) if score >= best])

    return policy


#: Makers of policies by the names in the tables; the product's first.
POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "expected time": expected_time,
    "random": any_shard,
    "round robin": round_robin,
    "least loaded": least_loaded,
    "power of two": power_of_two,
    "bounded hash": bounded_hash,
    "ray multiplex": ray_multiplex,
    "llm-d": llm_d,
}


def _fewer(fronts: Sequence[Front], among: Sequence[int]) -> int:
    return min(among, key=lambda i: fronts[i].requests)


def _hash(adapter: str, shard: int) -> bytes:
    return hashlib.blake2b(f"{adapter} {shard}".encode(), digest_size=8).digest()

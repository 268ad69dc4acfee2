"""Whose requests come when: adapters by Zipf's law, arrivals from a gamma process.

A trace has a fixed number of requests and unit rate; playing it faster changes only the times. So
two loads, and two policies, see the same requests in the same order.
"""

import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

ADAPTERS: Final = 1000
_RANKS: Final = (8, 16, 32, 64, 128)
#: Of the requests, those in the middle of which a flash crowd comes.
_CROWD: Final = (0.5, 0.8)


@dataclass(frozen=True, slots=True)
class Workload:
    """What distinguishes one kind of traffic from another."""

    name: str
    #: Of Zipf's law: the k-th adapter is asked for in proportion to 1 / k ** exponent.
    exponent: float
    #: Coefficient of variation of the times between arrivals; 1 = Poisson.
    cv: float = 1.0
    #: Share of the requests of a while that is for one adapter which nobody used before.
    crowd: float = 0.0


#: The four that the goals are about.
WORKLOADS: Final = (
    Workload("zipf 0.9 cv 1", 0.9),
    Workload("zipf 0.9 cv 2", 0.9, cv=2.0),
    Workload("zipf 1.2", 1.2),
    Workload("flash crowd", 0.9, crowd=0.3),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at` is in mean times between arrivals."""

    at: float
    adapter: str
    rank: int
    #: Tokens.
    prompt: int
    answer: int


def trace(workload: Workload, requests: int, seed: int) -> list[Arrival]:
    """Return the requests in order; the same for the same arguments."""
    rng = random.Random(seed)
    ranks = [rng.choice(_RANKS) for _ in range(ADAPTERS + 1)]
    shape = 1 / workload.cv**2
    adapters = _adapters(workload, requests, rng)
    at = 0.0
    arrivals = []
    for index in adapters:
        at += rng.gammavariate(shape, 1 / shape)
        prompt = max(16, min(4096, int(rng.lognormvariate(6.8, 0.7))))
        answer = max(2, min(1024, int(rng.lognormvariate(4.9, 0.9))))
        arrivals.append(Arrival(at, f"a{index}", ranks[index], prompt, answer))
    return arrivals


def _adapters(workload: Workload, requests: int, rng: random.Random) -> Iterator[int]:
    sums = list(accumulate((k + 1) ** -workload.exponent for k in range(ADAPTERS)))
    begin, end = (share * requests for share in _CROWD)
    for number in range(requests):
        index = bisect(sums, rng.random() * sums[-1])
        if begin <= number < end and rng.random() < workload.crowd:
            index = ADAPTERS
        yield index

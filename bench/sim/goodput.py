"""The highest load that a policy carries: by bisection, on traces that differ only in speed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.sim.cluster import SHARDS, WARM, Cluster, Late
from bench.sim.costs import COSTS, Costs
from bench.sim.policies import Policy
from bench.sim.traces import Arrival

#: In time is a first token within so many seconds; so large a share must be.
LIMIT_S: Final = 1.5
SHARE: Final = 0.99
#: Where the search begins, requests per second, by which factor it goes on, and how close it ends.
_FIRST: Final = 50.0
_FACTOR: Final = 1.2
_PRECISION: Final = 1.01


@dataclass(frozen=True, slots=True)
class Trial:
    """A policy on traces of one kind."""

    policy: Callable[[], Policy]
    traces: Sequence[Sequence[Arrival]]
    costs: Costs = COSTS
    shards: int = SHARDS

    def carries(self, rate: float) -> bool:
        """Whether enough requests of all traces are in time at this load."""
        measured = sum(len(trace) - int(WARM * len(trace)) for trace in self.traces)
        late = Late(LIMIT_S, (1 - SHARE) * measured)
        for trace in self.traces:
            Cluster(self.policy(), self.costs, self.shards).play(trace, rate, late)
            if late.too_many:
                return False
        return True


def goodput(trial: Trial) -> float:
    """Return the highest load, requests per second, up to the precision.

    A policy that fails at some load is taken to fail at every higher one.
    """
    low = high = _FIRST
    if trial.carries(_FIRST):
        while trial.carries(high := high * _FACTOR):
            low = high
    else:
        while not trial.carries(low := low / _FACTOR):
            high = low
    while high / low > _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if trial.carries(middle) else (low, middle)
    return low

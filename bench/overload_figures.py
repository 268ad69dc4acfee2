"""What an overload came to, and what of it is promised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Final

from bench.promises import Promise, at_least, at_most
from bench.traffic import Answer

#: What the project promises.
LEAST_GOODPUT_OF_PEAK, MOST_REFUSAL_MS, MOST_RECOVERY_S = 0.95, 50.0, 5.0
#: What "flat" and "as before" mean here.
MOST_GROWTH, NORMAL = 1.05, 1.5
_OK: Final = 200
_REFUSED: Final = 429


@dataclass(frozen=True, slots=True)
class Measured:
    """All phases; seconds, tokens per second, bytes."""

    #: What the server could do: before the long overload, and after each, the short ones too.
    peaks: Sequence[float]
    #: What it did in the overloads, the long one first.
    goodputs: Sequence[float]
    #: Requests per second: what the server can do, and what was offered.
    can: float
    offered: float
    #: Times to first token at half load before, and of what was accepted in the overload.
    normal_p50: float
    accepted_p50: float
    accepted_p99: float
    refusals_p50: float
    refusals_p99: float
    recovery: float
    #: Of all that was sent in the overload, by status; 0 = cut off.
    statuses: Mapping[int, int]
    #: Of each process: after the first minute, at the end.
    memory: Mapping[str, tuple[int, int]]
    #: What the generator itself took of one core in the overload.
    generator: float

    @property
    def shares(self) -> list[float]:
        """Each overload's goodput, of what the server could do just before and just after it."""
        return [
            goodput / mean(around)
            for goodput, around in zip(self.goodputs, pairwise(self.peaks), strict=True)
        ]


def promises(measured: Measured) -> list[Promise]:
    """Judge a run."""
    refused = measured.statuses.get(_REFUSED, 0)
    odd = sum(measured.statuses.values()) - measured.statuses.get(_OK, 0) - refused
    found = [
        at_least(
            "goodput in overloads, over the peak around each, median:",
            median(measured.shares),
            LEAST_GOODPUT_OF_PEAK,
        ),
        at_most("refusals' p99:", measured.refusals_p99 * 1e3, MOST_REFUSAL_MS, " ms"),
        at_most("first token as before after:", measured.recovery, MOST_RECOVERY_S, " s"),
        Promise(f"{refused} refused, {odd} neither answered nor refused", refused > 0 and not odd),
    ]
    for role, (before, after) in measured.memory.items():
        what = f"{role}'s memory at the end, over that after the first minute:"
        found.append(at_most(what, after / before, MOST_GROWTH))
    return found


def answered(answers: Sequence[Answer]) -> list[Answer]:
    """Return what was accepted and came to its end."""
    return [answer for answer in answers if answer.status == _OK]


def refusals(answers: Sequence[Answer]) -> list[float]:
    """Return how long each refusal took, to its last byte."""
    return [answer.ended - answer.sent for answer in answers if answer.status == _REFUSED]


def show(measured: Measured) -> None:
    """Print what the verdicts rest on."""
    ms = 1e3
    print(
        f"offered {measured.offered:.1f} requests/s, "
        f"{measured.offered / measured.can:.1f} times what it can do; tokens/s:"
    )
    print(f"  at the peak {measured.peaks[0]:.0f}")
    rows = zip(measured.goodputs, measured.shares, measured.peaks[1:], strict=True)
    for n, (goodput, share, peak) in enumerate(rows):
        kind = "short" if n else "long"
        print(f"  in the {kind} overload {goodput:.0f} ({share:.2f}), at the peak {peak:.0f}")
    print(
        f"first token, ms: {measured.normal_p50 * ms:.0f} at half load, in the overload p50 "
        f"{measured.accepted_p50 * ms:.0f}, p99 {measured.accepted_p99 * ms:.0f}"
    )
    print(
        f"refusals, ms: p50 {measured.refusals_p50 * ms:.1f}, p99 {measured.refusals_p99 * ms:.1f};"
        f" answers by status: {dict(measured.statuses)}"
    )
    for role, (before, after) in measured.memory.items():
        print(
            f"{role}: {before / 2**20:.1f} MiB after the first minute, {after / 2**20:.1f} at last"
        )
    print(f"the generator took {measured.generator:.0%} of a core")

"""Gaps between tokens, by what happened meanwhile. Pure functions; seconds in, seconds out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.figures import percentile


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time, by one clock."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """The times between the tokens of all streams in one window."""

    count: int
    p50: float
    p99: float
    largest: float


def gaps_within(streams: Sequence[Sequence[float]], window: Window) -> Gaps:
    """Sum up the gaps that end in a window; each stream is the times of its tokens.

    A gap that began before the window counts whole: what stalls a stream may have begun it.
    """
    found = [gap for stream in streams for gap in _ending_in(stream, window)]
    return Gaps(
        len(found), percentile(found, 0.5), percentile(found, 0.99), max(found, default=0.0)
    )


def _ending_in(stream: Sequence[float], window: Window) -> Iterator[float]:
    for earlier, later in pairwise(stream):
        if window.begin <= later <= window.end:
            yield later - earlier


def worst(stream: Sequence[float], window: Window, count: int) -> list[tuple[float, float]]:
    """Return a stream's longest gaps in a window: (seconds since its begin, length)."""
    ends = [at for at in stream[1:] if window.begin <= at <= window.end]
    gaps = zip(_ending_in(stream, window), ends, strict=True)
    return [(end - window.begin, gap) for gap, end in sorted(gaps, reverse=True)[:count]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A storm between two quiet windows of the same streams."""

    quiet: Gaps
    storm: Gaps
    #: Storm's p99 over quiet's.
    p99_of_quiet: float
    #: The storm's largest gap, in median quiet steps.
    largest_in_steps: float
    #: The same of the quiet windows: what the machine does by itself.
    quiet_largest_in_steps: float


def compare(
    streams: Sequence[Sequence[float]], before: Window, storm: Window, after: Window
) -> Comparison:
    """Compare a storm with what surrounds it; of the quiet windows' figures, the mean."""
    calm = [gaps_within(streams, window) for window in (before, after)]
    quiet = Gaps(
        count=sum(gaps.count for gaps in calm),
        p50=sum(gaps.p50 for gaps in calm) / 2,
        p99=sum(gaps.p99 for gaps in calm) / 2,
        largest=max(gaps.largest for gaps in calm),
    )
    stormy = gaps_within(streams, storm)
    return Comparison(
        quiet=quiet,
        storm=stormy,
        p99_of_quiet=stormy.p99 / quiet.p99,
        largest_in_steps=stormy.largest / quiet.p50,
        quiet_largest_in_steps=quiet.largest / quiet.p50,
    )


@dataclass(frozen=True, slots=True)
class Medians:
    """Medians over several storms; the largest gap of all."""

    quiet_p50: float
    quiet_p99: float
    storm_p50: float
    storm_p99: float
    p99_of_quiet: float
    largest_in_steps: float
    quiet_largest_in_steps: float


def sum_up(comparisons: Sequence[Comparison]) -> Medians:
    """Sum up at least one comparison."""
    return Medians(
        quiet_p50=median(c.quiet.p50 for c in comparisons),
        quiet_p99=median(c.quiet.p99 for c in comparisons),
        storm_p50=median(c.storm.p50 for c in comparisons),
        storm_p99=median(c.storm.p99 for c in comparisons),
        p99_of_quiet=median(c.p99_of_quiet for c in comparisons),
        largest_in_steps=max(c.largest_in_steps for c in comparisons),
        quiet_largest_in_steps=max(c.quiet_largest_in_steps for c in comparisons),
    )

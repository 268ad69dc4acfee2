"""Steps as the loop makes them, by hand or drawn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from loralane_server.device.seam import Sampling, Span, StepInput

#: More than rows of a step can own.
_PAGES = 20_011

#: Start, length, KV pages, lane pages.
Part = tuple[int, int, Iterable[int], tuple[int, ...]]


@dataclass(frozen=True)
class Limits:
    rows: int
    length: int
    lanes: int
    step_tokens: int


def step_of(parts: Sequence[Part], sampled: Sequence[int] | None = None) -> StepInput:
    """A step whose tokens are 100, 101, ...; `sampled`: which rows, None = all."""
    spans = [
        Span(start, length, np.array(list(pages), dtype=np.int32), lane_pages)
        for start, length, pages, lane_pages in parts
    ]
    ends = np.cumsum([span.length for span in spans]) - 1
    chosen = range(len(spans)) if sampled is None else sampled
    return StepInput(
        tokens=np.arange(100, 101 + ends[-1], dtype=np.int32),
        positions=np.concatenate(
            [np.arange(s.start, s.start + s.length, dtype=np.int32) for s in spans]
        ),
        spans=spans,
        sample_at=ends[list(chosen)].astype(np.int32),
        sampling=[Sampling() for _ in chosen],
    )


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    return Limits(
        rows=draw(st.integers(1, 70)),
        length=draw(st.integers(1, 3000)),
        lanes=draw(st.integers(0, 1100)),
        step_tokens=draw(st.integers(1, 700)),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[Limits, StepInput]:
    """A step within limits: rows own pages and adapters own lane pages that nobody else has."""
    bounds = draw(limits())
    rows = draw(st.integers(1, bounds.rows))
    lengths = draw(_lengths(rows, bounds))
    starts = [draw(st.integers(0, bounds.length - n)) for n in lengths]
    adapters = draw(_adapters(bounds.lanes // 8))
    stride = draw(st.integers(1, _PAGES - 1))
    pages = (i * stride % _PAGES for i in range(_PAGES))  # each once: a prime
    parts: list[Part] = []
    for start, length in zip(starts, lengths, strict=True):
        count = -(-(start + length) // 16) + draw(st.integers(0, 1))
        own = draw(st.sampled_from(adapters))
        parts.append((start, length, [next(pages) for _ in range(count)], own))
    parts.sort(key=lambda part: (part[1] > 1, not part[3]))
    sampled = [i for i in range(rows) if draw(st.booleans())]
    return bounds, step_of(parts, sampled)


@st.composite
def _lengths(draw: st.DrawFn, rows: int, bounds: Limits) -> list[int]:
    left = max(bounds.step_tokens, bounds.rows) - rows
    lengths = []
    for _ in range(rows):
        most = min(left, bounds.length - 1) if bounds.step_tokens > 1 else 0
        more = draw(st.integers(0, most)) if draw(st.booleans()) else 0
        left -= more
        lengths.append(1 + more)
    return lengths


@st.composite
def _adapters(draw: st.DrawFn, lane_pages: int) -> list[tuple[int, ...]]:
    """Some adapters' lane pages, ascending, none shared; () = the base."""
    adapters: list[tuple[int, ...]] = [()]
    if lane_pages:
        pages = draw(st.lists(st.integers(0, lane_pages - 1), unique=True, max_size=12))
        while pages:
            count = draw(st.integers(1, min(4, len(pages))))
            adapters.append(tuple(sorted(pages[:count])))
            pages = pages[count:]
    return adapters

"""What tenants got: rates, waits and recovery, from their answers. Pure; seconds in and out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import Final

from bench.figures import percentile
from bench.traffic import Answer, NothingServed
from bench.windows import Window

#: So many requests in a row make a median that one slow request does not decide.
_ROW: Final = 5


def tokens_within(answers: Sequence[Answer], window: Window) -> float:
    """Return how many generated tokens came in a window, also those of unfinished answers."""
    return sum(
        sum(window.begin <= at <= window.end for at in answer.times) * answer.tokens_of_an_event
        for answer in answers
    )


def rate_within(answers: Sequence[Answer], window: Window) -> float:
    """Return generated tokens per second of a window."""
    return tokens_within(answers, window) / (window.end - window.begin)


def capacity(answers: Sequence[Answer], window: Window) -> float:
    """Return generated tokens per second of a window. Raises NothingServed."""
    rate = rate_within(answers, window)
    if not rate:
        raise NothingServed(f"no request was answered; by status: {statuses(answers)}")
    return rate


def sent_within(answers: Sequence[Answer], window: Window) -> list[Answer]:
    """Return the answers to what was sent in a window."""
    return [answer for answer in answers if window.begin <= answer.sent <= window.end]


def waited_within(answers: Sequence[Answer], window: Window) -> list[Answer]:
    """Return the answers to what waited for its first token at some time of a window."""
    return [a for a in answers if a.sent <= window.end and a.sent + a.first >= window.begin]


def first_tokens(answers: Sequence[Answer], share: float) -> float:
    """Return a percentile of the times to first token; infinite if that one never had any."""
    return percentile([answer.first for answer in answers], share) if answers else inf


def statuses(answers: Sequence[Answer]) -> dict[int, int]:
    """Count the answers by status."""
    return dict(Counter(answer.status for answer in answers))


def by_tenant(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Sort the answers by tenant."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.tenant, []).append(answer)
    return found


def served(answers: Sequence[Answer], window: Window, step: float) -> list[float]:
    """Return how many tokens had come by the end of each step of a window."""
    steps = int((window.end - window.begin) / step)
    counts = [0.0] * steps
    for answer in answers:
        for at in answer.times:
            index = int((at - window.begin) // step)
            if 0 <= index < steps:
                counts[index] += answer.tokens_of_an_event
    return [sum(counts[: n + 1]) for n in range(steps)]


def least_of_fair(done: Mapping[str, float], tenants: Sequence[str]) -> float:
    """Return what the worst tenant got, over an equal share of what all got; 0 if nobody did."""
    total = sum(done.get(tenant, 0.0) for tenant in tenants)
    if not total:
        return 0.0
    return min(done.get(tenant, 0.0) for tenant in tenants) / (total / len(tenants))


def recovered_after(answers: Sequence[Answer], since: float, normal: float, factor: float) -> float:
    """Return how long after `since` time to first token is normal again; infinite if never.

    That is when the first of five requests in a row was sent whose median is at most `factor`
    times `normal`; a request that was refused counts as one that waited for ever.
    """
    later = sorted((a.sent, a.first) for a in answers if a.sent >= since)
    for n in range(len(later) - _ROW + 1):
        row = later[n : n + _ROW]
        if median(first for _, first in row) <= factor * normal:
            return row[0][0] - since
    return inf


def growth(samples: Sequence[tuple[float, int]], settled_at: float) -> tuple[int, int]:
    """Return (bytes at the first sample that is not before `settled_at`, bytes at the last one).

    samples: (seconds, bytes) in the order of time, at least one.
    """
    settled = next((size for at, size in samples if at >= settled_at), samples[-1][1])
    return settled, samples[-1][1]

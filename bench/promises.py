"""What a benchmark promises, whether it holds, and the exit status that says so."""

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from demo.serving import NotServing

T = TypeVar("T")


class NotMeasured(Exception):
    """A benchmark could not measure what it judges; the message says why."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise, measured."""

    what: str
    holds: bool

    @property
    def line(self) -> str:
        """The verdict."""
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.what}"


def at_most(name: str, value: float, most: float, unit: str = "") -> Promise:
    """Promise an upper bound. What could not be measured is infinite, or no number: not held."""
    return Promise(f"{name} {value:.2f}{unit}, at most {most:.2f}{unit}", value <= most)


def at_least(name: str, value: float, least: float, unit: str = "") -> Promise:
    """Promise a lower bound. What could not be measured is no number: not held."""
    return Promise(f"{name} {value:.2f}{unit}, at least {least:.2f}{unit}", value >= least)


def conclude(promises: Sequence[Promise]) -> int:
    """Print every verdict; return the exit status: 0 if all hold."""
    for promise in promises:
        print(promise.line)
    return 0 if promises and all(promise.holds for promise in promises) else 1


def run(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return what a benchmark measures within so many seconds.

    Otherwise print the verdict, and exit with status 1: it never runs for ever.
    """
    try:
        return asyncio.run(_within(seconds, work))
    except (NotMeasured, NotServing) as exc:
        print(Promise(str(exc), holds=False).line)
        sys.exit(1)


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as exc:
        raise NotMeasured(f"not done within {seconds:.0f} s; raise --limit, or ask less") from exc

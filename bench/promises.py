"""What a benchmark promises, whether it holds, and the exit status that says so."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


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


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return what a benchmark measures, or raise TimeoutError: it never runs for ever."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as exc:
        raise TimeoutError(f"not done within {seconds:.0f} s: raise --limit, or ask less") from exc

"""Memory and processor time of a product's processes, sampled while it works."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import psutil

ROUTER, SHARD = "router", "shard"
_PACKAGES: Final = {ROUTER: "loralane_router", SHARD: "loralane_server"}


def product() -> dict[str, psutil.Process]:
    """Return the router and the shard that this process has started; RuntimeError without both."""
    children = psutil.Process().children(recursive=True)
    found = {
        role: next((child for child in children if package in child.cmdline()), None)
        for role, package in _PACKAGES.items()
    }
    running = {role: process for role, process in found.items() if process is not None}
    if len(running) != len(found):
        raise RuntimeError(f"no process runs {set(_PACKAGES) - set(running)}")
    return running


@dataclass(frozen=True, slots=True)
class Samples:
    """Of each process: (`perf_counter`, resident bytes), in the order of time."""

    memory: Mapping[str, list[tuple[float, int]]] = field(
        default_factory=lambda: {role: [] for role in _PACKAGES}
    )

    def take(self, processes: Mapping[str, psutil.Process]) -> None:
        """Take one of each."""
        for role, process in processes.items():
            self.memory[role].append((time.perf_counter(), process.memory_info().rss))


@asynccontextmanager
async def sampling(every_s: float) -> AsyncIterator[Samples]:
    """Sample the product's processes until the block ends, once more at its end."""
    processes, samples = product(), Samples()

    async def keep() -> None:
        while True:
            samples.take(processes)
            await asyncio.sleep(every_s)

    keeping = asyncio.create_task(keep())
    try:
        yield samples
        samples.take(processes)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

"""Two shards of one model behind one router, and what the router says of them."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Final

import httpx

from bench.commands import Command

_SHARD_READY: Final = r"^ready (\S+)"
_ROUTER_READY: Final = r" on (http://\S+)"
_TICK_S: Final = 0.02


class Pair:
    """Two shards of one model behind one router."""

    def __init__(self, shards: list[Command], shard_flags: Sequence[str], router: Command) -> None:
        self._shards = shards
        self._flags = shard_flags
        self._router = router
        self.addresses = [shard.ready for shard in shards]
        self.url = router.ready

    @classmethod
    @asynccontextmanager
    async def running(cls, shard_flags: Sequence[str]) -> AsyncIterator["Pair"]:
        """Start all three; stop what is left of them at the end. Raises NotReady."""
        commands: list[Command] = []
        try:
            for _ in range(2):
                flags = ["shard", "--listen=127.0.0.1:0", *shard_flags]
                commands.append(await Command.start(flags, _SHARD_READY))
            both = [f"--shard={shard.ready}" for shard in commands]
            router = await Command.start(["router", "--port=0", *both], _ROUTER_READY)
            pair = cls(commands, shard_flags, router)
            commands = pair._shards
            try:
                yield pair
            finally:
                await router.stop()
        finally:
            for shard in commands:
                await shard.stop()

    async def kill(self) -> None:
        """Kill the first shard."""
        await self._shards[0].kill()

    async def restart(self) -> None:
        """Start the first shard again where it was, and return when it is ready."""
        flags = ["shard", f"--listen={self.addresses[0]}", *self._flags]
        self._shards[0] = await Command.start(flags, _SHARD_READY)


class Metrics:
    """What the router says of itself."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def up(self, address: str) -> bool:
        """Whether it uses a shard."""
        page = (await self._http.get("/metrics")).text
        pattern = rf'^loralane_shard_up{{[^}}]*shard="{re.escape(address)}"[^}}]*}} 1'
        return re.search(pattern, page, re.MULTILINE) is not None

    async def wait_up(self, address: str, within_s: float) -> float:
        """Return the seconds until it uses a shard; infinite if it does not in time."""
        began = time.perf_counter()
        while time.perf_counter() - began < within_s:
            if await self.up(address):
                return time.perf_counter() - began
            await asyncio.sleep(_TICK_S)
        return inf

    async def replays(self) -> dict[str, float]:
        """Return how many requests lost their shard, by what became of them."""
        page = (await self._http.get("/metrics")).text
        found = re.findall(r"^loralane_replays_total{([^}]*)} (\S+)", page, re.MULTILINE)
        return {labels: float(count) for labels, count in found}

"""Which shards there are: the addresses that were given, and those that names have in DNS."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from loralane_router.config import dns_name

_log = logging.getLogger(__name__)

#: Returns the addresses (`HOST:PORT`) that a name has now. Raises OSError if it cannot be told.
Lookup = Callable[[str, int], Awaitable[Iterable[str]]]


async def lookup(name: str, port: int) -> set[str]:
    """Ask the machine's resolver. Raises OSError, UnicodeError for what can be no name."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for *_, address in found}
    return {f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts}


class Discovery:
    """Addresses of shards as last seen. Owned by the fleet."""

    def __init__(self, given: Sequence[str], lookup: Lookup = lookup) -> None:
        self._lookup = lookup
        #: What was given, and the addresses that stand for it.
        self._found: dict[str, tuple[str, ...]] = {
            spec: () if dns_name(spec) else (spec,) for spec in given
        }
        #: Names whose last lookup failed.
        self._failing: set[str] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address once, in the order in which they were given."""
        return tuple(dict.fromkeys(address for found in self._found.values() for address in found))

    @property
    def asks(self) -> bool:
        """Whether there is a name, so that addresses come and go."""
        return any(dns_name(spec) for spec in self._found)

    async def look(self) -> None:
        """Ask for every name again. One that cannot be looked up keeps the addresses it had."""
        await asyncio.gather(*(self._look(spec) for spec in self._found))

    async def _look(self, spec: str) -> None:
        if (asked := dns_name(spec)) is None:
            return
        try:
            found = await self._lookup(*asked)
        except (OSError, UnicodeError) as exc:
            if spec not in self._failing:
                _log.warning("shards: %s cannot be looked up: %s", spec, exc)
            self._failing.add(spec)
        else:
            self._failing.discard(spec)
            self._found[spec] = tuple(sorted(found))

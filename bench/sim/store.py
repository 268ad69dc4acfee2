"""Adapters of one simulated shard: on the device, in host memory, or in the store far away."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

from bench.sim.costs import Costs
from bench.sim.events import Events

DEVICE: Final = "device"
HOST: Final = "host"
REMOTE: Final = "remote"


class Store:
    """Who is where. Evicts the least recently used; on the device, of those that no row uses."""

    def __init__(
        self,
        events: Events,
        costs: Costs,
        ready: Callable[[str], None],
        moved: Callable[[str, str], None],
    ) -> None:
        """`ready(adapter)`: its rows may begin. `moved(adapter, tier)`: what the router is told."""
        self._events = events
        self._costs = costs
        self._ready = ready
        self._moved = moved
        #: Resident, the least recently used first.
        self._device: OrderedDict[str, None] = OrderedDict()
        self._host: OrderedDict[str, None] = OrderedDict()
        #: On their way into host memory.
        self._fetching: set[str] = set()
        #: They have a slot, and are not resident yet.
        self._loading: set[str] = set()
        #: Rows by adapter.
        self._users: Counter[str] = Counter()
        #: When the last of the copies to the device ends.
        self._copies_end = 0.0
        self.fetches = 0
        self.copies = 0

    @property
    def adapters_in_use(self) -> int:
        """How many adapters rows refer to."""
        return len(self._users)

    def tier(self, adapter: str) -> str:
        """Return where an adapter is."""
        if adapter in self._device:
            return DEVICE
        return HOST if adapter in self._host else REMOTE

    def read(self, adapter: str) -> None:
        """Bring an adapter to host memory, since it is about to be used."""
        if adapter in self._host:
            self._host.move_to_end(adapter)
        elif adapter not in self._device and adapter not in self._fetching:
            self.fetches += 1
            self._fetching.add(adapter)
            self._events.at(self._events.now + self._costs.fetch_s, lambda: self._fetched(adapter))

    def hold(self, adapter: str) -> bool:
        """Let one more row use an adapter; return whether it is resident, else it is loaded."""
        self._users[adapter] += 1
        if adapter in self._device:
            self._device.move_to_end(adapter)
            return True
        if adapter not in self._loading:
            self._make_room()
            self._loading.add(adapter)
            self.read(adapter)
            if adapter in self._host:
                self._copy(adapter)
        return False

    def release(self, adapter: str) -> None:
        """Take note that a row has ended."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]

    def check(self) -> None:
        """Assert what must hold between calls."""
        assert len(self._device) + len(self._loading) <= self._costs.slots
        assert len(self._host) <= self._costs.host_adapters
        assert not self._loading & self._device.keys()
        assert not self._fetching & self._host.keys()
        assert self._users.keys() <= self._device.keys() | self._loading

    def _make_room(self) -> None:
        if len(self._device) + len(self._loading) < self._costs.slots:
            return
        idle = next((a for a in self._device if a not in self._users), None)
        assert idle is not None, "more adapters were admitted than there are slots"
        del self._device[idle]
        self._moved(idle, self.tier(idle))

    def _copy(self, adapter: str) -> None:
        self._copies_end = max(self._copies_end, self._events.now) + self._costs.copy_s
        self.copies += 1
        self._events.at(self._copies_end, lambda: self._copied(adapter))

    def _copied(self, adapter: str) -> None:
        self._loading.remove(adapter)
        self._device[adapter] = None
        self._moved(adapter, DEVICE)
        self._ready(adapter)

    def _fetched(self, adapter: str) -> None:
        self._fetching.remove(adapter)
        self._host[adapter] = None
        self._moved(adapter, HOST)
        if len(self._host) > self._costs.host_adapters:
            gone, _ = self._host.popitem(last=False)
            if gone not in self._device:
                self._moved(gone, REMOTE)
        if adapter in self._loading:
            self._copy(adapter)

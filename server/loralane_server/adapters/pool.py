"""The books of the adapter pool: who owns which lane pages, who is in use, who may be evicted.

Decisions only: no tensor and no clock. The tensors behind the lanes belong to the device, and the
engine's thread is the only one that touches either. Others may read who owns lanes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from loralane_server.errors import AdapterInUse, AdapterTooLarge, Overloaded

#: Lanes in a lane page: an adapter owns whole pages.
LANE_PAGE = 8


def lanes_for(rank: int) -> int:
    """Return how many lanes an adapter of this rank owns: its rank in whole lane pages."""
    return -(-rank // LANE_PAGE) * LANE_PAGE


@dataclass(frozen=True, slots=True)
class Tenant:
    """One adapter's place in the pool, as it was when it was asked for."""

    digest: str
    #: Lane pages, ascending; its lanes in order.
    pages: tuple[int, ...]
    #: Whether all its lanes are written. Rows wait until then.
    resident: bool = False
    #: Rows that refer to it. Its lanes are neither rewritten nor evicted while this is not 0.
    users: int = 0
    pinned: bool = False
    #: Order of last use; the smallest is evicted first.
    used: int = 0

    @property
    def lanes(self) -> int:
        """How many lanes it owns."""
        return len(self.pages) * LANE_PAGE

    @property
    def evictable(self) -> bool:
        """Whether its lanes may be given to another adapter now."""
        return self.resident and self.users == 0 and not self.pinned


def choose_pages(free: Sequence[int], wanted: int) -> tuple[int, ...]:
    """Pick `wanted` of the free pages (ascending): the lowest run that fits, else the lowest.

    Adjacent lanes are read as a view; scattered ones have to be copied together.
    """
    for begin in range(len(free) - wanted + 1):
        if free[begin + wanted - 1] - free[begin] == wanted - 1:
            return tuple(free[begin : begin + wanted])
    return tuple(free[:wanted])


class AdapterPool:
    """Owns the lane table. Allocated once: pages change hands, their number never changes."""

    def __init__(self, lanes: int) -> None:
        self._pages = lanes // LANE_PAGE
        self._free = list(range(self._pages))
        #: Never changed but replaced as a whole, so that any thread may read it while one writes.
        self._tenants: Mapping[str, Tenant] = {}
        self._clock = count(1)

    @property
    def lanes_total(self) -> int:
        """All lanes."""
        return self._pages * LANE_PAGE

    @property
    def lanes_free(self) -> int:
        """Lanes that nobody owns."""
        return len(self._free) * LANE_PAGE

    @property
    def lanes_in_use(self) -> int:
        """Lanes that cannot be had now: their adapter is in use, pinned or being written."""
        return sum(t.lanes for t in self._tenants.values() if not t.evictable)

    def get(self, digest: str) -> Tenant | None:
        """Return an adapter's place now, or None when it owns no lanes."""
        return self._tenants.get(digest)

    def tenants(self) -> Mapping[str, Tenant]:
        """Return all who own lanes, by digest. May be called from any thread.

        What is returned never changes: it is who owned them between two changes.
        """
        return self._tenants

    def reserve(self, digest: str, rank: int) -> list[Tenant]:
        """Give an adapter its lanes and return who was evicted for it, least recently used first.

        Raises `AdapterTooLarge` if it can never fit, `Overloaded` if it cannot now; then nothing
        has changed.
        """
        assert digest not in self._tenants
        wanted = lanes_for(rank) // LANE_PAGE
        if wanted > self._pages:
            raise AdapterTooLarge(
                f"adapter of rank {rank} needs {wanted * LANE_PAGE} lanes, this shard has "
                f"{self.lanes_total}; start it with --lanes {wanted * LANE_PAGE} or more"
            )
        victims = self._victims(wanted - len(self._free))
        for victim in victims:
            self._give_back(victim)
        pages = choose_pages(self._free, wanted)
        self._free = [page for page in self._free if page not in pages]
        self._put(Tenant(digest, pages, used=next(self._clock)))
        return victims

    def complete(self, digest: str) -> None:
        """Note that all lanes of an adapter are written: it is resident."""
        tenant = self._tenants[digest]
        assert not tenant.resident
        self._put(replace(tenant, resident=True))

    def acquire(self, digest: str) -> None:
        """A row refers to the adapter from now on."""
        tenant = self._tenants[digest]
        self._put(replace(tenant, users=tenant.users + 1, used=next(self._clock)))

    def release(self, digest: str) -> None:
        """A row no longer refers to the adapter."""
        tenant = self._tenants[digest]
        assert tenant.users > 0
        self._put(replace(tenant, users=tenant.users - 1, used=next(self._clock)))

    def pin(self, digest: str, pinned: bool) -> bool:
        """Keep an adapter in the pool, or let it go; return whether it owns lanes at all."""
        tenant = self._tenants.get(digest)
        if tenant is not None:
            self._put(replace(tenant, pinned=pinned))
        return tenant is not None

    def abandon(self, digest: str) -> None:
        """Free the lanes of an adapter that could not be loaded."""
        self._give_back(self._tenants[digest])

    def evict(self, digest: str) -> int:
        """Free an adapter's lanes and return how many. Raises `AdapterInUse` while rows need it."""
        tenant = self._tenants.get(digest)
        if tenant is None:
            return 0
        if tenant.users or not tenant.resident:
            state = f"{tenant.users} running rows use it" if tenant.users else "it is being loaded"
            raise AdapterInUse(f"adapter cannot be unloaded now: {state}; retry when they end")
        self._give_back(tenant)
        return tenant.lanes

    def check(self) -> None:
        """Assert that every page is free or owned by exactly one adapter."""
        owned = [page for t in self._tenants.values() for page in t.pages]
        assert sorted(owned + self._free) == list(range(self._pages))
        assert self._free == sorted(self._free)
        assert all(t.users >= 0 for t in self._tenants.values())

    def _victims(self, missing: int) -> list[Tenant]:
        """Choose whom to evict for `missing` more pages."""
        victims: list[Tenant] = []
        for tenant in sorted(self._tenants.values(), key=lambda t: t.used):
            if missing <= 0:
                break
            if tenant.evictable:
                victims.append(tenant)
                missing -= len(tenant.pages)
        if missing > 0:
            raise Overloaded("no free lanes: all adapters in the pool are in use or pinned")
        return victims

    def _put(self, tenant: Tenant) -> None:
        self._tenants = {**self._tenants, tenant.digest: tenant}

    def _give_back(self, tenant: Tenant) -> None:
        self._tenants = {d: kept for d, kept in self._tenants.items() if d != tenant.digest}
        self._free = sorted([*self._free, *tenant.pages])

"""Adapters' layers in host memory: bounded in bytes, whole adapters leave, the oldest first."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from loralane_server.adapters.reading.reader import LayerTensors


class HostCache:
    """Layers by (digest, layer), least recently used digest evicted first; one lock, any thread.

    A layer that does not fit beside the pinned adapters and its own is not kept: the cache is an
    optimisation, never a promise.

    `moved` hears of each digest how many layers were held and how many are, whenever that changes,
    with the lock held: it must not wait, nor call back.
    """

    def __init__(
        self,
        capacity_bytes: int,
        moved: Callable[[str, int, int], None] = lambda digest, before, after: None,
    ) -> None:
        self._capacity = capacity_bytes
        self._moved = moved
        self._lock = threading.Lock()
        #: Guarded by the lock; least recently used first. No group is empty.
        self._groups: OrderedDict[str, dict[int, LayerTensors]] = OrderedDict()
        #: Guarded by the lock; for each group the sum of its layers.
        self._sizes: dict[str, int] = {}
        #: Guarded by the lock; the sum of them all.
        self._bytes = 0
        #: Guarded by the lock; may name digests that hold nothing.
        self._pinned: set[str] = set()

    @property
    def capacity(self) -> int:
        """The bound, in bytes."""
        return self._capacity

    @property
    def bytes(self) -> int:
        """What is held now."""
        with self._lock:
            return self._bytes

    @property
    def digests(self) -> frozenset[str]:
        """The adapters of which anything is held."""
        with self._lock:
            return frozenset(self._groups)

    @property
    def pinned(self) -> frozenset[str]:
        """The adapters that are kept from eviction, held or not."""
        with self._lock:
            return frozenset(self._pinned)

    def is_held(self, digest: str) -> bool:
        """Whether anything of an adapter is held, or would be kept from eviction."""
        with self._lock:
            return digest in self._groups or digest in self._pinned

    def could_hold(self, digest: str, nbytes: int) -> bool:
        """Whether all of an adapter of this size would fit, beside those that are pinned."""
        with self._lock:
            return self._fixed(self._pinned - {digest}) + nbytes <= self._capacity

    def bytes_of(self, digest: str) -> int:
        """What is held of one adapter."""
        with self._lock:
            return self._sizes.get(digest, 0)

    def layers_of(self, digest: str) -> int:
        """How many layers of one adapter are held."""
        with self._lock:
            return len(self._groups.get(digest, ()))

    def get(self, digest: str, layer: int) -> LayerTensors | None:
        """The layer, if held; its adapter becomes the most recently used."""
        with self._lock:
            found = self._groups.get(digest, {}).get(layer)
            if found is not None:
                self._groups.move_to_end(digest)
            return found

    def put(self, digest: str, tensors: LayerTensors) -> bool:
        """Hold a layer, evicting others as needed; False = it does not fit and is not held."""
        with self._lock:
            group = self._groups.get(digest, {})
            replaced = group.get(tensors.layer)
            growth = tensors.nbytes - (replaced.nbytes if replaced else 0)
            if not self._make_room(digest, growth):
                return False
            group[tensors.layer] = tensors
            self._groups[digest] = group
            self._groups.move_to_end(digest)
            self._sizes[digest] = self._sizes.get(digest, 0) + growth
            self._bytes += growth
            if replaced is None:
                self._moved(digest, len(group) - 1, len(group))
            return True

    def drop(self, digest: str) -> int:
        """Forget an adapter, pinned or not; returns the bytes freed."""
        with self._lock:
            return self._drop(digest)

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep an adapter from eviction, or no longer."""
        with self._lock:
            (self._pinned.add if pinned else self._pinned.discard)(digest)

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            assert self._groups.keys() == self._sizes.keys()
            for digest, group in self._groups.items():
                assert group
                assert self._sizes[digest] == sum(layer.nbytes for layer in group.values())
                assert all(number == layer.layer for number, layer in group.items())
            assert sum(self._sizes.values()) == self._bytes <= self._capacity

    def _make_room(self, digest: str, growth: int) -> bool:
        kept = self._pinned | {digest}
        if self._fixed(kept) + growth > self._capacity:
            return False
        excess = self._bytes + growth - self._capacity
        for other in list(self._groups) if excess > 0 else ():
            if excess > 0 and other not in kept:
                excess -= self._drop(other)
        return True

    def _fixed(self, digests: AbstractSet[str]) -> int:
        return sum(self._sizes.get(digest, 0) for digest in digests)

    def _drop(self, digest: str) -> int:
        group = self._groups.pop(digest, None)
        freed = self._sizes.pop(digest, 0)
        self._bytes -= freed
        if group is not None:
            self._moved(digest, len(group), 0)
        return freed

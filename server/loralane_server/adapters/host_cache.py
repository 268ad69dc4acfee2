"""Adapters' layers in host memory: bounded in bytes, whole adapters leave, the oldest first."""

import threading
from collections import OrderedDict

from loralane_server.adapters.reader import LayerTensors


class HostCache:
    """Layers by (digest, layer), least recently used digest evicted first; one lock, any thread.

    A layer that does not fit beside the pinned adapters and its own is not kept: the cache is an
    optimisation, never a promise.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        #: Guarded by the lock; least recently used first. No group is empty.
        self._groups: OrderedDict[str, dict[int, LayerTensors]] = OrderedDict()
        #: Guarded by the lock; for each group the sum of its layers.
        self._sizes: dict[str, int] = {}
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
            return sum(self._sizes.values())

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
            return True

    def drop(self, digest: str) -> int:
        """Forget an adapter, pinned or not; returns the bytes freed."""
        with self._lock:
            self._groups.pop(digest, None)
            return self._sizes.pop(digest, 0)

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
            assert sum(self._sizes.values()) <= self._capacity

    def _make_room(self, digest: str, growth: int) -> bool:
        kept = self._pinned | {digest}
        evictable = [other for other in self._groups if other not in kept]
        excess = sum(self._sizes.values()) + growth - self._capacity
        if excess > sum(self._sizes[other] for other in evictable):
            return False
        for other in evictable:
            if excess <= 0:
                break
            del self._groups[other]
            excess -= self._sizes.pop(other)
        return True

"""Which adapters came into host memory as a whole, or left it, since somebody last asked."""

import threading
from collections.abc import Callable


class HostMoves:
    """Any thread notes, one takes. An adapter is on the host if all its `layers` are."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._lock = threading.Lock()
        #: Guarded by the lock, as is all below; in order of the first move.
        self._moved: dict[str, None] = {}
        self._wake: Callable[[], None] = _nobody

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` from now on when there is something to take, once until it is taken.

        It is called on any thread, and must neither wait nor touch the store.
        """
        with self._lock:
            self._wake = wake

    def note(self, digest: str, before: int, after: int) -> None:
        """Note how many layers of an adapter were held, and how many are."""
        if (before == self._layers) == (after == self._layers):
            return
        with self._lock:
            is_first = not self._moved
            self._moved[digest] = None
            wake = self._wake
        if is_first:
            wake()

    def take(self) -> tuple[str, ...]:
        """Return who moved since the last call."""
        with self._lock:
            moved = tuple(self._moved)
            self._moved.clear()
        return moved


def _nobody() -> None:
    """Nobody is told."""

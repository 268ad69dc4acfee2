"""One queue per adapter digest: who waits, in which order, and when it was last served."""

import math
from collections import deque
from dataclasses import dataclass, field

from loralane_router.admission import Ask, Line


@dataclass(slots=True)
class _Queue:
    asks: deque[Ask] = field(default_factory=deque)
    served: float = -math.inf
    #: No admission before this time: the shard refused the head.
    held_until: float = -math.inf


class Queues:
    """All waiting requests. Owned by the dispatcher; a digest is kept only while somebody waits."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._digests: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._digests

    def waits_for(self, digest: str) -> bool:
        """Whether a request waits for this adapter."""
        return digest in self._queues

    def append(self, ask: Ask) -> None:
        """Put a new request at the end of its adapter's queue."""
        self._queues.setdefault(ask.digest, _Queue()).asks.append(ask)
        self._digests[ask.request_id] = ask.digest

    def put_back(self, ask: Ask, until: float) -> None:
        """Put a request that the shard refused back at the front, and hold its queue until then."""
        queue = self._queues.setdefault(ask.digest, _Queue())
        queue.asks.appendleft(ask)
        queue.held_until = until
        self._digests[ask.request_id] = ask.digest

    def remove(self, request_id: int) -> None:
        """Take out a request that waits, wherever it stands."""
        digest = self._digests.pop(request_id)
        queue = self._queues[digest]
        queue.asks = deque(ask for ask in queue.asks if ask.request_id != request_id)
        self._forget_if_empty(digest)

    def take(self, ask: Ask, now: float) -> None:
        """Take out the head of its queue, which is served now."""
        queue = self._queues[ask.digest]
        head = queue.asks.popleft()
        assert head is ask, "admission must take from the head"
        queue.served = now
        del self._digests[ask.request_id]
        self._forget_if_empty(ask.digest)

    def drop(self, digest: str) -> list[int]:
        """Take out all requests that wait for an adapter; return their ids."""
        dropped = [ask.request_id for ask in self._queues.pop(digest).asks]
        for request_id in dropped:
            del self._digests[request_id]
        return dropped

    def clear(self) -> None:
        """Forget everybody."""
        self._queues.clear()
        self._digests.clear()

    def wanted_lanes(self) -> dict[str, int]:
        """Return the lanes of every adapter that requests wait for, also of those held back."""
        return {digest: queue.asks[0].lanes for digest, queue in self._queues.items()}

    def lines(self, now: float) -> list[Line]:
        """Return the queues from which requests may be admitted now."""
        return [
            Line(digest, queue.asks, queue.served)
            for digest, queue in self._queues.items()
            if queue.held_until <= now
        ]

    def _forget_if_empty(self, digest: str) -> None:
        if not self._queues[digest].asks:
            del self._queues[digest]

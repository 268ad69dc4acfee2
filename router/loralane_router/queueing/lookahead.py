"""Which adapters the shard should read to its memory while their requests still wait."""

from collections.abc import Collection, Iterable
from typing import Final

from loralane_router.queueing.admission import PATIENCE_S, Ask
from loralane_router.queueing.ledger import Ledger
from loralane_router.queueing.queues import Queues

#: Adapters whose turn comes next that are looked at, however many wait.
LOOK_AHEAD: Final = 16


def to_prefetch(
    upcoming: Iterable[Ask], held: Collection[str], asked: Collection[str]
) -> list[str]:
    """Return the digests to prefetch, the one whose turn comes first in front. Pure.

    upcoming: the first of those who wait for each of the next `LOOK_AHEAD` adapters, after
    admission took from them. held: adapters that own lanes or are being loaded, which need no
    reading. asked: those that the shard was told of and that still wait.
    """
    return [
        ask.digest
        for ask in upcoming
        if ask.is_cold and ask.digest not in held and ask.digest not in asked
    ]


class Prefetches:
    """What one shard was told to prefetch. Owned by its dispatcher."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        #: Digests that the shard was told of and that still wait.
        self._asked: set[str] = set()

    def due(self, ledger: Ledger, now: float) -> list[str]:
        """Return the digests that the shard is told of now; look whenever the queues changed."""
        self._asked = {digest for digest in self._asked if self._queues.waits_for(digest)}
        if not len(self._queues):
            return []
        upcoming = self._queues.upcoming(LOOK_AHEAD, overdue=now - PATIENCE_S)
        ahead = to_prefetch(upcoming, ledger.room().holders.keys(), self._asked)
        self._asked.update(ahead)
        return ahead

    def clear(self) -> None:
        """Forget what the shard was told: it is gone."""
        self._asked.clear()

"""Which adapters the shard should read to its memory while their requests still wait: pure."""

from collections.abc import Collection, Sequence
from heapq import nsmallest
from typing import Final

from loralane_router.admission import Line

#: Adapters whose turn comes next that are looked at, however many wait.
LOOK_AHEAD: Final = 16


def to_prefetch(lines: Sequence[Line], held: Collection[str], asked: Collection[str]) -> list[str]:
    """Return the digests to prefetch, the one whose turn comes first in front.

    lines: who waits, after admission took from them. held: adapters that own lanes or are being
    loaded, which need no reading. asked: those that the shard was told of and that still wait.
    Turns are taken in the order of `Line.turn`, so looking at the heads looks at what comes next.
    """
    ahead = nsmallest(LOOK_AHEAD, lines, key=lambda line: line.turn)
    return [
        line.digest
        for line in ahead
        if line.asks[0].is_cold and line.digest not in held and line.digest not in asked
    ]

"""Which adapters the shard should read to its memory while their requests still wait: pure."""

from collections.abc import Collection, Iterable
from typing import Final

from loralane_router.admission import Ask

#: Adapters whose turn comes next that are looked at, however many wait.
LOOK_AHEAD: Final = 16


def to_prefetch(
    upcoming: Iterable[Ask], held: Collection[str], asked: Collection[str]
) -> list[str]:
    """Return the digests to prefetch, the one whose turn comes first in front.

    upcoming: the first of those who wait for each of the next `LOOK_AHEAD` adapters, after
    admission took from them. held: adapters that own lanes or are being loaded, which need no
    reading. asked: those that the shard was told of and that still wait.
    """
    return [
        ask.digest
        for ask in upcoming
        if ask.is_cold and ask.digest not in held and ask.digest not in asked
    ]

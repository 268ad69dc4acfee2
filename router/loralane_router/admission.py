"""Which waiting requests are admitted now: a pure function of the queues and the shard's room.

Adapters take turns. An adapter's turn has been outstanding since its first request arrived or
since it was last served, whichever is later; the longest outstanding goes first. So a burst for
one adapter never delays another by more than one request per turn.

A request that does not fit is passed over, but not for ever. Once its turn has been outstanding
for longer than `PATIENCE_S`,
* where pages are short, nothing behind it is admitted;
* where lanes are short, no other adapter may take lanes before it, and the adapters that have held
  theirs longest get no new rows until enough lanes will come free (they drain and rotate).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

#: Seconds that a turn may be passed over, and that an adapter may hold lanes before it drains.
PATIENCE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What one waiting request needs."""

    request_id: int
    #: "" = base.
    digest: str
    #: Pages for its prompt and all it may generate.
    pages: int
    #: Lanes of its adapter; 0 for base.
    lanes: int
    #: Seconds, on the same clock as `now`.
    arrived: float
    #: Whether the adapter was neither resident nor in the shard's memory when it was resolved.
    is_cold: bool = False
    #: Whose share it is taken from: its adapter's digest, or an API key that has a weight.
    flow: str = ""
    #: Of the prompt.
    tokens: int = 0
    #: Lower goes first.
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """The requests that wait for one adapter, in order; never empty."""

    digest: str
    asks: Sequence[Ask]
    #: When one of them was last admitted; -inf if never.
    served: float

    @property
    def turn(self) -> float:
        """Since when this adapter's turn has been outstanding."""
        return max(self.served, self.asks[0].arrived)


@dataclass(frozen=True, slots=True)
class Holder:
    """An adapter whose lanes may not be taken from it."""

    lanes: int
    #: Since when, on the same clock as `now`.
    since: float
    #: Pinned: it keeps its lanes also when no row uses it.
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """What the shard can still hold."""

    rows: int
    pages: int
    #: Lanes that no holder has.
    lanes: int
    #: In-use and pinned adapters, by digest.
    holders: Mapping[str, Holder] = field(default_factory=dict)

    @property
    def most_lanes(self) -> int:
        """What would be free if every adapter that is not pinned gave up its lanes."""
        return self.lanes + sum(h.lanes for h in self.holders.values() if not h.pinned)


def admit(lines: Sequence[Line], room: Room, now: float) -> list[Ask]:
    """Return the requests to admit now, in order; each line gives from its head only."""
    if room.rows <= 0 or not lines:
        return []
    ordered = sorted(lines, key=lambda line: line.turn)
    draining = _draining(ordered, room, now)
    left, most_lanes = _Left(room), room.most_lanes
    turns = deque((line, 0) for line in ordered if line.digest not in draining)
    taken: list[Ask] = []
    while turns and left.rows > 0:
        line, position = turns.popleft()
        ask = line.asks[position]
        if left.fits(ask):
            left.take(ask)
            taken.append(ask)
            if position + 1 < len(line.asks):
                turns.append((line, position + 1))
        elif position == 0 and now - line.turn > PATIENCE_S:
            if left.pages < ask.pages:
                break
            left.lanes_reserved = left.lanes_reserved or ask.lanes <= most_lanes
    return taken


class _Left:
    """Room that shrinks while `admit` takes from it."""

    def __init__(self, room: Room) -> None:
        self.rows, self.pages, self.lanes = room.rows, room.pages, room.lanes
        self._holding = set(room.holders)
        #: Whether lanes are kept for a request that was passed over too long.
        self.lanes_reserved = False

    def fits(self, ask: Ask) -> bool:
        if self.pages < ask.pages:
            return False
        if not ask.lanes or ask.digest in self._holding:
            return True
        return not self.lanes_reserved and ask.lanes <= self.lanes

    def take(self, ask: Ask) -> None:
        self.rows -= 1
        self.pages -= ask.pages
        if ask.lanes and ask.digest not in self._holding:
            self._holding.add(ask.digest)
            self.lanes -= ask.lanes


def _draining(ordered: Sequence[Line], room: Room, now: float) -> set[str]:
    """Return the holders that must drain so that the requests passed over too long get lanes."""
    needed, most_lanes = 0, room.most_lanes
    for line in ordered:
        if now - line.turn <= PATIENCE_S:
            break
        lanes = line.asks[0].lanes
        if line.digest not in room.holders and lanes <= most_lanes:
            needed += lanes
    if needed <= room.lanes:
        return set()
    draining: set[str] = set()
    coming = room.lanes
    for digest, holder in sorted(room.holders.items(), key=lambda item: item[1].since):
        if coming >= needed or now - holder.since <= PATIENCE_S:
            break
        if not holder.pinned:
            draining.add(digest)
            coming += holder.lanes
    return draining

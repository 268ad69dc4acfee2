"""Which waiting requests are admitted now: decided from who waits and what room the shard has.

**By share.** The best priority goes first, then the flow that was served least (`fairness`), then
the longest wait. A flow is charged when a request of it is admitted, so flows take turns within one
call, too. A request waits for its own adapter and its own flow's turn, and for nobody else's.

**By age.** A turn is outstanding since its request arrived, or since its line was last served. Of
every `AGE_EVERY` admissions the last goes to the turn that has been outstanding longest, if for
more than `PATIENCE_S`, whatever its priority and its flow's counter. So nobody waits for ever, and
a flood, however long it waits, gains no more than any other line by waiting.

**Floods.** The last free rows are kept from a flow that has its share of the rows (`kept_rows`): it
stands aside for flows that have less, also while none of them waits.

**Room.** Who does not fit is passed over, but not beyond `PATIENCE_S`. Then,
* where pages are short, nothing behind it is admitted;
* where lanes are short, those that come free are kept for the `_CLAIMANTS` adapters whose turns
  have been outstanding longest, and the adapters that have held theirs longest get no new rows
  until there are enough (they drain and rotate). The others keep the rows busy meanwhile.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final

from loralane_router.queueing.kept_rows import BURST_S, Keeper, Taken

if TYPE_CHECKING:
    from loralane_router.queueing.lines import Group, Line
    from loralane_router.queueing.queues import Queues

#: Seconds that a turn may be passed over, and that an adapter may hold lanes before it drains.
PATIENCE_S: Final = 2.0
#: One in so many admissions may go by age: enough to end every wait, too few for age to decide what
#: share a flow gets.
AGE_EVERY: Final = 8
#: Adapters for which lanes are kept and others drain. With 16 wanted, lanes for 4, and 8 rows, one
#: at a time leaves 6 % of the rows idle; two leave 7 to 13 %, and the longest wait is shorter by a
#: third; with more, nothing is gained. No more than fit side by side.
_CLAIMANTS: Final = 2
#: Lines passed over in one call because their pages do not fit. A shard so full has room for few.
_MOST_PASSED: Final = 32


@dataclass(frozen=True, slots=True)
class Ask:
    """What one waiting request needs."""

    request_id: int
    #: "" = base.
    digest: str
    #: Pages for its prompt and the first tokens of its answer: rows take more as they grow.
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
    taken: Taken = field(default_factory=Taken)

    @property
    def most_lanes(self) -> int:
        """What would be free if every adapter that is not pinned gave up its lanes."""
        return self.lanes + sum(h.lanes for h in self.holders.values() if not h.pinned)


def admit(queues: "Queues", room: Room, now: float) -> list[Ask]:
    """Take out of the queues who is admitted now, and return them in order."""
    if room.rows <= 0 or not len(queues):
        return []
    turn = _Turn(queues, room, now)
    admitted: list[Ask] = []
    while turn.rows > 0 and (ask := turn.take_next()) is not None:
        admitted.append(ask)
    queues.restore()
    return admitted


def to_drain(needed: int, room: Room, queues: "Queues", now: float) -> frozenset[str]:
    """Return the holders that get no new rows, so that `needed` lanes come free.

    Those that have held theirs longest. One that did so for less than `PATIENCE_S` drains only if
    nobody waits for it; a pinned one never does.
    """
    draining: set[str] = set()
    coming = max(0, room.lanes)
    for digest, holder in sorted(room.holders.items(), key=lambda item: item[1].since):
        if coming >= needed:
            break
        is_due = now - holder.since > PATIENCE_S or not queues.waits_for(digest)
        if is_due and not holder.pinned:
            draining.add(digest)
            coming += holder.lanes
    return frozenset(draining)


class _Turn:
    """One call of `admit`: room that shrinks while it takes from the queues."""

    def __init__(self, queues: "Queues", room: Room, now: float) -> None:
        self.rows = room.rows
        self._pages, self._lanes = room.pages, max(0, room.lanes)
        self._most_lanes = room.most_lanes
        self._queues, self._now = queues, now
        self._holding = set(room.holders)
        #: The adapters that are next to get lanes: their turns are overdue. The first goes first.
        self._claimants = self._find_claimants()
        needed = sum(group.lanes for group in self._claimants)
        self._draining = to_drain(needed, room, queues, now)
        self._keeper = Keeper(room.taken, queues.weight_of)
        #: Lines from which the rows that are left are kept, with lanes; the first is due by share.
        self._aside: list[Line] = []

    def take_next(self) -> Ask | None:
        """Admit one more request and return it; None if nobody may be now."""
        by_age = self._next_by_age() if self._queues.since_age >= AGE_EVERY - 1 else None
        ask = by_age or self._next_by_share()
        if ask is None or ask.pages > self._pages:
            return None
        self._queues.take(ask, self._now, by_age=by_age is not None)
        self._keeper.take(ask.flow)
        self.rows -= 1
        self._pages -= ask.pages
        if ask.lanes and ask.digest not in self._holding:
            self._holding.add(ask.digest)
            self._lanes -= ask.lanes
        self._aside = [line for line in self._aside if len(line) and self._has_lanes(line.head)]
        if any(group.digest == ask.digest for group in self._claimants):
            self._claimants = self._find_claimants()
        return ask

    def _next_by_age(self) -> Ask | None:
        """Return whose turn is overdue, the longest first, if its adapter has lanes for it."""
        groups = chain(self._queues.groups(self._holding | {""}), self._fitting_claimants())
        eldest = min(filter(self._is_open, groups), key=lambda group: group.age, default=None)
        if eldest is None or not self._is_overdue(eldest):
            return None
        return eldest.eldest.oldest

    def _next_by_share(self) -> Ask | None:
        """Return who is due by share, maybe one whose pages do not fit and are kept for it."""
        for _ in range(_MOST_PASSED):
            group = min(self._candidates(), key=lambda group: group.share, default=None)
            if group is None:
                return None
            line = group.best
            if line.head.pages <= self._pages or self._is_overdue(line):
                if not self._stands_aside(line):
                    return self._with_lead(line).head
                self._aside.append(line)
            self._queues.pass_over(group, line)
        return self._aside[0].head if self._aside else None

    def _stands_aside(self, line: "Line") -> bool:
        """Whether the rows that are left are kept from a line: see `kept_rows`.

        Not where adapters wait for lanes: those who come could have no row without lanes.
        """
        if self._claimants or self._now - line.oldest.arrived <= BURST_S:
            return False
        return self._keeper.kept_from(line.flow, self.rows)

    def _with_lead(self, line: "Line") -> "Line":
        """Return a line that is next, or who stood aside for it if that goes too far."""
        first = self._aside[0] if self._aside else line
        lead = line.counter - first.counter
        if first.head.priority < line.head.priority or lead > self._keeper.lead(first.flow):
            return first
        return line

    def _candidates(self) -> "Iterator[Group]":
        """Yield groups whose adapters have lanes or may take them; the best by share is there."""
        kept = sum(group.lanes for group in self._claimants)
        lanes = max(0, self._lanes - kept)
        yield from self._queues.best(lanes, self._is_open)
        for group in chain(self._queues.groups(self._holding), self._fitting_claimants()):
            if group.lanes > lanes and self._is_open(group):
                yield group

    def _fitting_claimants(self) -> "Iterator[Group]":
        lanes = self._lanes
        for group in self._claimants:
            lanes -= group.lanes
            if lanes < 0:
                return
            yield group

    def _find_claimants(self) -> "list[Group]":
        def claims(group: "Group") -> bool:
            fits = 0 < group.lanes <= self._most_lanes and group.digest not in self._holding
            return fits and group.held_until <= self._now

        claimants: list[Group] = []
        lanes = self._most_lanes
        for group in self._queues.eldest(_CLAIMANTS, claims):
            lanes -= group.lanes
            if lanes < 0 or not self._is_overdue(group):
                break
            claimants.append(group)
        return claimants

    def _has_lanes(self, ask: Ask) -> bool:
        """Whether its adapter's lanes are there; others may have taken them meanwhile."""
        return not ask.lanes or ask.digest in self._holding or ask.lanes <= self._lanes

    def _is_open(self, group: "Group") -> bool:
        """Whether somebody may be admitted there, as far as the adapter's lanes allow it."""
        is_held = group.held_until > self._now
        return not is_held and group.digest not in self._draining and len(group.by_share) > 0

    def _is_overdue(self, waiting: "Group | Line") -> bool:
        return self._now - waiting.turn > PATIENCE_S

"""All waiting requests, so ordered that who goes next is found without looking at everybody.

Requests stand in lines, one for each flow and adapter; lines in groups, one for each adapter. What
grows by itself (a counter that is charged) is noticed when it matters (`lazy_heap`), so that a step
which changes the counters of its rows costs nothing here.
"""

from collections.abc import Callable, Collection, Iterator
from itertools import chain

from loralane_router.queueing.admission import Ask
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.lazy_heap import LazyHeap
from loralane_router.queueing.lines import Group, Line


class Queues:
    """Who waits at one shard. Owned by its dispatcher; tells the shares who waits and is served."""

    def __init__(self, shares: FairShares | None = None) -> None:
        """`shares`: those of the router; None = its own, for a shard that is alone."""
        self._shares = FairShares() if shares is None else shares
        self._groups: dict[str, Group] = {}
        #: Group and line of every waiting request.
        self._places: dict[int, tuple[Group, Line]] = {}
        #: Groups by the lanes of their adapters; without those whose lines are all passed over.
        self._by_share: dict[int, LazyHeap[Group]] = {}
        self._by_age: LazyHeap[Group] = LazyHeap(lambda group: group.age)
        #: Lines that are passed over for now.
        self._passed: list[tuple[Group, Line]] = []
        #: Requests that were charged when they were admitted the first time.
        self._paid: set[int] = set()
        self._tokens = 0
        #: Admissions since the last one that went by age.
        self.since_age = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._places

    @property
    def tokens(self) -> int:
        """Of the prompts of all who wait."""
        return self._tokens

    def weight_of(self, flow: str) -> float:
        """Return what a flow weighs, as the shares know it."""
        return self._shares.weight_of(flow)

    def waits_for(self, digest: str) -> bool:
        """Whether a request waits for this adapter."""
        return digest in self._groups

    def append(self, ask: Ask, *, paid: bool = False) -> None:
        """Let a request wait, in its place by arrival.

        `paid`: its flow was charged for the prompt when it was admitted before, here or elsewhere.
        """
        if paid:
            self._paid.add(ask.request_id)
        group = self._groups.get(ask.digest)
        if group is None:
            group = self._groups[ask.digest] = Group(ask.digest, ask.lanes)
        line = group.lines.get(ask.flow) or Line(ask.flow, self._shares)
        self._shares.enter(ask.flow)
        line.add(ask)
        self._places[ask.request_id] = group, line
        self._tokens += ask.tokens
        if line.head is ask or line.oldest is ask:
            group.put(line)
            self._put(group)
            self._by_age.put(group)

    def put_back(self, ask: Ask, until: float) -> None:
        """Let a request that the shard refused wait again, and hold its group until then."""
        self.append(ask, paid=True)
        self._groups[ask.digest].held_until = until

    def take(self, ask: Ask, now: float, *, by_age: bool = False) -> None:
        """Take out a request that is admitted now, and charge its flow for the prompt."""
        self.since_age = 0 if by_age else self.since_age + 1
        group, line = self._places[ask.request_id]
        if ask.request_id not in self._paid:
            self._shares.charge(ask.flow, prompt=ask.tokens)
        line.serve(ask, now)
        self._forget(ask, group, line)

    def remove(self, request_id: int) -> None:
        """Take out a request that waits, wherever it stands."""
        group, line = self._places[request_id]
        self._forget(line.remove(request_id), group, line)

    def drop(self, digest: str) -> list[int]:
        """Take out all requests that wait for an adapter; return their ids."""
        lines = self._groups[digest].lines.values()
        dropped = [request_id for line in lines for request_id in line.asks]
        for request_id in dropped:
            self.remove(request_id)
        return dropped

    def clear(self) -> None:
        """Forget everybody."""
        for request_id in list(self._places):
            self.remove(request_id)

    def wanted_lanes(self) -> dict[str, int]:
        """Return the lanes of every adapter that requests wait for, also of those held back."""
        return {digest: group.lanes for digest, group in self._groups.items()}

    def groups(self, digests: Collection[str]) -> Iterator[Group]:
        """Yield those who wait for one of these adapters."""
        return (self._groups[digest] for digest in digests if digest in self._groups)

    def eldest(self, most: int, accept: Callable[[Group], bool]) -> list[Group]:
        """Return so many groups whose turns have been outstanding longest, of those accepted."""
        return self._by_age.nearest(most, accept)

    def best(self, lanes: int, accept: Callable[[Group], bool]) -> Iterator[Group]:
        """Yield groups that need at most so many lanes; among them is the best by share.

        That is: for each number of lanes the best one that is accepted.
        """
        for wanted, groups in self._by_share.items():
            if wanted <= lanes and (found := groups.first(accept)) is not None:
                yield found

    def upcoming(self, most: int, overdue: float) -> list[Ask]:
        """Return the first of those who wait for so many adapters: whose turn comes next in front.

        Turns that have been outstanding since before `overdue` come before those by share.
        """
        by_age = (group for group in self._by_age.nearest(most) if group.turn < overdue)
        ahead = chain.from_iterable(groups.nearest(most) for groups in self._by_share.values())
        by_share = sorted(ahead, key=lambda group: group.share)
        groups = dict.fromkeys(chain(by_age, by_share))
        return [group.best.head for group in list(groups)[:most]]

    def pass_over(self, group: Group, line: Line) -> None:
        """Let a line stand aside, as far as shares go, until `restore`."""
        group.by_share.remove(line)
        self._stand_aside(group)
        self._passed.append((group, line))

    def restore(self) -> None:
        """Let those who were passed over stand in line again."""
        for group, line in self._passed:
            if group.lines.get(line.flow) is line:
                group.by_share.put(line)
                self._put(group)
        self._passed.clear()

    def check(self) -> None:
        """Assert that everybody stands in one place, that is in all orders, and nobody else."""
        assert not self._passed
        self._shares.check()
        self._by_age.check()
        in_order = [group for groups in self._by_share.values() for group in groups.nearest(10**9)]
        assert sorted(g.digest for g in in_order) == sorted(self._groups)
        assert len(self._by_age) == len(self._groups)
        waiting: dict[int, Ask] = {}
        for group in self._groups.values():
            group.check()
            for line in group.lines.values():
                waiting |= line.asks
        assert waiting.keys() == self._places.keys()
        assert self._paid <= waiting.keys()
        assert self._tokens == sum(ask.tokens for ask in waiting.values())

    def _put(self, group: Group) -> None:
        self._by_share.setdefault(group.lanes, LazyHeap(lambda group: group.share)).put(group)

    def _stand_aside(self, group: Group) -> None:
        """Take a group out of the order by share if no line of it is there."""
        groups = self._by_share.get(group.lanes)
        if groups is None or len(group.by_share) or group not in groups:
            return
        groups.remove(group)
        if not len(groups):
            del self._by_share[group.lanes]

    def _forget(self, ask: Ask, group: Group, line: Line) -> None:
        """Leave no trace of a request that was taken out of its line."""
        del self._places[ask.request_id]
        self._paid.discard(ask.request_id)
        self._tokens -= ask.tokens
        self._shares.leave(ask.flow)
        if len(line):
            return
        group.remove(line)
        self._stand_aside(group)
        if not group.lines:
            self._by_age.remove(group)
            del self._groups[group.digest]

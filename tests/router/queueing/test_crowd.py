"""Who yields to whom in a full queue: the rule, and the count that it is decided from."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from loralane_proto import shard_pb2 as pb
from loralane_router.errors import RequestError
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.crowd import Crowd
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.overload import Standing, is_owed, may_join, most_beyond

FULL = RequestError(pb.ERROR_KIND_OVERLOADED, "full")


@pytest.mark.parametrize(
    ("requests", "weight", "everybody", "weights", "owed"),
    [
        (0, 1.0, 16, 2.0, True),
        (7, 1.0, 16, 2.0, True),
        (8, 1.0, 16, 2.0, False),
        (8, 3.0, 16, 4.0, True),
        (2, 1.0, 5, 2.0, False),  # three of five are more than a half
        (0, 0.1, 16, 5.1, True),  # less than one place, but never none
        (1, 0.1, 16, 5.1, False),
        (0, 1.0, 4, 9.0, True),
    ],
)
def test_a_flow_is_owed_a_place_that_is_within_its_share(
    requests, weight, everybody, weights, owed
):
    assert is_owed(Standing(requests, weight), everybody, weights) is owed


@pytest.mark.parametrize(
    ("requests", "weight", "everybody", "weights", "places", "may"),
    [
        (99, 1.0, 99, 1.0, 1, True),  # alone, it has all places
        (4, 1.0, 9, 2.0, 1, True),  # five of ten are a half
        (5, 1.0, 9, 2.0, 1, False),
        (5, 1.0, 9, 2.0, 2, True),  # one beyond a half, and another place is left
        (7, 1.0, 9, 2.0, 5, False),
        (7, 1.0, 9, 2.0, 6, True),
        (7, 3.0, 9, 4.0, 1, True),
        (0, 0.1, 16, 5.1, 1, True),
        (1, 0.1, 16, 5.1, 1, False),
    ],
)
def test_beyond_its_share_a_flow_has_at_most_half_of_the_places_that_are_left(
    requests, weight, everybody, weights, places, may
):
    assert may_join(Standing(requests, weight), everybody, weights, places) is may


def test_the_flow_that_has_most_beyond_its_share_yields_down_to_that():
    flows = {"flood": Standing(9, 1.0), "more": Standing(5, 1.0), "less": Standing(1, 1.0)}

    assert most_beyond(flows, 16, 4.0) == ("flood", 5)


def test_a_weight_makes_a_larger_share():
    flows = {"heavy": Standing(9, 4.0), "light": Standing(5, 1.0)}

    assert most_beyond(flows, 14, 6.0) == ("light", 3)


@pytest.mark.parametrize(
    ("flows", "found"),
    [
        ([23, 9, 16, 16], None),
        ([24, 8, 16, 16], ("0", 8)),  # 16, and two standard deviations of 4
        ([3, 1, 2, 2], None),
        ([4, 0, 2, 2], ("0", 2)),  # twice the share
        ([2, 0, 1, 1], None),
        ([3, 0, 1, 0], ("0", 2)),  # more than two, and twice the share
    ],
)
def test_what_chance_may_give_a_flow_is_not_taken_from_it(flows, found):
    standings = {str(n): Standing(requests, 1.0) for n, requests in enumerate(flows)}

    assert most_beyond(standings, sum(flows), 4.0) == found


def test_nobody_yields_the_only_request_that_he_has():
    flows = {name: Standing(1, 1.0) for name in "abc"}

    assert most_beyond(flows, 3, 4.0) is None
    assert most_beyond({}, 0, 1.0) is None


class Waiters:
    """A crowd and everybody in it; who is refused is gone."""

    def __init__(self, **weights: float) -> None:
        self.crowd = Crowd(lambda flow: weights.get(flow, 1.0))
        self.asks: dict[int, Ask] = {}
        self.refused: list[int] = []
        self._ids = count()

    def add(self, flow: str, tokens: int = 1, arrived: float | None = None) -> int:
        id = next(self._ids)
        when = float(id) if arrived is None else arrived
        self.asks[id] = Ask(id, flow, 1, 8, when, flow=flow, tokens=tokens)
        self.crowd.enter(self.asks[id], self.refuse)
        return id

    def refuse(self, id: int, error: RequestError) -> None:
        self.refused.append(id)
        self.crowd.leave(self.asks.pop(id))

    @contextmanager
    def expecting(self, flow: str) -> Iterator[None]:
        self.crowd.expect(flow)
        yield
        self.crowd.expect_no_more(flow)

    def yield_to(self, flow: str, tokens: int = 0) -> list[Ask]:
        """Make place for a request; return who was refused for it."""
        yielding = self.crowd.yielding(flow, tokens)
        for waiting in yielding:
            waiting.refuse(waiting.ask.request_id, FULL)
        return [waiting.ask for waiting in yielding]

    def sizes(self) -> Counter[str]:
        return Counter(ask.flow for ask in self.asks.values())


def test_the_newest_of_a_flood_yields_whenever_it_was_counted():
    waiters = Waiters()
    ids = [waiters.add("flood", arrived=at) for at in (5.0, 9.0, 1.0, 2.0)]

    assert [ask.request_id for ask in waiters.yield_to("quiet")] == [ids[1]]
    assert [ask.request_id for ask in waiters.yield_to("quiet")] == [ids[0]]
    assert waiters.yield_to("quiet") == []


def test_those_who_flood_are_owed_nothing():
    waiters = Waiters()
    waiters.add("shy")
    for _ in range(9):
        waiters.add("flood")

    assert waiters.yield_to("flood") == []
    assert not waiters.crowd.may_join("flood", places=0)
    assert waiters.crowd.is_within("quiet")
    assert waiters.crowd.may_yield


def test_as_many_yield_as_it_takes_for_the_tokens_but_none_within_the_share():
    waiters = Waiters()
    ids = [waiters.add("flood", tokens=10) for _ in range(8)]

    assert waiters.yield_to("quiet", tokens=41) == []
    yielded = waiters.yield_to("quiet", tokens=21)
    assert [ask.request_id for ask in yielded] == [ids[7], ids[6], ids[5]]


def test_who_is_being_opened_counts_but_cannot_yield():
    waiters = Waiters()
    with waiters.expecting("flood"), waiters.expecting("flood"):
        assert (waiters.crowd.coming, waiters.crowd.size) == (2, 2)
        assert waiters.crowd.is_within("quiet")
        assert waiters.yield_to("quiet") == []
        with waiters.expecting("quiet"):
            assert not waiters.crowd.is_within("quiet")
            assert waiters.crowd.is_within("quiet", counted=1)
    waiters.crowd.check()
    assert waiters.crowd.coming == 0


def test_who_asks_does_not_count_against_itself():
    waiters = Waiters()
    for _ in range(4):
        waiters.add("flood")

    with waiters.expecting("quiet"):
        yielding = waiters.crowd.yielding("quiet", 0, counted=1)
        not_counted = waiters.crowd.may_join("quiet", 1, counted=1)

    assert [waiting.ask.request_id for waiting in yielding] == [3]
    assert not_counted


@dataclass(frozen=True)
class Outcome:
    """What became of all requests of a simulation."""

    #: Of the refusals.
    late: float
    #: Of what each flow sent.
    served: dict[str, float]


def overload(rates: dict[str, float], places: int, arrivals: int = 20_000) -> Outcome:
    """Let more come to a queue than is served: one request in a second, of who was served least.

    Rates are in requests per second, arrivals at random.
    """
    rng, waiters, shares = random.Random(7), Waiters(), FairShares()
    sent, served = Counter[str](), Counter[str]()
    now, at_door = 0.0, 0

    def turn(ask: Ask) -> tuple[float, float]:
        return shares.counter(ask.flow), ask.arrived

    for _ in range(arrivals):
        before, now = now, now + rng.expovariate(sum(rates.values()))
        for _ in range(int(now) - int(before)):
            if waiters.asks:
                first = min(waiters.asks.values(), key=turn)
                served[first.flow] += 1
                shares.charge(first.flow, prompt=1)
                shares.leave(first.flow)
                waiters.crowd.leave(waiters.asks.pop(first.request_id))
        (flow,) = rng.choices(list(rates), list(rates.values()))
        sent[flow] += 1
        left = places - len(waiters.asks)
        yielding = [] if left > 0 else waiters.yield_to(flow)
        for ask in yielding:
            shares.leave(ask.flow)
        if yielding or (left > 0 and waiters.crowd.may_join(flow, left)):
            waiters.add(flow, arrived=now)
            shares.enter(flow)
        else:
            at_door += 1
    late = len(waiters.refused) / (len(waiters.refused) + at_door)
    return Outcome(late, {flow: served[flow] / sent[flow] for flow in rates})


@pytest.mark.parametrize("places", [8, 16])
@pytest.mark.parametrize(("flows", "times"), [(2, 10.0), (8, 10.0), (50, 10.0), (2, 1.2), (8, 1.2)])
def test_where_all_send_alike_hardly_any_refusal_comes_late(flows, times, places):
    found = overload({str(n): times / flows for n in range(flows)}, places)

    assert found.late < (0.003 if places == 16 else 0.01)
    assert sum(found.served.values()) / flows == pytest.approx(1 / times, rel=0.03)


def test_where_all_send_alike_all_are_served_alike():
    found = overload({str(n): 1.25 for n in range(8)}, places=16)

    assert all(0.09 < share < 0.11 for share in found.served.values()), "ten times what can be done"


@pytest.mark.parametrize("flood", [1.0, 10.0])
def test_who_sends_his_share_is_served_whatever_another_sends(flood):
    victims = [str(n) for n in range(7)]
    found = overload(dict.fromkeys(victims, 0.1) | {"flood": flood}, places=16)

    assert all(found.served[victim] > 0.95 for victim in victims)
    assert sum(found.served[victim] for victim in victims) / 7 > 0.98
    assert found.served["flood"] < 0.4
    assert found.late < 0.015


FLOWS = ["a", "b", "c", "d"]
WEIGHTS = {"b": 3.0, "c": 0.25}
PLACES = 8


class FullQueue(RuleBasedStateMachine):
    """A queue of so many places, where everything happens in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.waiters = Waiters(**WEIGHTS)
        self.taken: list[int] = []
        self.left: list[int] = []
        self.opening: list[str] = []

    @rule(flow=st.sampled_from(FLOWS))
    def arrive(self, flow):
        before = self.waiters.sizes()
        left = PLACES - len(self.waiters.asks)
        if left and not self.waiters.crowd.may_join(flow, left):
            self.expect_more_than_a_share(flow)
            return
        if not left:
            if not self.waiters.yield_to(flow):
                return
            self.expect_fair(flow, before)
        self.taken.append(self.waiters.add(flow))

    def expect_more_than_a_share(self, flow: str) -> None:
        """Who may not join has his share already, and a place of his own."""
        sizes = self.waiters.sizes() + Counter(self.opening)
        weights = sum(WEIGHTS.get(other, 1.0) for other in {*sizes, flow})
        share = (sizes.total() + 1) * WEIGHTS.get(flow, 1.0) / weights
        assert sizes[flow] >= 1
        assert sizes[flow] + 1 > share
        assert len(sizes) > 1

    def expect_fair(self, flow: str, before: Counter[str]) -> None:
        """Who yielded had more than chance makes of a share; who comes is within his."""
        sizes = before + Counter(self.opening)
        weights = sum(WEIGHTS.get(other, 1.0) for other in {*sizes, flow})
        share = {f: sizes.total() * WEIGHTS.get(f, 1.0) / weights for f in FLOWS}
        (yielded,) = before - self.waiters.sizes()
        assert yielded != flow
        assert sizes[yielded] > 1
        chance = min(share[yielded], 2 * share[yielded] ** 0.5)
        assert sizes[yielded] >= share[yielded] + chance - 1e-9
        assert sizes[flow] + 1 <= max(1.0, share[flow] + 1e-9)

    @precondition(lambda self: self.waiters.asks)
    @rule(data=st.data())
    def leave(self, data):
        id = data.draw(st.sampled_from(sorted(self.waiters.asks)))
        ask = self.waiters.asks.pop(id)
        self.waiters.crowd.leave(ask)
        self.waiters.crowd.leave(ask)
        self.left.append(id)

    @rule(flow=st.sampled_from(FLOWS))
    def begin_opening(self, flow):
        self.waiters.crowd.expect(flow)
        self.opening.append(flow)

    @precondition(lambda self: self.opening)
    @rule(data=st.data())
    def end_opening(self, data):
        index = data.draw(st.integers(0, len(self.opening) - 1))
        self.waiters.crowd.expect_no_more(self.opening.pop(index))

    @invariant()
    def everybody_is_in_one_place(self):
        waiters = self.waiters
        waiters.crowd.check()
        assert sorted([*waiters.asks, *self.left, *waiters.refused]) == self.taken
        assert all(ask in waiters.crowd for ask in waiters.asks.values())
        assert waiters.crowd.coming == len(self.opening)
        assert len(waiters.asks) <= PLACES


FullQueue.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestFullQueue = FullQueue.TestCase

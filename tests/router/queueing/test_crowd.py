"""Who yields to whom in a full queue: the rule, and the count that it is decided from."""

import random
from collections import Counter
from contextlib import ExitStack
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from loralane_proto import shard_pb2 as pb
from loralane_router.errors import RequestError
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.crowd import Crowd
from loralane_router.queueing.overload import Standing, is_owed, most_beyond

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

    def yield_to(self, flow: str, tokens: int = 0) -> list[int]:
        """Make place for a request; return who was refused for it."""
        yielding = self.crowd.yielding(flow, tokens)
        for waiting in yielding:
            waiting.refuse(waiting.ask.request_id, FULL)
        return [waiting.ask.request_id for waiting in yielding]

    def sizes(self) -> Counter[str]:
        return Counter(ask.flow for ask in self.asks.values())


def test_the_newest_of_a_flood_yields_whenever_it_was_counted():
    waiters = Waiters()
    ids = [waiters.add("flood", arrived=at) for at in (5.0, 9.0, 1.0)]

    assert waiters.yield_to("quiet") == [ids[1]]
    assert waiters.yield_to("quiet") == [ids[0]]
    assert waiters.yield_to("quiet") == []


def test_those_who_flood_are_owed_nothing():
    waiters = Waiters()
    for _ in range(9):
        waiters.add("flood")

    assert not waiters.crowd.owes("flood")
    assert waiters.crowd.owes("quiet")
    assert waiters.crowd.may_yield


def test_as_many_yield_as_it_takes_for_the_tokens_but_none_within_the_share():
    waiters = Waiters()
    ids = [waiters.add("flood", tokens=10) for _ in range(8)]

    assert waiters.yield_to("quiet", tokens=41) == []
    assert waiters.yield_to("quiet", tokens=21) == [ids[7], ids[6], ids[5]]


def test_who_is_being_opened_counts_but_cannot_yield():
    waiters = Waiters()
    with waiters.crowd.expecting("flood"), waiters.crowd.expecting("flood"):
        assert waiters.crowd.coming == 2
        assert waiters.crowd.owes("quiet")
        assert waiters.yield_to("quiet") == []
        with waiters.crowd.expecting("quiet"):
            assert not waiters.crowd.owes("quiet")
            assert waiters.crowd.owes("quiet", counted=1)
    waiters.crowd.check()
    assert waiters.crowd.coming == 0


def overload(rates: dict[str, float], places: int, arrivals: int) -> tuple[float, Counter[str]]:
    """Let a queue be full; return how many refusals came late, of all, and who was served how much.

    One request is served in a second, of the flow that was served least; rates are in requests per
    second, arrivals at random. Served: of what was sent.
    """
    rng, waiters = random.Random(7), Waiters()
    sent, served = Counter[str](), Counter[str]()
    now, at_door = 0.0, 0
    for _ in range(arrivals):
        before, now = now, now + rng.expovariate(sum(rates.values()))
        for _ in range(int(now) - int(before)):
            if waiters.asks:
                first = min(waiters.asks.values(), key=lambda ask: (served[ask.flow], ask.arrived))
                served[first.flow] += 1
                waiters.crowd.leave(waiters.asks.pop(first.request_id))
        (flow,) = rng.choices(list(rates), list(rates.values()))
        sent[flow] += 1
        if len(waiters.asks) >= places and not waiters.yield_to(flow):
            at_door += 1
        else:
            waiters.add(flow, arrived=now)
    late = len(waiters.refused) / (len(waiters.refused) + at_door)
    return late, Counter({flow: served[flow] / sent[flow] for flow in rates})


def test_where_all_send_alike_few_refusals_come_late():
    late, served = overload({str(n): 1.25 for n in range(8)}, places=16, arrivals=20_000)

    assert late < 0.03
    assert all(0.08 < share < 0.12 for share in served.values()), "ten times what can be done"


def test_who_sends_his_share_is_served_whatever_another_sends():
    victims = [str(n) for n in range(7)]
    _, served = overload(dict.fromkeys(victims, 0.1) | {"flood": 1.0}, 16, arrivals=20_000)

    assert all(served[victim] > 0.98 for victim in victims)
    assert served["flood"] < 0.4


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
        self.opening: list[tuple[str, ExitStack]] = []

    @rule(flow=st.sampled_from(FLOWS))
    def arrive(self, flow):
        before = self.waiters.sizes()
        if len(self.waiters.asks) >= PLACES:
            yielded = self.waiters.yield_to(flow)
            if not yielded:
                return
            self.expect_fair(flow, before)
        self.taken.append(self.waiters.add(flow))

    def expect_fair(self, flow: str, before: Counter[str]) -> None:
        """Who yielded had more than chance makes of a share; who comes is within his."""
        sizes = before + Counter(flow for flow, _ in self.opening)
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
        stack = ExitStack()
        stack.enter_context(self.waiters.crowd.expecting(flow))
        self.opening.append((flow, stack))

    @precondition(lambda self: self.opening)
    @rule(data=st.data())
    def end_opening(self, data):
        index = data.draw(st.integers(0, len(self.opening) - 1))
        self.opening.pop(index)[1].close()

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

"""Who waits: in one place each, in every order, found without looking at everybody."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.queues import Queues


def ask(request_id: int, digest: str = "a", **others) -> Ask:
    made = Ask(request_id, digest, 1, 8, float(request_id), flow=digest, tokens=10)
    return replace(made, **others)


def order(queues: Queues, now: float = 99.0) -> list[int]:
    """Everybody, in the order of their shares: taken one after the other."""
    taken = []
    while len(queues):
        groups = list(queues.best(99, lambda group: group.held_until <= now))
        if not groups:
            break
        head = min(groups, key=lambda group: group.share).best.head
        queues.take(head, now)
        taken.append(head.request_id)
    return taken


def test_flows_take_turns_by_what_they_were_served_and_each_by_arrival():
    queues = Queues()
    for request_id, (digest, tokens) in enumerate(
        [("a", 10), ("a", 10), ("b", 30), ("a", 10), ("a", 10), ("b", 30), ("b", 5)]
    ):
        queues.append(ask(request_id, digest, tokens=tokens))

    assert order(queues) == [0, 2, 1, 3, 4, 5, 6]


def test_a_better_priority_goes_first_within_a_flow_and_among_flows():
    queues = Queues()
    for request_id, (digest, priority) in enumerate([("a", 0), ("a", -1), ("b", 5), ("b", -2)]):
        queues.append(ask(request_id, digest, priority=priority))

    assert order(queues) == [3, 1, 0, 2]


def test_requests_of_one_flow_stand_in_a_line_for_each_adapter():
    queues = Queues()
    for request_id, digest in enumerate("aab"):
        queues.append(ask(request_id, digest, flow="key"))

    lines = [group.lines["key"] for group in queues.groups(["a", "b", "other"])]

    assert [sorted(line.asks) for line in lines] == [[0, 1], [2]]
    queues.check()


def test_a_request_from_another_shard_stands_by_its_arrival():
    queues = Queues()
    queues.append(ask(5))
    queues.append(ask(6))

    queues.append(ask(3))

    assert order(queues) == [3, 5, 6]


def test_a_refused_request_is_first_again_and_is_charged_once():
    shares = FairShares()
    queues = Queues(shares)
    first, second = ask(1), ask(2)
    queues.append(first)
    queues.append(second)
    queues.take(first, now=0.0)

    queues.put_back(first, until=5.0)

    assert order(queues, now=4.9) == []
    assert order(queues, now=5.0) == [1, 2]
    assert shares.counter("a") == 20


def test_a_turn_is_outstanding_since_the_oldest_request_of_its_line_was_served():
    queues = Queues()
    old, urgent, late = ask(1), ask(2, priority=-1), ask(3)
    for one in (old, urgent, late):
        queues.append(one)
    (line,) = [group.eldest for group in queues.groups("a")]

    queues.take(urgent, now=7.0)
    passed_over = line.turn
    queues.take(old, now=9.0)

    assert (passed_over, line.turn) == (1.0, 9.0)


def test_who_was_passed_over_stands_aside_until_the_order_is_restored():
    queues = Queues()
    queues.append(ask(1, flow="x"))
    queues.append(ask(2, flow="y"))
    (group,) = queues.groups("a")

    queues.pass_over(group, group.best)
    next_best = group.best.flow
    queues.pass_over(group, group.best)
    nobody = list(queues.best(99, lambda group: True))
    queues.restore()

    assert (next_best, nobody) == ("y", [])
    assert order(queues) == [1, 2]


def test_nothing_is_kept_of_those_who_are_gone():
    shares = FairShares()
    queues = Queues(shares)
    for request_id, digest in enumerate("aabbc"):
        queues.append(ask(request_id, digest))

    dropped = queues.drop("b")
    queues.remove(4)
    queues.check()
    queues.clear()

    assert dropped == [2, 3]
    assert (len(queues), queues.tokens, queues.wanted_lanes()) == (0, 0, {})
    assert (queues._by_share, shares._waiting) == ({}, {})


@st.composite
def histories(draw):
    steps = st.tuples(
        st.sampled_from(["append", "append", "append", "remove", "take", "back", "charge", "drop"]),
        st.sampled_from("abc"),
        st.sampled_from("xyz"),
        st.integers(-1, 1),
    )
    return draw(st.lists(steps, max_size=40))


@settings(deadline=None)
@given(histories())
def test_the_best_is_found_as_by_looking_at_everybody_and_nobody_is_lost(history):
    shares = FairShares()
    queues = Queues(shares)
    alive: dict[int, Ask] = {}
    for request_id, (action, digest, flow, priority) in enumerate(history):
        best = {group.best.head for group in queues.best(99, lambda group: True)}
        if action == "append":
            alive[request_id] = ask(request_id, digest, flow=flow, priority=priority)
            queues.append(alive[request_id])
        elif action == "charge":
            shares.charge(flow, generated=7)
        elif action == "drop" and queues.waits_for(digest):
            assert all(alive.pop(gone).digest == digest for gone in queues.drop(digest))
        elif action == "remove" and alive:
            gone = next(iter(alive))
            queues.remove(gone)
            del alive[gone]
        elif action in ("take", "back") and best:
            head = best.pop()
            queues.take(head, now=float(request_id))
            if action == "back":
                queues.put_back(head, until=0.0)
            else:
                del alive[head.request_id]
        queues.check()

        assert alive.keys() == queues._places.keys()
        if alive:
            least = min(
                alive.values(),
                key=lambda a: (a.priority, shares.counter(a.flow), a.arrived, a.request_id),
            )
            (found,) = queues.best(99, lambda group: True)
            assert found.best.head == least

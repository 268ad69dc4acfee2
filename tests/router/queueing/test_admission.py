"""Who is admitted: by share, never beyond the room, nobody passed over for ever."""

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from loralane_router.queueing.admission import (
    AGE_EVERY,
    PATIENCE_S,
    Ask,
    Holder,
    Room,
    admit,
    to_drain,
)
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.kept_rows import BURST_S, LEAD, Taken
from loralane_router.queueing.queues import Queues
from loralane_router.queueing.weights import Weights

LATE = PATIENCE_S + 0.1
ids = count()


def ask(digest="", *, arrived=0.0, pages=1, lanes=8, flow=None, tokens=1, priority=0) -> Ask:
    lanes = lanes if digest else 0
    flow = digest if flow is None else flow
    return Ask(next(ids), digest, pages, lanes, arrived, False, flow, tokens, priority)


def waiting(*asks: Ask) -> Queues:
    queues = Queues()
    for one in asks:
        queues.append(one)
    return queues


def digests(asks) -> list[str]:
    return [ask.digest for ask in asks]


def test_flows_take_turns_within_one_call():
    queues = waiting(*[ask("chatty") for _ in range(5)], ask("quiet"), ask(), ask())

    admitted = admit(queues, Room(rows=6, pages=99, lanes=99), now=0.0)

    assert digests(admitted) == ["chatty", "quiet", "", "chatty", "", "chatty"]
    assert len(queues) == 2
    queues.check()


def test_a_flow_that_was_served_more_waits_until_the_others_have_caught_up():
    queues = waiting(ask("greedy", tokens=0), ask("modest", tokens=0))
    queues._shares.charge("greedy", generated=3)
    for _ in range(9):
        queues.append(ask("modest"))

    admitted = admit(queues, Room(rows=8, pages=99, lanes=99), now=0.0)

    assert digests(admitted) == ["modest"] * 7 + ["greedy"]


def test_a_flow_gets_what_its_weight_says():
    shares = FairShares(Weights.parse({"adapters": {"gold": 3}}))
    queues = Queues(shares)
    for digest in ["digest of gold", "plain"] * 20:
        name = digest.removeprefix("digest of ")
        queues.append(ask(digest, flow=shares.flow_of(None, name, digest)))

    admitted = admit(queues, Room(rows=16, pages=99, lanes=99), now=0.0)

    assert digests(admitted).count("digest of gold") == 12


def test_an_adapter_in_use_needs_no_more_lanes():
    room = Room(rows=2, pages=99, lanes=0, holders={"a": Holder(8, since=0.0)})

    assert digests(admit(waiting(ask("b"), ask("a"), ask("a"), ask()), room, 0.0)) == ["a", ""]


def test_one_key_waits_for_each_of_its_adapters_by_itself():
    queues = waiting(ask("no lanes", flow="key"), ask("in use", flow="key"))
    room = Room(rows=2, pages=99, lanes=0, holders={"in use": Holder(8, since=0.0)})

    assert digests(admit(queues, room, now=0.0)) == ["in use"]


def test_who_does_not_fit_is_passed_over_for_a_while():
    big, small = ask(pages=9), ask("a", tokens=5)

    assert admit(waiting(big, small), Room(4, 8, 8), now=1.0) == [small]


def test_who_is_passed_over_for_pages_does_not_hold_up_its_adapters_other_flows():
    big, small = ask("a", pages=9, flow="x"), ask("a", flow="y")

    assert admit(waiting(big, small), Room(4, 8, 8), now=1.0) == [small]


def test_who_waited_too_long_for_pages_is_not_passed_over():
    queues = waiting(ask(pages=9), ask("a"))

    assert admit(queues, Room(4, 8, 8), now=LATE) == []
    assert len(queues) == 2
    queues.check()


def test_who_waited_too_long_for_lanes_gets_the_next_ones():
    def queues() -> Queues:
        return waiting(ask("wide", lanes=16), ask("narrow", arrived=1.0), ask(arrived=1.0))

    room = Room(4, 99, lanes=8, holders={"busy": Holder(8, since=0.0)})

    early, late = admit(queues(), room, now=1.0), admit(queues(), room, now=LATE)

    assert digests(early) == ["narrow", ""]
    assert digests(late) == [""]


def test_the_longest_holder_drains_for_who_waited_too_long():
    queues = waiting(ask("first", arrived=3.0), ask("second", arrived=3.0), ask("starved"))
    holders = {"first": Holder(8, since=0.0), "second": Holder(8, since=1.0)}

    assert digests(admit(queues, Room(4, 99, 0, holders), now=3.5)) == ["second"]


def test_a_holder_drains_before_its_patience_is_over_only_if_nobody_waits_for_it():
    queues = waiting(ask("busy"))
    holders = {"busy": Holder(8, since=3.0), "idle": Holder(8, since=3.1)}

    assert to_drain(16, Room(4, 99, 0, holders), queues, now=3.5) == {"idle"}
    assert to_drain(8, Room(4, 99, 8, holders), queues, now=3.5) == frozenset()


def test_nobody_drains_for_two_adapters_that_do_not_fit_side_by_side():
    queues = waiting(ask("wide", lanes=16), ask("other", lanes=16), ask("busy", arrived=3.0))
    holders = {"old": Holder(8, since=0.0), "busy": Holder(8, since=1.0)}

    assert digests(admit(queues, Room(4, 99, 8, holders), now=3.5)) == ["busy"]


def test_pinned_adapters_do_not_drain():
    queues = waiting(ask("pinned", arrived=3.0), ask("starved"))
    holders = {"pinned": Holder(8, since=0.0, pinned=True)}

    assert digests(admit(queues, Room(4, 99, 0, holders), now=9.0)) == ["pinned"]


def test_lanes_are_not_kept_for_who_could_not_use_them():
    queues = waiting(ask("too wide", lanes=24), ask("fits", arrived=1.0))
    holders = {"pinned": Holder(16, since=0.0, pinned=True)}

    assert digests(admit(queues, Room(4, 99, 16, holders), now=9.0)) == ["fits"]


def test_one_admission_in_so_many_goes_by_age_whatever_priority_and_counter_say():
    queues = waiting(ask("late", priority=9, arrived=1.0), ask("later", priority=9, arrived=1.1))
    for _ in range(3 * AGE_EVERY):
        queues.append(ask("urgent", arrived=8.0))

    admitted = admit(queues, Room(2 * AGE_EVERY, 99, 99), now=9.0)

    urgent = ["urgent"] * (AGE_EVERY - 1)
    assert digests(admitted) == [*urgent, "late", *urgent, "later"]


def test_by_age_a_request_is_not_behind_more_urgent_ones_of_its_own_line():
    queues = waiting(ask("a", priority=9, tokens=0))
    for _ in range(3 * AGE_EVERY):
        queues.append(ask("a", arrived=8.9, tokens=0))

    admitted = admit(queues, Room(2 * AGE_EVERY, 99, 99), now=9.0)

    assert [one.priority for one in admitted].index(9) == AGE_EVERY - 1


def test_a_flood_does_not_gain_by_age():
    queues = waiting(*[ask("flood") for _ in range(100)])
    admit(queues, Room(1, 99, 99), now=9.0)

    for _ in range(AGE_EVERY):
        queues.append(ask("victim", arrived=9.0))
    admitted = admit(queues, Room(2 * AGE_EVERY, 99, 99), now=9.0)

    assert digests(admitted).count("victim") == AGE_EVERY


#: A flow that has most rows of 32, where others took as many lately.
FLOODED = Taken(32, {"flood": 26}, {"flood": 16, "a": 8, "b": 8})


def flooded(rows: int) -> Room:
    return Room(rows, 99, 99, {"flood": Holder(8, since=0.0)}, FLOODED)


def test_the_last_rows_are_kept_from_a_flood_also_while_nobody_else_waits():
    queues = waiting(*[ask("flood") for _ in range(20)])

    admitted = admit(queues, flooded(8), now=BURST_S + 0.1)

    assert digests(admitted) == ["flood"] * 2
    assert len(queues) == 18
    queues.check()


def test_who_has_less_than_its_share_gets_the_rows_that_are_kept():
    queues = waiting(*[ask("flood") for _ in range(20)], *[ask("a", tokens=50) for _ in range(9)])

    admitted = admit(queues, flooded(6), now=BURST_S + 0.1)

    assert digests(admitted) == ["a"] * 6
    queues.check()


def test_a_burst_is_no_flood():
    queues = waiting(*[ask("flood") for _ in range(20)])

    assert len(admit(queues, flooded(6), now=BURST_S - 0.1)) == 6


def test_a_flood_stands_aside_no_longer_when_others_got_too_far_ahead():
    queues = waiting(*[ask("flood", tokens=0) for _ in range(20)])
    queues._shares.charge("a", generated=32 * LEAD)
    queues.append(ask("a"))
    ahead = queues._shares.counter("a")

    admitted = admit(queues, flooded(6), now=BURST_S + 0.1)

    assert ahead > 32 * LEAD
    assert digests(admitted) == ["flood"] * 6


def test_the_more_urgent_does_not_stand_aside_for_the_less_urgent():
    queues = waiting(*[ask("flood", priority=-1) for _ in range(20)], ask("a"))

    assert digests(admit(queues, flooded(6), now=BURST_S + 0.1)) == ["flood"] * 6


def test_who_stood_aside_does_not_get_the_lanes_that_another_took_meanwhile():
    queues = waiting(ask("a", flow="flood"), ask("b"), ask())
    queues._shares.charge("b", generated=1)
    queues._shares.charge("", generated=32 * LEAD)

    assert digests(admit(queues, Room(6, 99, 8, {}, FLOODED), BURST_S + 0.1)) == ["b", ""]


def test_rows_are_not_kept_where_adapters_wait_for_lanes():
    queues = waiting(*[ask("flood", arrived=3.0) for _ in range(20)], ask("no lanes"))
    room = Room(6, 99, 0, {"flood": Holder(8, since=9.0)}, FLOODED)

    assert digests(admit(queues, room, now=9.0)) == ["flood"] * 6


@st.composite
def situations(draw):
    queues = Queues()
    for flow in draw(st.sets(st.sampled_from("vwxyz"))):
        queues._shares.charge(flow, generated=draw(st.sampled_from([0, 1, 9, 32 * LEAD])))
    wide = draw(st.sets(st.sampled_from("abcd")))
    for _ in range(draw(st.integers(0, 12))):
        digest = draw(st.sampled_from(["", "a", "b", "c", "d"]))
        queues.append(
            ask(
                digest,
                arrived=draw(st.floats(0, 10)),
                pages=draw(st.integers(1, 5)),
                lanes=16 if digest in wide else 8,
                flow=draw(st.sampled_from("vwxyz")),
                tokens=draw(st.integers(0, 9)),
                priority=draw(st.integers(-1, 1)),
            )
        )
    queues.since_age = draw(st.integers(0, AGE_EVERY))
    by_flow = {flow: draw(st.integers(1, 9)) for flow in draw(st.sets(st.sampled_from("vwxyz")))}
    lately = {flow: draw(st.integers(1, 9)) for flow in draw(st.sets(st.sampled_from("vwxyz")))}
    taken = Taken(draw(st.sampled_from([0, 4, 32])), by_flow, lately)
    holders = {
        name: Holder(8, draw(st.floats(0, 10)), draw(st.booleans()))
        for name in draw(st.sets(st.sampled_from(["a", "b", "x"])))
    }
    room = Room(
        draw(st.integers(-1, 8)),
        draw(st.integers(-1, 20)),
        draw(st.integers(-8, 40)),
        holders,
        taken,
    )
    return queues, room


@settings(deadline=None)
@given(situations())
def test_admission_is_within_the_room_and_loses_nobody(situation):
    queues, room = situation
    before = set(queues._places)

    admitted = admit(queues, room, now=10.0)

    new_lanes = {a.digest: a.lanes for a in admitted if a.digest not in room.holders and a.lanes}
    assert len(admitted) <= max(0, room.rows)
    assert sum(a.pages for a in admitted) <= max(0, room.pages)
    assert sum(new_lanes.values()) <= max(0, room.lanes)
    taken = [a.request_id for a in admitted]
    assert sorted([*taken, *queues._places]) == sorted(before)
    queues.check()


@settings(deadline=None)
@given(situations())
def test_an_empty_shard_always_admits_somebody(situation):
    queues, _ = situation
    anybody = len(queues) > 0

    admitted = admit(queues, Room(rows=1, pages=5, lanes=16), now=10.0)

    assert bool(admitted) == anybody

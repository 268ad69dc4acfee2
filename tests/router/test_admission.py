"""Who is admitted: fair in turns, never beyond capacity, nobody passed over for ever."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from loralane_router.admission import PATIENCE_S, Ask, Holder, Line, Room, admit

NEVER = float("-inf")


def line(digest, count=1, *, arrived=0.0, pages=1, lanes=8, served=NEVER) -> Line:
    lanes = lanes if digest else 0
    asks = [Ask(next_id(), digest, pages, lanes, arrived + i * 1e-6) for i in range(count)]
    return Line(digest, deque(asks), served)


def next_id(counter=[0]) -> int:  # noqa: B006 - ids need only differ
    counter[0] += 1
    return counter[0]


def digests(asks) -> list[str]:
    return [ask.digest for ask in asks]


def test_adapters_take_turns_and_who_waited_longest_begins():
    lines = [line("chatty", 5, arrived=1.0), line("quiet", 1, arrived=0.5), line("", 2, arrived=2)]

    admitted = admit(lines, Room(rows=6, pages=99, lanes=99), now=2.0)

    assert digests(admitted) == ["quiet", "chatty", "", "chatty", "", "chatty"]


def test_who_was_just_served_goes_behind_whoever_waits_since_before():
    chatty = line("chatty", 100, arrived=0.0, served=5.0)
    quiet = line("quiet", arrived=4.0)

    assert digests(admit([chatty, quiet], Room(1, 99, 99), now=6.0)) == ["quiet"]


def test_a_stream_of_new_adapters_does_not_starve_a_served_one():
    old = line("old", 2, arrived=0.0, served=5.0)
    new = line("new", arrived=5.5)

    assert digests(admit([old, new], Room(1, 99, 99), now=6.0)) == ["old"]


def test_an_adapter_in_use_needs_no_more_lanes():
    room = Room(rows=2, pages=99, lanes=0, holders={"a": Holder(8, since=0.0)})

    assert digests(admit([line("a", 2), line("b"), line("")], room, now=0.0)) == ["a", ""]


def test_who_does_not_fit_is_passed_over_for_a_while():
    big, small = line("", arrived=0.0, pages=9), line("a", arrived=1.0)

    assert digests(admit([big, small], Room(4, 8, 8), now=1.0)) == ["a"]


def test_who_waited_too_long_for_pages_is_not_passed_over():
    big, small = line("", arrived=0.0, pages=9), line("a", arrived=1.0)

    assert admit([big, small], Room(4, 8, 8), now=PATIENCE_S + 0.1) == []


def test_who_waited_too_long_for_lanes_gets_the_next_ones():
    wide, narrow = line("wide", arrived=0.0, lanes=16), line("narrow", arrived=1.0)
    room = Room(4, 99, lanes=8, holders={"busy": Holder(8, since=0.0)})

    early = admit([wide, narrow, line("")], room, now=1.0)
    late = admit([wide, narrow, line("")], room, now=PATIENCE_S + 0.1)

    assert digests(early) == ["narrow", ""] or digests(early) == ["", "narrow"]
    assert digests(late) == [""]


def test_the_longest_holder_drains_for_who_waited_too_long():
    lines = [line("first", arrived=3.0), line("second", arrived=3.0), line("starved", arrived=0.5)]
    holders = {"first": Holder(8, since=0.0), "second": Holder(8, since=1.0)}

    admitted = admit(lines, Room(4, 99, lanes=0, holders=holders), now=3.5)

    assert digests(admitted) == ["second"]


def test_pinned_adapters_do_not_drain():
    lines = [line("pinned", arrived=3.0), line("starved", arrived=0.0)]
    holders = {"pinned": Holder(8, since=0.0, pinned=True)}

    admitted = admit(lines, Room(4, 99, lanes=0, holders=holders), now=9.0)

    assert digests(admitted) == ["pinned"]


def test_lanes_are_not_kept_for_who_could_not_use_them():
    lines = [line("too wide", arrived=0.0, lanes=24), line("fits", arrived=1.0)]
    holders = {"pinned": Holder(16, since=0.0, pinned=True)}

    admitted = admit(lines, Room(4, 99, lanes=16, holders=holders), now=9.0)

    assert digests(admitted) == ["fits"]


@st.composite
def situations(draw):
    names = ["", "a", "b", "c", "d"]
    lines = [
        line(
            name,
            draw(st.integers(1, 4)),
            arrived=draw(st.floats(0, 10)),
            pages=draw(st.integers(1, 5)),
            lanes=draw(st.sampled_from([8, 16])),
            served=draw(st.sampled_from([NEVER, 1.0, 9.0])),
        )
        for name in draw(st.sets(st.sampled_from(names)))
    ]
    holders = {
        name: Holder(8, draw(st.floats(0, 10)), draw(st.booleans()))
        for name in draw(st.sets(st.sampled_from(["a", "b", "x"])))
    }
    room = Room(
        draw(st.integers(-1, 8)), draw(st.integers(-1, 20)), draw(st.integers(-8, 40)), holders
    )
    return lines, room


@given(situations())
def test_admission_is_within_capacity_in_order_and_loses_nobody(situation):
    lines, room = situation

    admitted = admit(lines, room, now=10.0)

    new_lanes = {a.digest: a.lanes for a in admitted if a.digest not in room.holders and a.lanes}
    assert len(admitted) <= max(0, room.rows)
    assert sum(a.pages for a in admitted) <= max(0, room.pages)
    assert sum(new_lanes.values()) <= max(0, room.lanes)
    for one in lines:
        mine = [a for a in admitted if a.digest == one.digest]
        assert mine == list(one.asks)[: len(mine)]
    assert len({a.request_id for a in admitted}) == len(admitted)


@given(situations())
def test_an_empty_shard_always_admits_somebody(situation):
    lines, _ = situation

    admitted = admit(lines, Room(rows=1, pages=5, lanes=16), now=10.0)

    assert bool(admitted) == bool(lines)


def test_rotation_ends_starvation_when_one_adapter_fills_the_pool():
    """A, A, A, ... with lanes for one adapter only: B is served after patience and one drain."""
    now, holders, served_b = 0.0, {}, None
    chatty, quiet = line("A", 100), line("B", arrived=0.1)
    running: deque[tuple[float, str]] = deque()
    while served_b is None and now < 60:
        while running and running[0][0] <= now:
            running.popleft()
        in_use = {digest for _, digest in running}
        holders = {d: h for d, h in holders.items() if d in in_use}
        room = Room(2 - len(running), 99, 8 - 8 * len(holders), holders)
        for ask in admit([chatty, quiet], room, now):
            running.append((now + 1.5, ask.digest))
            holders.setdefault(ask.digest, Holder(8, now))
            if ask.digest == "B":
                served_b = now
            else:
                chatty = Line("A", deque(list(chatty.asks)[1:]), now)
        now += 0.5

    assert served_b is not None
    assert served_b <= PATIENCE_S + 2 * 1.5

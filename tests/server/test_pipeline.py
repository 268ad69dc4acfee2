"""One step ahead: the next step is submitted before the last one's tokens are fetched."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loralane_server.errors import DeviceFailed
from loralane_server.pipeline import due
from loralane_server.rows import Admission, Finish

from tests.server.paged import PagedShard, continued

PROMPT = [7] * 20


def admit(
    shard: PagedShard,
    request_id: int,
    more: int,
    digest: str = "",
    stops: frozenset[int] = frozenset(),
) -> None:
    shard.loop.admit(Admission(request_id, digest, [request_id, *PROMPT], more, stops), shard.sink)


def expected(request_id: int, more: int, digest: str = "") -> list[int]:
    return continued(digest, [request_id, *PROMPT], more)


def finish(shard: PagedShard, *request_ids: int) -> None:
    while not all(map(shard.last, request_ids)):
        shard.turn()
        shard.loop.check()


def settle(shard: PagedShard) -> None:
    """Let what is still under way be fetched."""
    while shard.loop.patience is not None:
        shard.turn()
    shard.loop.check()


@given(st.integers(0, 5), st.integers(1, 3), st.booleans())
def test_only_what_the_next_step_covers_stays_under_way(
    under_way: int, depth: int, submitted: bool
) -> None:
    fetched = due(under_way, depth, submitted=submitted)

    assert under_way - fetched == min(under_way, depth - 1 if submitted else 0)


def test_each_step_begins_before_the_one_before_it_is_fetched() -> None:
    shard = PagedShard(pages=10, late=True)
    admit(shard, 1, 4)

    finish(shard, 1)

    assert shard.runner.asked == [
        ("begin", 0),
        ("begin", 1),
        ("fetch", 0),
        ("begin", 2),
        ("fetch", 1),
        ("begin", 3),
        ("fetch", 2),
        ("fetch", 3),
    ]
    assert shard.tokens(1) == expected(1, 4)


def test_a_row_is_told_each_token_as_soon_as_it_is_fetched() -> None:
    shard = PagedShard(pages=10, late=True)
    admit(shard, 1, 10)

    told = []
    for _ in range(5):
        shard.turn()
        told.append((len(shard.tokens(1)), sum(what == "fetch" for what, _ in shard.runner.asked)))

    assert told == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]


def test_with_nothing_to_go_on_with_a_step_is_fetched_at_once() -> None:
    shard = PagedShard(pages=10, late=True)
    admit(shard, 1, 1)

    shard.turn(2)

    assert shard.runner.asked == [("begin", 0), ("fetch", 0)]
    assert shard.tokens(1) == expected(1, 1)


def test_a_device_that_computes_at_once_runs_one_step_a_turn() -> None:
    shard = PagedShard(pages=10)
    admit(shard, 1, 3)

    lengths = []
    for _ in range(3):
        shard.turn()
        lengths.append(len(shard.tokens(1)))

    assert lengths == [1, 2, 3]


def test_no_step_computes_the_last_token_that_a_row_may_have() -> None:
    shard = PagedShard(pages=10, late=True)
    admit(shard, 1, 6)
    admit(shard, 2, 3)

    finish(shard, 1, 2)

    assert shard.dropped == 0
    computed = sum(span.length for spans in shard.device.steps for span in spans)
    assert computed == 2 * (1 + len(PROMPT)) + 5 + 2


def test_what_is_chosen_for_a_row_that_has_stopped_is_dropped() -> None:
    shard = PagedShard(pages=10, late=True)
    tokens = expected(1, 30)
    stop = next(t for t in tokens[3:] if t not in tokens[:3])
    end = tokens.index(stop) + 1
    admit(shard, 1, 30, stops=frozenset({stop}))
    admit(shard, 2, 30)

    finish(shard, 1)
    free = shard.loop.capacity().pages_free
    finish(shard, 2)
    settle(shard)

    last = shard.last(1)
    assert last is not None
    assert last.finish is Finish.STOP_TOKEN
    assert shard.tokens(1) == tokens[:end]
    assert shard.tokens(2) == expected(2, 30)
    assert shard.dropped == 1
    assert 10 - free <= 4  # only the other's are taken, from the very message that it stopped


def test_a_cancelled_row_is_told_nothing_more_and_its_pages_serve_others_at_once() -> None:
    shard = PagedShard(pages=4, late=True)
    admit(shard, 1, 30)
    shard.turn(4)
    had = shard.tokens(1)

    shard.loop.cancel(1, shard.sink)
    admit(shard, 2, 40)
    finish(shard, 2)

    last = shard.last(1)
    assert last is not None
    assert last.finish is Finish.CANCELLED
    assert shard.tokens(1) == had == expected(1, 3)
    assert shard.tokens(2) == expected(2, 40)
    assert shard.dropped == 1
    assert shard.loop.preemptions == 0


def test_lanes_of_a_cancelled_row_are_written_anew_behind_the_step_under_way() -> None:
    shard = PagedShard(pages=20, lanes=8, late=True)
    admit(shard, 1, 30, "one")
    shard.load("one")
    shard.turn(3)

    shard.loop.cancel(1, shard.sink)
    admit(shard, 2, 10, "two")
    shard.load("two")
    finish(shard, 2)

    assert shard.tokens(2) == expected(2, 10, "two")
    assert shard.dropped == 1


def test_a_prefix_is_found_while_the_step_that_computes_it_is_under_way() -> None:
    shard = PagedShard(pages=20, late=True)
    prompt = [5] * 50
    for request_id in (1, 2):
        shard.loop.admit(Admission(request_id, "", prompt, 5), shard.sink)
        shard.turn()

    finish(shard, 1, 2)

    assert [shard.rows[i][0].cached_tokens for i in (1, 2)] == [0, 48]
    assert shard.runner.asked[:3] == [("begin", 0), ("begin", 1), ("fetch", 0)]
    assert shard.tokens(1) == shard.tokens(2) == continued("", prompt, 5)


def test_generated_tokens_are_found_again_and_none_behind_a_stop_token() -> None:
    shard = PagedShard(pages=20, late=True)
    tokens = expected(1, 60)
    stop = next(t for t in tokens[30:] if t not in tokens[:30])
    end = tokens.index(stop) + 1
    admit(shard, 1, 60, stops=frozenset({stop}))
    finish(shard, 1)
    again = [1, *PROMPT, *tokens]

    shard.loop.admit(Admission(2, "", again, 5), shard.sink)
    finish(shard, 2)

    known = 1 + len(PROMPT) + end
    assert shard.rows[2][0].cached_tokens == (known - 1) // 16 * 16
    assert shard.tokens(2) == continued("", again, 5)


@pytest.mark.parametrize("late", [False, True])
def test_a_page_that_the_last_step_of_a_row_fills_is_found(late: bool) -> None:
    shard = PagedShard(pages=20, late=late)
    more = 3 * 16 + 1 - 1 - len(PROMPT)  # but for the last token, three pages
    admit(shard, 1, more)
    finish(shard, 1)

    shard.loop.admit(Admission(2, "", [1, *PROMPT, *shard.tokens(1)], 5), shard.sink)
    finish(shard, 2)

    assert shard.rows[2][0].cached_tokens == 48


def test_a_row_is_stopped_only_with_nothing_under_way() -> None:
    shard = PagedShard(pages=6, prefix_cache=False, late=True)
    admit(shard, 1, 40)
    admit(shard, 2, 30)
    while not shard.loop.preemptions:
        before = len(shard.runner.asked)
        shard.turn()

    assert [what for what, _ in shard.runner.asked[before - 1 :]] == ["fetch", "begin"]
    finish(shard, 1, 2)
    assert (shard.tokens(1), shard.tokens(2)) == (expected(1, 40), expected(2, 30))
    assert shard.dropped == 0


def test_rows_of_a_step_that_cannot_begin_are_told_what_the_one_before_chose() -> None:
    shard = PagedShard(pages=10, late=True)
    admit(shard, 1, 10)
    shard.turn(3)
    shard.runner.refuses = True
    shard.turn()
    shard.runner.refuses = False
    admit(shard, 2, 10)

    finish(shard, 2)

    last = shard.last(1)
    assert last is not None
    assert last.finish is Finish.ERROR
    assert shard.tokens(1) == expected(1, 3)
    assert shard.tokens(2) == expected(2, 10)
    assert shard.loop.capacity().pages_free == 10


def test_a_device_that_fails_in_a_step_under_way_is_noticed_when_that_is_fetched() -> None:
    shard = PagedShard(pages=10, late=True)
    admit(shard, 1, 10)
    shard.device.lost = True
    shard.turn()

    with pytest.raises(DeviceFailed, match="the memory is gone"):
        shard.turn()

    assert shard.last(1) is None


def test_how_long_a_step_takes_is_from_one_fetch_to_the_next() -> None:
    ticks = count()
    shard = PagedShard(pages=10, late=True, clock=lambda: next(ticks) * 0.005)
    admit(shard, 1, 5)
    finish(shard, 1)

    capacity = shard.loop.capacity()

    # Each turn reads the clock twice, when it begins a step and when it has fetched one.
    assert capacity.step_ms == pytest.approx(10, abs=2.5)

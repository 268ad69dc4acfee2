"""The loop when pages run out: nothing is lost, told twice or computed over and over."""

from itertools import count

import pytest
from loralane_server.errors import DeviceFailed
from loralane_server.rows import Admission, Finish

from tests.server.paged import PagedShard, continued

PROMPT = [7] * 40


def admit(shard: PagedShard, request_id: int, count: int, digest: str = "") -> None:
    prompt = [request_id, *PROMPT]
    shard.loop.admit(Admission(request_id, digest, prompt, count), shard.sink)


def expected(request_id: int, count: int, digest: str = "") -> list[int]:
    return continued(digest, [request_id, *PROMPT], count)


def finish(shard: PagedShard, *request_ids: int) -> int:
    """Turn until all these have ended; return how many turns that took."""
    turns = 0
    while not all(map(shard.last, request_ids)):
        shard.turn()
        shard.loop.check()
        turns += 1
        assert turns < 5000
    return turns


def test_a_stopped_row_goes_on_where_it_was_and_before_any_that_came_later() -> None:
    shard = PagedShard(pages=10, prefix_cache=False)
    admit(shard, 1, 80)
    admit(shard, 2, 60)
    while not shard.loop.preemptions:
        shard.turn()
    had = shard.tokens(2)
    admit(shard, 3, 5)

    while not shard.tokens(3):
        shard.turn()

    assert 0 < len(had) < len(shard.tokens(2))
    finish(shard, 1, 2, 3)
    assert shard.loop.preemptions == 1
    for request_id, tokens in ((1, 80), (2, 60), (3, 5)):
        assert shard.tokens(request_id) == expected(request_id, tokens)


def test_the_oldest_row_is_never_stopped() -> None:
    shard = PagedShard(pages=9)
    admit(shard, 1, 100)
    for request_id in range(2, 6):
        admit(shard, request_id, 40)

    turns = finish(shard, 1)

    assert turns == 100  # its prompt fits into one chunk, and no turn passed without it
    finish(shard, 2, 3, 4, 5)
    assert all(shard.tokens(i) == expected(i, 40) for i in range(2, 6))


def test_many_rows_on_few_pages_compute_little_twice() -> None:
    for pages in (10, 20, 50):
        shard = PagedShard(pages=pages, rows=16, prefix_cache=False)
        for request_id in range(16):
            admit(shard, request_id, 100)

        finish(shard, *range(16))

        computed = sum(span.length for spans in shard.device.steps for span in spans)
        assert all(shard.tokens(i) == expected(i, 100) for i in range(16))
        assert 0 < shard.loop.preemptions <= 16
        assert computed < 1.6 * 16 * (len(PROMPT) + 100)


def test_a_stopped_row_finds_again_what_was_not_taken_yet() -> None:
    """Its pages are given up from the end of its prefix on, as others take them."""
    computed = {}
    for prefix_cache in (False, True):
        shard = PagedShard(pages=10, prefix_cache=prefix_cache)
        for request_id in (1, 2):
            admit(shard, request_id, 60)

        finish(shard, 1, 2)

        assert shard.loop.preemptions > 0
        computed[prefix_cache] = sum(s.length for spans in shard.device.steps for s in spans)
    assert computed[True] < computed[False]


def test_a_row_that_waits_for_its_adapter_gives_way_and_begins_again() -> None:
    shard = PagedShard(pages=10)
    admit(shard, 1, 30, digest="one")
    shard.store.hand_over("one")
    shard.store.hand_over("one")
    shard.turn(2)
    in_wave = [progress.rows for progress in shard.loop.progress()]
    admit(shard, 2, 110)
    shard.turn(100)
    stopped, waiting = shard.loop.preemptions, shard.loop.progress()

    shard.load("one")
    finish(shard, 1, 2)

    assert in_wave == [(1,)]
    assert stopped == 1
    assert [progress.rows for progress in waiting] == [()]
    assert shard.tokens(1) == expected(1, 30, "one")
    assert shard.tokens(2) == expected(2, 110)


def test_a_row_stopped_before_its_first_token_reports_what_it_found_at_first() -> None:
    """The oldest becomes ready while the other computes its prompt, which it later finds kept."""
    shard = PagedShard(pages=5, step_tokens=32)
    admit(shard, 1, 20, digest="one")
    admit(shard, 2, 4)
    shard.turn()
    shard.load("one")
    while not shard.loop.preemptions:
        shard.turn()
    had, steps = shard.tokens(2), len(shard.device.steps)

    finish(shard, 1, 2)

    assert had == []
    assert [s.start for spans in shard.device.steps[steps:] for s in spans if s.length > 1] == [16]
    assert [event.cached_tokens for event in shard.rows[2]] == [0] * 4
    assert (shard.tokens(1), shard.tokens(2)) == (expected(1, 20, "one"), expected(2, 4))


def test_a_step_that_fails_ends_its_rows_and_keeps_nothing_of_them() -> None:
    shard = PagedShard(pages=10)
    admit(shard, 1, 10)
    shard.device.broken = True
    shard.turn()
    shard.device.broken = False
    admit(shard, 2, 10)

    finish(shard, 2)

    last = shard.last(1)
    assert last is not None
    assert last.finish is Finish.ERROR
    assert shard.tokens(2) == expected(2, 10)
    assert shard.rows[2][0].cached_tokens == 0
    assert shard.loop.capacity().pages_free == 10


def test_how_long_steps_take_is_measured_and_reported() -> None:
    ticks = count()
    shard = PagedShard(pages=10, clock=lambda: next(ticks) * 0.005)
    admit(shard, 1, 3)

    shard.turn()
    prompt = shard.loop.capacity()
    shard.turn()
    stream = shard.loop.capacity()

    assert (prompt.step_ms, prompt.token_ms) == (0, pytest.approx(5 / 41))
    assert (stream.step_ms, stream.token_ms) == (pytest.approx(5), pytest.approx(5 / 41))


def test_a_device_that_failed_runs_no_further_step() -> None:
    shard = PagedShard(pages=10)
    admit(shard, 1, 10)
    shard.device.lost = True

    with pytest.raises(DeviceFailed, match="the memory is gone"):
        shard.turn()

    assert shard.last(1) is None

"""Who may still wait, when the others should come back, and how fast a queue moves."""

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.queueing.overload import Backlog, DrainRate, places_left, refusal

from tests.router.desk import desks, token


def backlog(requests=0, tokens=0, tokens_per_s=0.0) -> Backlog:
    return Backlog(requests, tokens, tokens_per_s)


@pytest.mark.parametrize(
    ("requests", "tokens", "refused"),
    [
        (9, 99, False),
        (10, 0, True),
        (11, 0, True),
        (0, 100, True),
        (0, 99, False),
        (-1, 1000, False),  # a row is free
    ],
)
def test_a_queue_is_bounded_by_requests_and_by_tokens(requests, tokens, refused):
    error = refusal(backlog(requests, tokens), max_requests=10, max_tokens=100)

    assert (error is not None) is refused


def test_without_a_bound_tokens_do_not_count():
    assert refusal(backlog(9, 10**9), max_requests=10, max_tokens=None) is None


def test_without_a_queue_who_cannot_start_at_once_is_refused():
    assert refusal(backlog(-1), max_requests=0, max_tokens=None) is None
    assert refusal(backlog(0), max_requests=0, max_tokens=None) is not None


@pytest.mark.parametrize(
    ("requests", "tokens", "places"),
    [
        (4, 0, 6),
        (10, 0, 0),
        (-2, 1000, 12),  # two rows are free
        (4, 80, 1),  # of 20 tokens each, as those four
        (4, 20, 6),
        (4, 200, -2),
    ],
)
def test_places_are_left_as_far_as_requests_and_tokens_go(requests, tokens, places):
    assert places_left(backlog(requests, tokens), 4, max_requests=10, max_tokens=100) == places


def test_a_refusal_says_what_waits_and_when_to_come_back():
    error = refusal(backlog(10, 5000, 250.0), 10, None)
    by_tokens = refusal(backlog(3, 5000, 250.0), 10, 5000)

    assert error is not None
    assert by_tokens is not None
    assert (error.kind, error.status.http) == (pb.ERROR_KIND_OVERLOADED, 429)
    assert (error.retry_after_s, by_tokens.retry_after_s) == (20.0, 20.0)
    assert "10 requests" in error.message
    assert "5000 prompt tokens" in by_tokens.message


@pytest.mark.parametrize(
    ("tokens", "rate", "seconds"),
    [(1000, 100.0, 10.0), (10, 100.0, 1.0), (10**9, 1.0, 60.0), (1000, 0.0, 1.0), (0, 0.0, 1.0)],
)
def test_retry_after_is_the_queues_own_time_within_bounds(tokens, rate, seconds):
    assert backlog(10, tokens, rate).retry_after_s == seconds


def test_the_rate_is_what_left_while_somebody_waited():
    rate = DrainRate()
    rate.note(0.0, 0, waiting=True)
    for second in range(1, 11):
        rate.note(float(second), 50, waiting=True)

    assert rate.tokens_per_s == pytest.approx(50.0, rel=0.03)


def test_idle_time_and_what_starts_at_once_say_nothing():
    rate = DrainRate()
    rate.note(0.0, 10_000, waiting=False)
    assert rate.tokens_per_s == 0.0
    rate.note(1000.0, 0, waiting=True)
    rate.note(1002.0, 200, waiting=False)
    rate.note(9000.0, 5000, waiting=False)

    assert rate.tokens_per_s == pytest.approx(100.0)


def test_a_queue_that_stands_still_slows_the_rate_down():
    rate = DrainRate()
    rate.note(0.0, 0, waiting=True)
    rate.note(1.0, 100, waiting=True)
    rate.note(11.0, 0, waiting=True)

    assert 0 < rate.tokens_per_s < 10


def test_the_past_fades():
    rate = DrainRate()
    rate.note(0.0, 0, waiting=True)
    for second in range(1, 61):
        rate.note(float(second), 1000, waiting=True)
    for second in range(61, 181):
        rate.note(float(second), 10, waiting=True)

    assert 10 < rate.tokens_per_s < 50


def test_several_looks_at_one_moment_are_one():
    rate = DrainRate()
    rate.note(0.0, 0, waiting=True)
    rate.note(2.0, 30, waiting=True)
    rate.note(2.0, 30, waiting=True)
    rate.note(2.0, 0, waiting=True)

    assert rate.tokens_per_s == pytest.approx(30.0)


async def test_a_dispatcher_counts_the_prompts_that_wait_and_that_leave():
    async with desks() as make:
        desk = make(rows=1)
        for id in (1, 2, 3, 4):
            desk.submit(id, "")
        await desk.turn(10.0)
        waiting_first = desk.dispatcher.waiting_tokens
        unknown = desk.dispatcher.tokens_per_s
        await desk.turn(11.0, token(1, 98, "LENGTH"))
        await desk.turn(12.0, token(2, 98, "LENGTH"))

        assert (waiting_first, unknown) == (9, 0.0)
        assert desk.dispatcher.waiting_tokens == 3
        assert desk.dispatcher.tokens_per_s == pytest.approx(3.0)

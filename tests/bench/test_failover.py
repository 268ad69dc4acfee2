"""Verdicts on a shard that was killed."""

from dataclasses import replace
from math import inf

from bench.failover import Measured, exact, longest_gap, promises
from bench.traffic import BROKEN, Answer

GOOD = Measured(
    streams=2,
    exact=2,
    statuses={200: 2},
    replays={},
    quiet_gap=0.1,
    longest_gap=1.0,
    probes=((0.1, inf), (2.0, inf), (2.1, 0.4)),
    rejoined=0.9,
)


def verdicts(measured: Measured) -> list[bool]:
    return [promise.holds for promise in promises(measured)]


def test_new_requests_may_fail_for_two_seconds_and_all_else_must_go_on():
    assert verdicts(GOOD) == [True, True, True]
    assert (GOOD.left_after, GOOD.first_new) == (2.0, 2.5)


def test_each_promise_is_judged_by_itself():
    assert verdicts(replace(GOOD, exact=1)) == [False, True, True]
    assert verdicts(replace(GOOD, probes=((2.1, inf),))) == [True, False, True]
    assert verdicts(replace(GOOD, probes=())) == [True, False, True]
    assert verdicts(replace(GOOD, rejoined=inf)) == [True, True, False]


def test_a_stream_is_exact_if_it_came_to_its_end_with_its_own_text():
    expected = {"a": "xy", "b": "z"}
    answers = [
        Answer("a", 0.0, 1.0, 200, (1.0,), 2, "xy"),
        Answer("b", 0.0, 1.0, 200, (1.0,), 1, "xy"),
        Answer("b", 0.0, 1.0, BROKEN, (1.0,), None, "z"),
    ]

    assert exact(answers, expected) == 1


def test_the_longest_gap_is_within_one_stream_not_between_two():
    answers = [Answer("a", 0.0, 9.0, 200, (1.0, 2.0, 5.0), 3), Answer("b", 0.0, 9.0, 200, (9.0,))]

    assert longest_gap(answers) == 3.0
    assert longest_gap([]) == 0.0

"""Verdicts on an overload."""

from dataclasses import replace
from math import inf

from bench.overload_figures import Measured, promises, refusals
from bench.traffic import Answer

GOOD = Measured(
    peaks=[110.0, 90.0, 110.0, 190.0],
    goodputs=[94.0, 95.0, 150.0],
    can=3.0,
    offered=30.0,
    normal_p50=0.1,
    accepted_p50=2.0,
    accepted_p99=3.0,
    refusals_p50=0.002,
    refusals_p99=0.05,
    recovery=5.0,
    statuses={200: 30, 429: 270},
    memory={"router": (100, 105), "shard": (1000, 1000)},
    generator=0.1,
)


def broken(measured: Measured) -> list[str]:
    return [promise.what.split(" ")[0] for promise in promises(measured) if not promise.holds]


def test_a_run_within_all_bounds_holds():
    assert broken(GOOD) == []


def test_each_bound_is_judged_by_itself():
    assert broken(replace(GOOD, goodputs=[94.0, 94.0, 150.0])) == ["goodput"]
    assert broken(replace(GOOD, refusals_p99=0.051)) == ["refusals'"]
    assert broken(replace(GOOD, recovery=inf)) == ["first"]
    assert broken(replace(GOOD, memory={"router": (100, 106), "shard": (9, 9)})) == ["router's"]


def test_requests_that_are_neither_answered_nor_refused_and_a_run_without_refusals_do_not_hold():
    assert broken(replace(GOOD, statuses={200: 30, 429: 269, 0: 1})) == ["269"]
    assert broken(replace(GOOD, statuses={200: 300}, refusals_p99=inf)) == ["refusals'", "0"]


def test_an_overload_is_compared_with_the_peaks_around_it():
    assert GOOD.shares == [0.94, 0.95, 1.0]


def test_only_refusals_by_load_are_timed_and_to_their_last_byte():
    answers = [Answer("a", 1.0, 1.5, 429), Answer("a", 1.0, 9.0, 200), Answer("a", 1.0, 9.0, 503)]

    assert refusals(answers) == [0.5]

"""Verdicts: what holds, what does not, and what was never measured."""

import asyncio
from math import inf, nan

import pytest

from bench.promises import Promise, at_least, at_most, conclude, within


def test_a_bound_itself_is_within_the_bound():
    assert at_most("x", 2.0, 2.0).holds
    assert at_least("x", 0.95, 0.95).holds
    assert not at_most("x", 2.01, 2.0).holds
    assert not at_least("x", 0.949, 0.95).holds


@pytest.mark.parametrize("value", [nan, inf])
def test_what_was_not_measured_does_not_hold(value):
    assert not at_most("x", value, 2.0).holds


def test_no_number_is_not_at_least_anything():
    assert not at_least("x", nan, 0.0).holds


def test_the_line_says_what_was_measured_and_what_was_promised():
    assert at_most("p99", 61.5, 50, " ms").line == "DOES NOT HOLD: p99 61.50 ms, at most 50.00 ms"
    assert at_least("goodput", 1, 0.95).line == "holds: goodput 1.00, at least 0.95"


def test_one_broken_promise_gives_exit_status_1(capsys):
    good, bad = Promise("this", holds=True), Promise("that", holds=False)

    assert conclude([good]) == 0
    assert conclude([good, bad]) == 1
    assert conclude([]) == 1
    assert "DOES NOT HOLD: that" in capsys.readouterr().out


async def test_a_benchmark_that_never_ends_is_ended():
    async def for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="raise --limit"):
        await within(0.0, for_ever())

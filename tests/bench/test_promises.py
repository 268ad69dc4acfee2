"""Verdicts: what holds, what does not, and what was never measured."""

import asyncio
from math import inf, nan

import pytest

from bench.promises import NotMeasured, Promise, at_least, at_most, conclude, run


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


async def for_ever() -> None:
    await asyncio.Event().wait()


async def nothing() -> None:
    raise NotMeasured("nobody answered")


@pytest.mark.parametrize(
    ("work", "said"), [(for_ever, "not done within 0 s"), (nothing, "nobody answered")]
)
def test_a_benchmark_that_never_ends_or_measures_nothing_ends_with_a_verdict(work, said, capsys):
    with pytest.raises(SystemExit) as end:
        run(0.0, work())

    assert end.value.code == 1
    assert f"DOES NOT HOLD: {said}" in capsys.readouterr().out


async def two() -> int:
    return 2


def test_what_is_measured_in_time_is_returned():
    assert run(60.0, two()) == 2

"""Gaps between tokens, from times that can be added up by hand."""

import pytest

from bench.windows import Gaps, Window, compare, gaps_within, sum_up, worst


def steady(begin: float, end: float, gap: float = 1.0) -> list[float]:
    return [begin + n * gap for n in range(int((end - begin) / gap) + 1)]


def test_gaps_belong_to_the_window_in_which_they_end():
    streams = [[0.0, 1.0, 4.0, 5.0], [0.5, 3.5]]

    assert gaps_within(streams, Window(3.0, 4.5)) == Gaps(2, 3.0, 3.0, 3.0)
    assert gaps_within(streams, Window(4.6, 9.0)) == Gaps(1, 1.0, 1.0, 1.0)


def test_a_window_without_tokens_has_no_gaps():
    assert gaps_within([[0.0, 1.0]], Window(5.0, 6.0)) == Gaps(0, 0.0, 0.0, 0.0)


def test_a_stall_shows_in_the_storm_and_not_in_the_quiet_around_it():
    stalled = [*steady(0, 10), *steady(13, 30)]

    got = compare([stalled], Window(0, 9.5), Window(9.5, 20.5), Window(20.5, 30))

    assert (got.quiet.p50, got.quiet.p99, got.quiet.largest) == (1.0, 1.0, 1.0)
    assert (got.storm.largest, got.largest_in_steps) == (3.0, 3.0)
    assert got.p99_of_quiet == 3.0
    assert got.quiet_largest_in_steps == 1.0


def test_of_several_storms_the_largest_gap_and_the_middle_of_the_rest_count():
    calm = [steady(0, 30)]
    windows = Window(0, 9.5), Window(9.5, 20.5), Window(20.5, 30)
    storms = [compare(calm, *windows), compare(calm, *windows)]
    storms.append(compare([[*steady(0, 10), *steady(14, 30)]], *windows))

    got = sum_up(storms)

    assert (got.p99_of_quiet, got.largest_in_steps) == (1.0, 4.0)


def test_the_worst_gaps_are_told_with_their_place_in_the_window():
    stream = [0.0, 1.0, 3.0, 4.0, 9.0, 10.0]

    assert worst(stream, Window(0.5, 9.5), 2) == [(8.5, 5.0), (2.5, 2.0)]
    assert worst(stream, Window(11.0, 12.0), 2) == []
    with pytest.raises(ZeroDivisionError):
        compare([stream], Window(20, 21), Window(0, 10), Window(20, 21))

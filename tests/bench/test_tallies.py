"""What tenants got, from answers that can be added up by hand."""

from math import inf

import pytest

from bench.tallies import (
    by_tenant,
    capacity,
    first_tokens,
    growth,
    least_of_fair,
    rate_within,
    recovered_after,
    sent_within,
    served,
    statuses,
    tokens_within,
    waited_within,
)
from bench.traffic import CALLED_OFF, Answer, NothingServed
from bench.windows import Window


def answer(tenant: str, sent: float, *times: float, counted: int | None = None) -> Answer:
    return Answer(tenant, sent, max(times, default=sent), 200, times, counted)


def refused(sent: float) -> Answer:
    return Answer("a", sent, sent, 429)


def test_tokens_count_where_they_came_not_where_their_request_was_sent():
    answers = [answer("a", 0.0, 1.0, 2.0, 3.0, counted=3), answer("b", 2.0, 2.5, 9.0, counted=2)]

    assert tokens_within(answers, Window(2.0, 4.0)) == 3
    assert rate_within(answers, Window(2.0, 4.0)) == 1.5
    assert [a.tenant for a in sent_within(answers, Window(2.0, 4.0))] == ["b"]


def test_an_event_of_several_tokens_counts_as_several_and_an_unfinished_answer_by_its_events():
    whole = answer("a", 0.0, 1.0, 2.0, counted=6)
    called_off = Answer("b", 0.0, 3.0, CALLED_OFF, (1.0, 2.0))

    assert tokens_within([whole, called_off], Window(0.0, 1.5)) == 3 + 1


def test_who_had_no_token_waited_for_ever_and_shows_in_the_percentiles():
    quick = [answer("a", 0.0, 1.0) for _ in range(99)]

    assert first_tokens([*quick, refused(0.0)], 0.99) == 1.0
    assert first_tokens([*quick, refused(0.0), refused(0.0)], 0.99) == inf
    assert first_tokens([], 0.5) == inf


def test_a_server_that_answers_nothing_has_no_capacity_to_measure():
    window = Window(0.0, 4.0)

    assert capacity([answer("a", 0.0, 1.0, 2.0)], window) == 0.5
    with pytest.raises(NothingServed, match="429: 1"):
        capacity([refused(0.0)], window)


def test_what_waited_in_a_window_may_have_been_sent_before_it_and_have_no_token_yet():
    old, over, later = answer("old", 0.0, 9.0), answer("over", 0.0, 1.0), answer("later", 6.0, 7.0)

    waited = waited_within([old, over, later, refused(1.0)], Window(2.0, 5.0))

    assert waited == [old, refused(1.0)]


def test_answers_are_sorted_and_counted():
    answers = [answer("a", 0.0, 1.0), answer("b", 0.0, 1.0), refused(1.0)]

    assert statuses(answers) == {200: 2, 429: 1}
    assert {name: len(found) for name, found in by_tenant(answers).items()} == {"a": 2, "b": 1}


def test_what_was_served_adds_up_step_by_step_within_the_window():
    answers = [answer("a", 0.0, 0.5, 1.5, 1.6, 3.5), answer("a", 0.0, -1.0, 4.0)]

    assert served(answers, Window(0.0, 4.0), 1.0) == [1, 3, 3, 4]


def test_the_worst_share_is_told_also_of_who_got_nothing():
    assert least_of_fair({"a": 3.0, "b": 1.0}, ("a", "b")) == 0.5
    assert least_of_fair({"a": 3.0}, ("a", "b")) == 0.0
    assert least_of_fair({}, ("a", "b")) == 0.0
    assert least_of_fair({"a": 2.0, "b": 2.0}, ("a", "b")) == 1.0


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([1.0] * 5, 0.0),
        ([9.0] * 3 + [1.0] * 5, 1.0),  # of the five from the second on, three are quick
        ([9.0] * 6 + [1.0] * 5, 4.0),
        ([9.0] * 9, inf),
        ([1.0] * 4, inf),  # too few to say
    ],
)
def test_time_to_first_token_is_normal_again_when_the_middle_of_five_in_a_row_is(waits, expected):
    answers = [answer("a", 10.0 + n, 10.0 + n + wait) for n, wait in enumerate(waits)]

    assert recovered_after(answers, since=10.0, normal=1.0, factor=1.5) == expected


def test_a_refusal_after_the_overload_delays_the_recovery():
    refusals = [refused(10.0 + n) for n in range(3)]
    quick = [answer("a", 13.0 + n, 13.5 + n) for n in range(5)]
    before = [answer("a", n, n + 0.1) for n in range(5)]

    assert recovered_after([*before, *refusals, *quick], 10.0, normal=0.5, factor=1.5) == 1.0


def test_memory_is_compared_from_when_it_had_settled():
    samples = [(0.0, 100), (59.0, 150), (61.0, 160), (300.0, 168)]

    assert growth(samples, settled_at=60.0) == (160, 168)
    assert growth(samples[:2], settled_at=60.0) == (150, 150)

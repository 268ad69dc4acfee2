"""The flood's plan and its verdicts."""

from collections import Counter
from math import inf

from bench.flood import FAIR, FIRST_COME, FLOOD, Measured, Plan, promises
from bench.traffic import CALLED_OFF, Answer
from bench.windows import Window

PLAN = Plan(("a", "b", "c"), share=2.0, flood=10.0, settle=100.0, seconds=800.0, tail=100.0)


def one(name: str, victims: tuple[float, ...], rate: float) -> Measured:
    return Measured(name, victims, (), rate, {}, 0.0, {})


def verdicts(*rounds: Measured) -> list[bool]:
    return [promise.holds for promise in promises(rounds)]


def test_only_the_last_tenant_floods_and_the_others_send_at_the_same_times_whatever_it_does():
    fair, flood = PLAN.arrivals(FAIR, 1), PLAN.arrivals(FLOOD, 1)

    assert [a for a in fair if a[1] != "c"] == [a for a in flood if a[1] != "c"]
    counts, more = (Counter(who for _, who in arrivals) for arrivals in (fair, flood))
    assert all(abs(counts[name] - 2000) < 200 for name in "abc")
    assert abs(more["c"] - 20000) < 600


def test_first_come_first_served_gets_the_floods_load_and_another_round_other_times():
    assert PLAN.arrivals(FIRST_COME, 1) == PLAN.arrivals(FLOOD, 1)
    assert PLAN.arrivals(FAIR, 1) != PLAN.arrivals(FAIR, 2)


def test_only_what_was_sent_in_the_window_is_judged_and_all_tokens_in_it_count():
    answers = [
        Answer("a", 0.0, 12.0, 200, (11.0, 12.0), 2),
        Answer("a", 11.0, 14.0, 200, (13.0, 14.0), 2),
        Answer("b", 12.0, 30.0, CALLED_OFF),
        Answer("c", 12.0, 19.0, 200, (19.0,), 1),
        Answer("b", 25.0, 30.0, CALLED_OFF),
    ]

    got = Measured.of(FLOOD, answers, PLAN, Window(10.0, 20.0), generator=0.1)

    assert sorted(got.victims) == [2.0, inf]
    assert got.flooder == (7.0,)
    assert got.unserved == 1
    assert got.rate == 5 / 10
    assert got.statuses == {200: 2, CALLED_OFF: 1}
    assert got.served["c"][-1] == 1.0


def test_all_promises_hold_when_nobody_notices_the_flood():
    rounds = one(FAIR, (0.1,) * 10, 90), one(FLOOD, (0.2,) * 10, 99), one(FIRST_COME, (9.0,), 100)

    assert verdicts(*rounds) == [True, True, True]


def test_victims_that_wait_longer_a_lower_rate_and_unanswered_victims_each_break_a_promise():
    fair, first = one(FAIR, (0.1,) * 10, 90), one(FIRST_COME, (9.0,), 100)

    assert verdicts(fair, one(FLOOD, (0.1,) * 9 + (0.3,), 100), first) == [False, True, True]
    assert verdicts(fair, one(FLOOD, (0.1,) * 10, 94), first) == [True, False, True]
    assert verdicts(fair, one(FLOOD, (0.1,) * 9 + (inf,), 100), first) == [False, True, False]


def test_nothing_measured_holds_nothing():
    assert verdicts(one(FAIR, (), 0), one(FLOOD, (), 0), one(FIRST_COME, (), 0))[:2] == [
        False,
        False,
    ]

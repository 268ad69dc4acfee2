"""Virtual token counters: who was served less goes first, and nobody saves up a share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loralane_router.queueing import fairness
from loralane_router.queueing.fairness import FairShares
from loralane_router.queueing.weights import Weights


def test_a_prompt_token_costs_one_and_a_generated_token_two_over_the_weight():
    shares = FairShares(Weights.parse({"adapters": {"gold": 4}}))
    gold = shares.flow_of(None, "gold", "d1")

    for flow in (gold, "d2"):
        shares.enter(flow)
    for flow in (gold, "d2"):
        shares.charge(flow, prompt=10)
        shares.charge(flow, generated=3)

    assert (shares.counter(gold), shares.counter("d2")) == (4.0, 16.0)
    shares.check()


def test_who_begins_to_wait_is_lifted_to_the_least_of_those_who_wait():
    shares = FairShares()
    for flow, tokens in (("a", 100), ("b", 300)):
        shares.enter(flow)
        shares.charge(flow, prompt=tokens)

    shares.enter("new")

    assert shares.counter("new") == 100
    shares.check()


def test_a_lead_is_kept_while_its_flow_does_not_wait():
    shares = FairShares()
    shares.enter("a")
    shares.enter("greedy")
    shares.charge("greedy", prompt=500)
    shares.leave("greedy")
    shares.charge("greedy", generated=50)

    shares.enter("greedy")

    assert (shares.counter("greedy"), shares.counter("a")) == (600, 0)
    shares.check()


def test_when_nobody_waited_the_next_starts_where_the_last_one_ended():
    shares = FairShares()
    shares.enter("a")
    shares.charge("a", prompt=70)
    shares.leave("a")

    shares.enter("b")

    assert shares.counter("b") == 70
    shares.check()


def test_a_flow_counts_as_waiting_until_its_last_request_was_taken():
    shares = FairShares()
    shares.enter("a")
    shares.enter("a")
    shares.charge("a", prompt=10)

    shares.leave("a")
    shares.enter("b")
    early = shares.counter("b")
    shares.leave("a")

    assert early == 10
    assert shares._waiting == {"b": 1}


def test_an_idle_flow_is_forgotten_when_its_counter_tells_nothing():
    shares = FairShares()
    shares.enter("a")
    shares.charge("a", prompt=10)
    shares.leave("a")
    shares.enter("b")
    shares.charge("b", prompt=50)

    shares.leave("b")

    assert "a" not in shares._counters
    assert shares.counter("a") == shares.counter("b") == 60
    shares.check()


def test_so_many_idle_flows_are_remembered_and_no_more():
    shares = FairShares()
    shares.enter("who waits with the least counter")
    for number in range(fairness._MOST_IDLE + 5):
        shares.charge(str(number), generated=1 + number)

    assert len(shares._idle) == fairness._MOST_IDLE
    assert (shares.counter("4"), shares.counter("5")) == (0, 12)
    shares.check()


def test_a_flow_is_its_adapter_unless_its_key_has_a_weight():
    shares = FairShares(Weights.parse({"adapters": {"gold": 4, "": 2}, "keys": {"vip": 8}}))

    flows = [
        shares.flow_of("vip", "gold", "d"),
        shares.flow_of("anybody", "gold", "d"),
        shares.flow_of(None, "org/same-bytes", "d"),
        shares.flow_of(None, "", ""),
        shares.flow_of(None, "plain", "e"),
    ]

    assert flows[1:] == ["d", "d", "", "e"]
    assert [shares.weight_of(flow) for flow in flows] == [8, 4, 4, 2, 1]


def test_of_two_weights_of_one_adapter_the_greater_counts():
    shares = FairShares(Weights.parse({"adapters": {"low": 0.5, "high": 3}}))

    for name in ("high", "low"):
        shares.flow_of(None, name, "d")

    assert shares.weight_of("d") == 3


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.sampled_from(["enter", "leave", "prompt", "generated"]),
            st.integers(0, 50),
        ),
        max_size=80,
    )
)
def test_counters_count_what_was_served_and_only_ever_rise(events):
    shares = FairShares()
    waiting = dict.fromkeys("abcd", 0)
    served = dict.fromkeys("abcd", 0)

    for flow, event, tokens in events:
        before = {f: shares.counter(f) for f in "abcd"}
        if event == "enter":
            shares.enter(flow)
            waiting[flow] += 1
        elif event == "leave" and waiting[flow]:
            shares.leave(flow)
            waiting[flow] -= 1
        elif event == "prompt":
            shares.charge(flow, prompt=tokens)
            served[flow] += tokens
        elif event == "generated":
            shares.charge(flow, generated=tokens)
            served[flow] += 2 * tokens
        shares.check()

        after = {f: shares.counter(f) for f in "abcd"}
        assert all(after[f] >= before[f] for f in "abcd")
        assert all(after[f] >= served[f] for f in "abcd")
        if event in ("prompt", "generated"):
            cost = tokens if event == "prompt" else 2 * tokens
            assert after[flow] == pytest.approx(before[flow] + cost)

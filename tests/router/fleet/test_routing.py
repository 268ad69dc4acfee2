"""Which shard a request goes to: each term decides when all else is equal."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loralane_router.fleet.routing import (
    AHEAD_S,
    DEFAULT_STEP_MS,
    DEFAULT_TOKEN_MS,
    LOAD_S,
    ROW_STEPS,
    ROWS_FOR_AN_IDLE_ADAPTER,
    SCARCITY,
    STEP_TOKENS,
    TYPICAL_BYTES,
    Need,
    ShardView,
    choose,
    expected_s,
)

#: A step is 0.01 s and a token of a prompt 0.001 s; the adapter is there and everything is free.
FREE = ShardView(
    rows_total=8, rows_free=8, step_ms=10.0, token_ms=1.0, lanes_total=64, tier="device"
)
NEED = Need(tokens=100, lanes=16)


@pytest.mark.parametrize(
    "worse",
    [
        {"pending_tokens": 1},
        {"queued_tokens": 1},
        {"step_ms": 10.1},
        {"token_ms": 1.01},
        {"rows_free": 0},
        {"rows_free": 7},
        {"waiting": 8},
        {"tier": "host"},
        {"tier": "loading"},
    ],
)
def test_each_term_decides_when_all_else_is_equal(worse: dict[str, object]):
    busier = replace(FREE, **worse)

    assert choose([busier, FREE], NEED) == 1
    assert choose([FREE, busier], NEED) == 0


@pytest.mark.parametrize("worse", [{"loads": 1}, {"lanes_in_use": 1}, {"lanes_in_use": 64}])
def test_loads_and_lanes_decide_for_an_adapter_that_is_not_there_yet(worse: dict[str, object]):
    cold = replace(FREE, tier="host")
    busier = replace(cold, **worse)

    assert choose([busier, cold], NEED) == 1
    assert choose([cold, busier], NEED) == 0
    assert expected_s(replace(busier, tier="device"), NEED) == expected_s(FREE, NEED)


def test_the_faster_tier_wins():
    tiers = ["remote", "disk", "host", "device"]
    views = [replace(FREE, tier=tier) for tier in tiers]

    while tiers:
        assert tiers[choose(views, NEED)] == tiers[-1]
        tiers.pop()
        views.pop()


def test_bytes_count_and_where_they_are_not_known_those_of_a_typical_adapter_do():
    host, remote = replace(FREE, tier="host"), replace(FREE, tier="remote")
    large = replace(NEED, bytes=400_000_000)

    assert expected_s(remote, large) - expected_s(FREE, large) == pytest.approx(0.125 + 1.0)
    assert expected_s(host, large) - expected_s(FREE, large) == pytest.approx(0.005 + 0.2)
    assert expected_s(host, NEED) == expected_s(host, replace(NEED, bytes=TYPICAL_BYTES))


def test_the_seconds_of_prompts_ahead_by_hand():
    view = replace(FREE, pending_tokens=400, queued_tokens=524)

    # 400 + 524 + 100 tokens are two steps' full, each of 0.01 s, and the step that samples.
    assert STEP_TOKENS == 512
    assert expected_s(view, NEED) == pytest.approx(1.024 + 0.02 + 0.01)


def test_the_seconds_until_a_row_is_free_by_hand():
    view = replace(FREE, rows_free=1, waiting=2)

    # Two more rows have to end, and 8 end within the life of a row, 200 steps or 2 s.
    assert ROW_STEPS == 200
    seconds = expected_s(view, NEED) - expected_s(FREE, NEED)
    assert seconds == pytest.approx(2 * 2.0 / 8 + SCARCITY * 2.0)


def test_the_seconds_until_lanes_are_free_by_hand():
    view = replace(FREE, tier="host", lanes_in_use=56, loads=2)

    # 8 of 16 lanes are missing; a seventh of those in use changes hands in a row's life, 2 s, or
    # rather a third of that, since an adapter may have several rows.
    missing = 8 * ROWS_FOR_AN_IDLE_ADAPTER * 2.0 / 56
    scarcity = SCARCITY * 2.0 * (56 / 64) ** 2
    seconds = expected_s(view, NEED) - expected_s(FREE, NEED)
    assert seconds == pytest.approx(0.03 + 2 * AHEAD_S + scarcity + missing)


def test_the_fewer_rows_are_idle_the_more_one_costs_those_who_come_later():
    half, waiting = replace(FREE, rows_free=4), replace(FREE, rows_free=5, waiting=1)

    seconds = expected_s(half, NEED) - expected_s(FREE, NEED)
    assert seconds == pytest.approx(SCARCITY * 2.0 * 0.5**4)
    assert expected_s(waiting, NEED) == expected_s(half, NEED)


def test_base_needs_neither_adapter_nor_lanes():
    view = replace(FREE, tier="remote", loads=9, lanes_in_use=64)

    assert expected_s(view, Need(tokens=100)) == expected_s(FREE, Need(tokens=100))


def test_a_cold_adapter_goes_to_an_idle_shard_unless_its_holder_is_free_soon_enough():
    idle = replace(FREE, tier="remote")
    busy = replace(FREE, pending_tokens=200)
    overloaded = replace(FREE, pending_tokens=2000)

    assert choose([idle, busy], NEED) == 1
    assert choose([idle, overloaded], NEED) == 0


def test_an_adapter_is_not_loaded_a_second_time_where_the_first_load_ends_sooner():
    elsewhere = replace(FREE, tier="remote")
    under_way = replace(FREE, tier="loading", loads=1)

    assert choose([elsewhere, under_way], NEED) == 1


def test_rates_that_are_not_known_are_the_defaults():
    unknown = replace(FREE, step_ms=0.0, token_ms=0.0)
    usual = replace(FREE, step_ms=DEFAULT_STEP_MS, token_ms=DEFAULT_TOKEN_MS)

    assert expected_s(unknown, NEED) == expected_s(usual, NEED)


def test_of_equals_the_one_with_fewer_requests_is_chosen():
    fewer = replace(FREE, rows_free=4)
    more = replace(FREE, rows_total=16, rows_free=8)

    assert expected_s(fewer, NEED) == expected_s(more, NEED)
    assert [choose([more, fewer, more], NEED, turn) for turn in range(3)] == [1, 1, 1]


def test_those_that_are_equal_in_all_share_by_turns():
    views = [replace(FREE, pending_tokens=1), FREE, FREE, FREE]

    chosen = Counter(choose(views, NEED, turn) for turn in range(300))

    assert chosen == {1: 100, 2: 100, 3: 100}


def test_without_a_shard_there_is_nothing_to_choose():
    with pytest.raises(ValueError, match="no shard"):
        choose([], NEED)


_VIEWS = st.builds(
    ShardView,
    rows_total=st.just(64),
    rows_free=st.integers(0, 64),
    waiting=st.integers(0, 100),
    pending_tokens=st.integers(0, 10**6),
    queued_tokens=st.integers(0, 10**6),
    step_ms=st.floats(0, 1e4),
    token_ms=st.floats(0, 1e3),
    lanes_total=st.integers(0, 512),
    lanes_in_use=st.integers(0, 1024),
    loads=st.integers(0, 100),
    tier=st.sampled_from(["device", *LOAD_S]),
)


@given(_VIEWS, st.sampled_from(["waiting", "pending_tokens", "queued_tokens", "loads"]))
def test_more_work_never_makes_a_shard_look_better(view: ShardView, work: str):
    busier = replace(view, **{work: getattr(view, work) + 1})

    assert 0 < expected_s(view, NEED) <= expected_s(busier, NEED)


@given(st.lists(_VIEWS, min_size=1, max_size=8), st.integers(0, 10**6))
def test_nobody_is_better_than_the_chosen_one(views: list[ShardView], turn: int):
    chosen = choose(views, NEED, turn)

    assert expected_s(views[chosen], NEED) == min(expected_s(view, NEED) for view in views)

"""Rates: from what steps took to what the next will take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loralane_server.scheduling.rates import Rates


def after(*steps: tuple[int, float]) -> Rates:
    rates = Rates()
    for prompt_tokens, seconds in steps:
        rates = rates.after(prompt_tokens, seconds)
    return rates


def test_nothing_is_known_at_first() -> None:
    assert (Rates().step_ms, Rates().token_ms) == (0, 0)


def test_a_prompt_costs_what_its_step_took_longer_than_others() -> None:
    rates = after((0, 0.010), (0, 0.010), (100, 0.060))

    assert rates.step_ms == pytest.approx(10)
    assert rates.token_ms == pytest.approx(0.5)


def test_long_chunks_count_for_more_than_short_ones() -> None:
    rates = after((0, 0.010), (1, 0.030), (999, 0.510))

    assert rates.token_ms == pytest.approx(0.52, rel=0.01)


def test_a_step_with_a_prompt_that_took_no_longer_costs_nothing() -> None:
    assert after((0, 0.010), (2, 0.009)).token_ms == 0


def test_what_is_long_past_is_forgotten() -> None:
    rates = after(*[(0, 1.0)] * 100, *[(0, 0.010)] * 16)

    assert rates.step_ms == pytest.approx(505, rel=0.01)
    assert after(*[(0, 1.0)] * 100, *[(0, 0.010)] * 300).step_ms == pytest.approx(10, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(1e-5, 10)), max_size=60))
def test_rates_lie_within_what_was_measured(steps: list[tuple[int, float]]) -> None:
    rates = after(*steps)

    alone = [seconds * 1e3 for tokens, seconds in steps if not tokens]
    with_prompts = [seconds * 1e3 / tokens for tokens, seconds in steps if tokens]
    assert min(alone, default=0) * 0.999 <= rates.step_ms <= max(alone, default=0) * 1.001
    assert 0 <= rates.token_ms <= max(with_prompts, default=0) * 1.001

"""The step planner: streams never wait for prompts, prompts share what is left."""

from hypothesis import given
from hypothesis import strategies as st
from loralane_server.planner import plan_step


def test_decoding_rows_are_in_every_step() -> None:
    assert plan_step([1, 1, 1], budget=2) == [1, 1, 1]


def test_prompts_share_what_is_left_oldest_first() -> None:
    assert plan_step([1, 100, 30], budget=64) == [1, 63, 0]
    assert plan_step([20, 1, 30, 5], budget=40) == [20, 1, 19, 0]


def test_a_long_prompt_takes_several_steps() -> None:
    assert plan_step([1000], budget=512) == [512]


def test_a_prompt_advances_even_when_streams_fill_the_budget() -> None:
    assert plan_step([7], budget=0) == [1]


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 600))
def test_never_more_than_pending_nor_than_the_budget(pending: list[int], budget: int) -> None:
    plan = plan_step(pending, budget)

    singles = pending.count(1)
    assert all(0 <= n <= p for n, p in zip(plan, pending, strict=True))
    assert sum(plan) <= max(budget, singles, 1)
    assert not pending or any(plan)

"""The step planner: streams never wait for prompts, prompts share what is left, waves little."""

from hypothesis import given
from hypothesis import strategies as st
from loralane_server.scheduling.planner import plan_step, plan_waves, wave_tokens


def test_decoding_rows_are_in_every_step() -> None:
    assert plan_step([1, 1, 1], budget=2) == [1, 1, 1]


def test_prompts_share_what_is_left_oldest_first() -> None:
    assert plan_step([1, 100, 30], budget=64) == [1, 63, 0]
    assert plan_step([20, 1, 30, 5], budget=40) == [20, 1, 19, 0]


def test_a_long_prompt_takes_several_steps() -> None:
    assert plan_step([1000], budget=512) == [512]


def test_a_prompt_advances_even_when_streams_fill_the_budget() -> None:
    assert plan_step([7], budget=0) == [1]
    assert plan_step([1, 7, 9, 1], budget=2) == [1, 1, 0, 1]


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 600))
def test_never_more_than_pending_nor_than_the_budget(pending: list[int], budget: int) -> None:
    plan = plan_step(pending, budget)

    singles = pending.count(1)
    assert all(0 <= n <= p for n, p in zip(plan, pending, strict=True))
    assert sum(plan) <= max(budget, singles + 1)
    assert all(n for n, p in zip(plan, pending, strict=True) if p == 1)
    oldest_prompt = next((n for n, p in zip(plan, pending, strict=True) if p > 1), 1)
    assert oldest_prompt > 0


def test_a_wave_alone_runs_all_that_has_arrived() -> None:
    assert plan_waves([(100, 12)], layers=12, streams=None, budget=512) == [12]


def test_beside_streams_a_wave_costs_half_a_step() -> None:
    # 12 layers x 32 tokens is a step of few rows; half of it is 3 layers of 64 tokens.
    assert plan_waves([(64, 12)], layers=12, streams=16, budget=512) == [3]
    assert plan_waves([(64, 12)], layers=12, streams=64, budget=512) == [6]
    assert plan_waves([(1, 12)], layers=12, streams=1, budget=512) == [6]


def test_waves_share_what_is_left_oldest_first() -> None:
    assert plan_waves([(64, 2), (32, 12), (32, 12)], 12, streams=1, budget=512) == [2, 2, 0]
    assert plan_waves([(64, 0), (64, 5)], 12, streams=1, budget=512) == [0, 3]


@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 40)), max_size=8),
    st.integers(2, 80),
    st.one_of(st.none(), st.integers(0, 64)),
    st.integers(1, 1024),
)
def test_waves_advance_within_their_bound(
    waves: list[tuple[int, int]], layers: int, streams: int | None, budget: int
) -> None:
    most = wave_tokens(layers, budget)
    waves = [(min(tokens, most), ready) for tokens, ready in waves]

    plan = plan_waves(waves, layers, streams, budget)

    work = sum(max(tokens, 32) * run for (tokens, _), run in zip(waves, plan, strict=True))
    bound = budget if streams is None else max(streams, 32) // 2
    assert all(0 <= run <= ready for run, (_, ready) in zip(plan, waves, strict=True))
    assert work <= max(layers * bound, 32)
    assert any(plan) == any(ready for _, ready in waves)

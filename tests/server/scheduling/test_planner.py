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


def test_beside_streams_a_chunk_costs_what_it_would_at_the_beginning_however_deep_it_is() -> None:
    # At depth d a token costs 1 + d / 1000: the first 100 cost 105, and 35 from 2000 on 105.6.
    assert plan_step([1, 900], 101, depths=[50, 0], doubling=1000) == [1, 100]
    assert plan_step([1, 900], 101, depths=[50, 2000], doubling=1000) == [1, 34]
    assert plan_step([1, 20, 900], 101, depths=[50, 2000, 0], doubling=1000) == [1, 20, 43]


def test_with_nobody_to_hold_up_a_chunk_is_the_budget_at_any_depth() -> None:
    assert plan_step([900, 900], 101, depths=[2000, 0], doubling=1000) == [101, 0]


def test_the_oldest_prompt_goes_on_at_a_depth_where_nothing_fits() -> None:
    assert plan_step([1, 9, 9], 2, depths=[0, 10**6, 0], doubling=10) == [1, 1, 0]


prompts = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 9000)), max_size=20)


@given(prompts, st.integers(1, 600), st.integers(1, 5000))
def test_chunks_beside_streams_cost_no_more_than_the_budget_and_no_token_less(
    rows: list[tuple[int, int]], budget: int, doubling: int
) -> None:
    pending, depths = [1, *(n for n, _ in rows)], [7, *(depth for _, depth in rows)]

    plan = plan_step(pending, budget, depths, doubling)

    assert all(0 <= n <= p for n, p in zip(plan, pending, strict=True))
    chunks = [(n, p, at) for n, p, at in zip(plan, pending, depths, strict=True) if p > 1]
    cost = sum(price(at, n, doubling) for n, _, at in chunks)
    most = price(0, max(1, budget - pending.count(1)), doubling)
    assert cost <= most or sum(n for n, _, _ in chunks) == 1
    assert not chunks or chunks[0][0] > 0
    tokens, left = sum(n for n, _, _ in chunks), max(1, budget - pending.count(1))
    assert tokens <= left
    cut = next(((n, at) for n, p, at in chunks if n < p), None)
    assert cut is None or tokens == left or cost + price(cut[1] + cut[0], 1, doubling) > most


@given(st.integers(1, 9000), st.integers(1, 600), st.integers(1, 5000))
def test_a_prompt_beside_a_stream_is_computed_in_ever_smaller_chunks(
    tokens: int, budget: int, doubling: int
) -> None:
    done, before = 0, budget
    while tokens - done > 1:
        chunk = plan_step([1, tokens - done], budget, [0, done], doubling)[1]

        assert 0 < chunk <= before
        done, before = done + chunk, chunk


def price(depth: int, tokens: int, doubling: int) -> int:
    """Twice what tokens cost where one at depth x costs doubling + x: a sum over half tokens."""
    return sum(2 * (doubling + x) + 1 for x in range(depth, depth + tokens))


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

"""Sampling depends on (logits, seed, position) and on nothing else."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loralane_server.device.seam import Sampling
from loralane_server.sampling import add_bias, choose, uniform, with_logprobs


def one(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    return int(choose(logits[None], [sampling], [position])[0])


def test_temperature_zero_is_greedy() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])

    assert choose(logits, [Sampling(), Sampling(seed=9)], [0, 0]).tolist() == [1, 0]


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    sampling = [Sampling(temperature=1.0, top_k=k, top_p=0.9, seed=k) for k in range(6)]

    together = choose(logits, sampling, list(range(6))).tolist()

    assert together == [one(logits[i], sampling[i], i) for i in range(6)]


def test_frequencies_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = 4000

    found = Counter(one(probs.log(), Sampling(1.0, seed=3), at) for at in range(draws))

    for token, p in enumerate(probs.tolist()):
        assert found[token] / draws == pytest.approx(p, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.tensor([1.0, 0.0])
    cold = Counter(one(logits, Sampling(0.1, seed=1), at) for at in range(500))
    hot = Counter(one(logits, Sampling(50.0, seed=1), at) for at in range(500))

    assert cold[1] == 0
    assert 150 < hot[1] < 350


def test_top_k_keeps_the_k_most_probable() -> None:
    logits = torch.tensor([1.0, 1.1, 1.2, 1.3])

    found = {one(logits, Sampling(1.0, top_k=2, seed=5), at) for at in range(200)}

    assert found == {2, 3}


def test_top_p_keeps_up_to_and_including_the_token_that_reaches_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    found = {one(logits, Sampling(1.0, top_p=0.6, seed=5), at) for at in range(300)}

    assert found == {0, 1}


def test_a_bias_bans_or_forces_its_token_in_its_own_row_only() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 3)

    add_bias(
        logits,
        [Sampling(logit_bias=((2, -100.0),)), Sampling(), Sampling(logit_bias=((0, 50.0),))],
    )

    assert logits.tolist() == [[1.0, 2.0, -97.0], [1.0, 2.0, 3.0], [51.0, 2.0, 3.0]]


def test_a_tiny_top_p_is_greedy() -> None:
    logits = torch.tensor([0.1, 2.0, 0.3])

    assert {one(logits, Sampling(1.0, top_p=1e-9, seed=5), at) for at in range(50)} == {1}


@pytest.mark.parametrize("overflow", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_row_that_overflowed_draws_a_token_and_changes_no_other(
    overflow: float, cut: dict[str, Any]
) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    sampling = [Sampling(1.0, seed=seed, **cut) for seed in range(3)]
    alone = [one(logits[i], sampling[i], i) for i in range(3)]
    logits[1] = overflow

    together = choose(logits, sampling, list(range(3))).tolist()

    assert together[::2] == alone[::2]
    assert 0 <= together[1] < 20


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_draws_lie_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


def test_neighbouring_seeds_and_positions_draw_independently() -> None:
    draws = {uniform(seed, position) for seed in range(50) for position in range(50)}

    assert len(draws) == 2500
    assert sum(draws) / 2500 == pytest.approx(0.5, abs=0.02)


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])

    output = with_logprobs(logits, torch.tensor([1]), top=2)

    expected = torch.log_softmax(logits, -1)[0]
    assert output.logprobs is not None
    assert output.top_ids is not None
    assert output.logprobs[0] == pytest.approx(float(expected[1]))
    assert output.top_ids[0].tolist() == [0, 1]

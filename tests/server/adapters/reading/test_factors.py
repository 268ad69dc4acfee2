"""Folding, by hand and against the dense merge."""

import pytest
import torch
from loralane_server.adapters.reading.factors import (
    Factors,
    Half,
    fold,
    row_norms,
    serve_together,
    served,
)
from loralane_server.errors import AdapterCorrupt
from torch import Tensor

A = torch.tensor([[3.0, 0.0]])
B = torch.tensor([[0.0, 2.0]])
WEIGHT = torch.tensor([[3.0, 4.0], [0.0, 8.0]])


def rows(begin: int, end: int) -> Tensor:
    return WEIGHT[begin:end]


def test_the_scale_is_folded_into_b_and_its_bias() -> None:
    factors = Factors(A, B, 0.5, lora_bias=torch.tensor([4.0, -2.0]))

    folded = fold(factors, None, None)

    assert folded.b.tolist() == [[0.0, 1.0]]
    assert folded.gain is None
    assert folded.shift is not None
    assert folded.shift.tolist() == [2.0, -1.0]


def test_a_bias_of_its_own_is_told_from_the_bases() -> None:
    factors = Factors(A, B, 1.0, bias=torch.tensor([4.0, -2.0]))

    folded = fold(factors, None, torch.tensor([1.0, 1.0]))

    assert folded.shift is not None
    assert folded.shift.tolist() == [3.0, -3.0]


def test_magnitudes_become_gain_and_leave_the_bases_bias_as_it_is() -> None:
    # W + B^T A = [[3, 4], [6, 8]], whose rows are 5 and 10 long.
    factors = Factors(A, B, 1.0, magnitude=torch.tensor([10.0, 5.0]))

    folded = fold(factors, rows, torch.tensor([1.0, 7.0]))

    assert folded.b.tolist() == [[0.0, 1.0]]
    assert folded.gain is not None
    assert folded.gain.tolist() == [1.0, -0.5]
    assert folded.shift is not None
    assert folded.shift.tolist() == [-1.0, 3.5]


def test_without_any_bias_dora_shifts_nothing() -> None:
    folded = fold(Factors(A, B, 1.0, magnitude=torch.tensor([10.0, 5.0])), rows, None)

    assert folded.shift is None


def test_norms_hold_where_lora_nearly_cancels_the_weight() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 5000), torch.randn(16, 2000)
    exact_weight = -(b.double().T @ a.double()) * (1 - 1e-3)
    weight = exact_weight.float()

    norms = row_norms(lambda begin, end: weight[begin:end], a, b)

    exact = torch.linalg.vector_norm(weight.double() + b.double().T @ a.double(), dim=1)
    assert ((norms - exact).abs() / exact).max() < 1e-3
    plain = row_norms(lambda begin, end: a.new_ones(end - begin, 5000), a, b)
    exact = torch.linalg.vector_norm(1 + b.double().T @ a.double(), dim=1)
    assert ((plain - exact).abs() / exact).max() < 1e-6


def test_a_weight_is_asked_for_in_blocks_that_cover_it_once() -> None:
    asked: list[tuple[int, int]] = []

    def weight(begin: int, end: int) -> Tensor:
        asked.append((begin, end))
        return torch.zeros(end - begin, 1 << 20)

    row_norms(weight, torch.ones(1, 1 << 20), torch.ones(1, 10))

    assert asked == [(0, 4), (4, 8), (8, 10)]


def test_magnitudes_on_a_row_of_zeros_are_not_finite_and_so_refused() -> None:
    factors = Factors(torch.zeros(1, 2), B, 1.0, magnitude=torch.tensor([1.0, 1.0]))

    gain = fold(factors, lambda begin, end: torch.zeros(end - begin, 2), None).gain

    assert gain is not None
    with pytest.raises(AdapterCorrupt, match="magnitudes"):
        served(gain, torch.float32, "magnitudes")


def test_factors_are_plain_without_biases_and_magnitudes() -> None:
    vector = torch.ones(2, dtype=torch.bfloat16)

    assert Factors(A, B, 1.0).is_plain
    assert not Factors(A, B, 1.0, lora_bias=vector).is_plain
    assert not Factors(A, B, 1.0, bias=vector).is_plain
    widened = Factors(A.bfloat16(), B.bfloat16(), 1.0, magnitude=vector).in_float32()
    assert not widened.is_plain
    assert widened.magnitude is not None
    assert {widened.a.dtype, widened.b.dtype, widened.magnitude.dtype} == {torch.float32}


@pytest.mark.parametrize("rank", [0, 1, 8, 19])
def test_a_copy_by_columns_holds_the_same_and_lies_the_other_way_round(rank: int) -> None:
    tensor, other = torch.randn(rank, 24).to(torch.float16), torch.randn(3, 5)

    turned, straight = serve_together(
        [Half(tensor, "a", by_columns=True), Half(other, "b", scale=2.0)], torch.float32
    )

    assert torch.equal(turned, tensor.float())
    assert turned.T.is_contiguous()
    assert torch.equal(straight, 2 * other)
    assert straight.is_contiguous()

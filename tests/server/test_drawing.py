"""Which tokens may be drawn, how often, and that nothing but integers decides."""

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loralane_server import sampling
from loralane_server.device.cpu_search import CpuSearch
from loralane_server.device.seam import Sampling
from loralane_server.drawing import ONE, Wanted, draw
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def tokens_of(
    logits: Sequence[float],
    draws: Sequence[int],
    *,
    scale: float = 1.0,
    top_k: int = 0,
    top_p: int = ONE,
    cuts: bool = True,
) -> list[int]:
    """Draw once with each of `draws`; `top_p` and they are multiples of 2^-24."""
    rows = len(draws)
    whole = partial(torch.full, (rows,), dtype=torch.int32)
    wanted = Wanted(
        torch.full((rows,), scale), whole(top_k), whole(top_p), torch.tensor(draws).int()
    )
    every = torch.tensor(logits).expand(rows, -1)
    return draw(every, every.argmax(dim=-1), wanted, CpuSearch(), cuts=cuts).tolist()


def by_hand(logits: Sequence[int], draw: int, top_k: int, top_p: int) -> int:
    """The definition, one token after another: a unit of a logit halves the weight."""
    likeliest = max(logits)
    weights = [(1 << 30) >> (likeliest - x) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: top_k or len(order)]
    limit = max(1, sum(weights[i] for i in order) * top_p >> 24)
    kept, weighed = set[int](), 0
    for i in order:
        if weighed < limit:
            kept.add(i)
        weighed += weights[i]
    target = sum(weights[i] for i in kept) * draw >> 24
    for i in sorted(kept):
        target -= weights[i]
        if target < 0:
            return i
    raise AssertionError("the draw lies beyond all weights")


_PART = st.one_of(st.sampled_from([0, 1, ONE // 2, ONE - 1]), st.integers(0, ONE - 1))


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 3), min_size=1, max_size=700),
    top_k=st.one_of(st.just(0), st.integers(1, 800)),
    top_p=st.one_of(st.just(ONE), _PART),
    draws=st.lists(_PART, min_size=1, max_size=4),
)
def test_the_token_is_the_one_of_the_definition(
    logits: list[int], top_k: int, top_p: int, draws: list[int]
) -> None:
    found = tokens_of([float(x) for x in logits], draws, top_k=top_k, top_p=top_p)

    assert found == [by_hand(logits, draw, top_k, top_p) for draw in draws]


@given(st.integers(1, 2000), st.integers(0, 30), _PART)
def test_of_equal_logits_the_lower_ids_are_kept(vocab: int, top_k: int, at: int) -> None:
    (found,) = tokens_of([2.5] * vocab, [at], top_k=top_k)

    assert found == min(top_k or vocab, vocab) * at // ONE


def test_equal_logits_share_what_top_p_has_left() -> None:
    draws = range(0, ONE, ONE // 64)

    found = tokens_of([0.0, 1.0, 0.0, 0.0, 0.0], draws, top_p=ONE // 2)

    # Weights 1, 2, 1, 1, 1: half of 6 are the 2 and the first 1.
    assert set(found) == {0, 1}


@pytest.mark.parametrize("vocab", [511, 512, 513, 5000])
def test_every_place_is_found_whatever_the_size_of_the_vocabulary(vocab: int) -> None:
    draws = [-(-token * ONE // vocab) for token in range(vocab)]

    assert tokens_of([0.0] * vocab, draws, cuts=False) == list(range(vocab))


def smooth(vocab: int) -> Tensor:
    """Logits whose ids are in no order of size, no two equal."""
    return torch.randn(vocab, generator=torch.Generator().manual_seed(11)) * 3


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0, 100.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (40, 0.93), (1, 0.5)])
def test_frequencies_are_those_of_transformers_warpers(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits, tries = smooth(60), 4096
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = torch.softmax(warpers(torch.zeros(1, 1).long(), logits[None].clone())[0], dim=-1)
    wanted = Sampling(temperature, top_k, top_p)
    scale, k, p, _ = sampling.asked(wanted, 0)

    found = tokens_of(logits.tolist(), range(0, ONE, ONE // tries), scale=scale, top_k=k, top_p=p)

    # Evenly spaced draws fall to each token as often as it is likely, give or take one.
    frequencies = torch.tensor(found).bincount(minlength=60) / tries
    assert torch.equal(frequencies[expected == 0], torch.zeros(60)[expected == 0])
    assert (frequencies - expected).abs().max() <= 1.001 / tries


def test_a_large_vocabulary_is_drawn_from_as_softmax_says() -> None:
    logits = smooth(20_000)
    expected = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    draws = range(0, ONE, ONE // 500)

    found = tokens_of(logits.tolist(), draws, scale=math.log2(math.e), cuts=False)

    for at, token in zip(draws, found, strict=True):
        below, above = ([0.0, *expected.tolist()][token + i] for i in (0, 1))
        assert below - 1e-7 <= at / ONE <= above + 1e-7


def test_a_halving_of_any_part_weighs_what_it_should() -> None:
    for part in range(0, 1000, 7):
        halvings = part / 1000 + 3
        weight = 2**-halvings / (1 + 2**-halvings)
        draws = [round(ONE * (1 - weight)) + off for off in (-3, 3)]

        assert tokens_of([0.0, -halvings], draws) == [0, 1]


@pytest.mark.parametrize("count", [1, 63, 64, 65, 700, 3000])
@pytest.mark.parametrize("weighed", [False, True])
def test_what_a_search_reaches_is_the_logit_that_so_many_do(count: int, weighed: bool) -> None:
    logits = torch.stack([smooth(3000), smooth(3000).round()])
    weights = torch.full(logits.shape, 3, dtype=torch.int32) if weighed else None
    wanted = torch.tensor([count, count]) * (3 if weighed else 1)

    found = CpuSearch().reached(logits, weights, wanted)

    assert torch.equal(found, logits.sort(descending=True).values[:, count - 1])


@pytest.mark.parametrize("cuts", [False, True])
def test_a_row_without_a_distribution_takes_its_likeliest_token(cuts: bool) -> None:
    rows = [[1.0, float("nan"), 3.0], [float("-inf")] * 3, [1.0, 2.0, float("inf")]]

    found = [tokens_of(row, [ONE // 3], cuts=cuts) for row in rows]

    assert found == [[1], [0], [2]]


def test_what_is_excluded_is_never_drawn() -> None:
    found = tokens_of([float("-inf"), 0.0, -1e30, float("-inf")], range(0, ONE, ONE // 100))

    assert set(found) == {1}

"""Merged numbers are PEFT's own, to the last bit; its functions run here beside ours."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from loralane_server.adapters.merging.merging import (
    MAX_MEMBERS,
    STRATEGIES,
    Recipe,
    merge,
    recipe_of,
)
from loralane_server.adapters.reading.factors import Factors
from loralane_server.errors import InvalidRequest
from peft.utils import merge_utils
from torch import Tensor

IN, OUT, RANK = 48, 40, 6
SEEDS = (2**63 + 11, 12)

#: By strategy, PEFT's function of (tensors, weights, density, sign method).
PEFT: dict[str, Callable[..., Tensor]] = {
    "linear": lambda tensors, weights, density, sign: merge_utils.task_arithmetic(tensors, weights),
    "ties": merge_utils.ties,
    "dare_linear": lambda tensors, weights, density, sign: merge_utils.dare_linear(
        tensors, weights, density
    ),
    "dare_ties": merge_utils.dare_ties,
}


def adapters(*ranks: int) -> list[Factors]:
    """One target of so many adapters, each with a scale of its own."""
    generator = torch.Generator().manual_seed(3)
    return [
        Factors(
            torch.randn(rank, IN, generator=generator),
            # Coarse, as bfloat16 adapters are: so that equal values compete for a place.
            torch.randn(rank, OUT, generator=generator).mul(8).round().div(8),
            scale=0.5 + index,
        )
        for index, rank in enumerate(ranks)
    ]


def alike(weights: Sequence[float]) -> list[Factors]:
    return adapters(*[RANK] * len(weights))


def by_peft(recipe: Recipe, members: Sequence[Factors]) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank], as PEFT's `add_weighted_adapter` makes them of one layer."""
    factors = [w * member.scale for w, member in zip(recipe.weights, members, strict=True)]
    roots = [math.sqrt(abs(factor)) for factor in factors]
    signed = [root if factor >= 0 else -root for root, factor in zip(roots, factors, strict=True)]
    halves = []
    for seed, tensors, weights in (
        (SEEDS[0], [member.a for member in members], signed),
        (SEEDS[1], [member.b.T.contiguous() for member in members], roots),
    ):
        torch.manual_seed(seed)
        combine = PEFT[recipe.strategy]
        halves.append(combine(tensors, torch.tensor(weights), recipe.density, recipe.majority_sign))
    return halves[0], halves[1]


@pytest.mark.parametrize("density", [0.05, 0.5, 0.999])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, -0.3, 0.25), (0.5,) * 8, (0.0, 2.0)])
@pytest.mark.parametrize(
    ("strategy", "sign"),
    [
        ("linear", "total"),
        ("ties", "total"),
        ("ties", "frequency"),
        ("dare_linear", "total"),
        ("dare_ties", "total"),
        ("dare_ties", "frequency"),
    ],
)
def test_every_strategy_gives_the_numbers_of_peft(strategy, sign, weights, density):
    recipe = recipe_of(strategy, weights, density, sign)
    members = alike(weights)

    merged = merge(recipe, recipe.weights, members, SEEDS)

    expected_a, expected_b = by_peft(recipe, members)
    assert torch.equal(merged.a, expected_a)
    assert torch.equal(merged.b, expected_b.T)
    assert merged.scale == 1


@pytest.mark.filterwarnings("ignore:The density 1")
@pytest.mark.parametrize("strategy", ["ties", "dare_linear", "dare_ties"])
def test_a_density_of_one_keeps_everything_as_in_peft(strategy):
    recipe = recipe_of(strategy, (0.5, 0.5), 1.0, "total")
    members = alike(recipe.weights)

    merged = merge(recipe, recipe.weights, members, SEEDS)

    expected_a, expected_b = by_peft(recipe, members)
    assert torch.equal(merged.a, expected_a)
    assert torch.equal(merged.b, expected_b.T)
    assert merged.scale == 1


def test_strategies_and_their_options_differ():
    members = adapters(RANK, RANK, RANK)
    asked = [
        ("linear", 0.5, "total"),
        ("ties", 0.5, "total"),
        ("ties", 0.5, "frequency"),
        ("ties", 0.6, "total"),
        ("dare_linear", 0.5, "total"),
        ("dare_ties", 0.5, "total"),
        ("cat", 0.5, "total"),
    ]
    recipes = [recipe_of(s, (0.7, -0.3, 0.25), density, sign) for s, density, sign in asked]

    merged = [merge(recipe, recipe.weights, members, SEEDS) for recipe in recipes]

    products = {tuple((each.b.T @ each.a).flatten().tolist()) for each in merged}
    assert len(products) == len(asked)


def test_cat_is_the_weighted_sum_of_deltas_of_any_ranks():
    recipe = recipe_of("cat", (0.5, -2.0, 1.0), 0.0, "")
    members = adapters(4, 16, 1)

    merged = merge(recipe, recipe.weights, members, SEEDS)

    assert merged.a.shape == (21, IN)
    deltas = [own.scale * (own.b.double().T @ own.a.double()) for own in members]
    expected = sum(w * delta for w, delta in zip(recipe.weights, deltas, strict=True))
    torch.testing.assert_close((merged.b.T @ merged.a).double(), expected, rtol=1e-5, atol=1e-5)


def test_what_is_drawn_depends_on_the_seeds_alone():
    recipe = recipe_of("dare_linear", (1.0, 1.0), 0.5, "total")
    members = alike(recipe.weights)

    torch.manual_seed(1)
    first = merge(recipe, recipe.weights, members, SEEDS)
    torch.manual_seed(2)
    again = merge(recipe, recipe.weights, members, SEEDS)
    other = merge(recipe, recipe.weights, members, (1, 2))

    assert torch.equal(first.a, again.a)
    assert torch.equal(first.b, again.b)
    assert not torch.equal(first.a, other.a)
    assert not torch.equal(first.b, other.b)


def test_members_are_left_as_they_were():
    members = adapters(RANK, RANK)
    before = [(own.a.clone(), own.b.clone()) for own in members]

    for strategy in STRATEGIES:
        recipe = recipe_of(strategy, (1.0, -1.0), 0.5, "total")
        merge(recipe, recipe.weights, members, SEEDS)

    for own, (a, b) in zip(members, before, strict=True):
        assert torch.equal(own.a, a)
        assert torch.equal(own.b, b)


def test_recipes_that_mean_the_same_are_equal():
    assert recipe_of("linear", (1, 2), 0.3, "frequency") == recipe_of("linear", (1.0, 2.0), 0, "")
    assert recipe_of("ties", (3.0,), 0.5, "total") == recipe_of("linear", (3.0,), 0, "")
    assert recipe_of("dare_linear", (1, 2), 0.5, "frequency") == recipe_of(
        "dare_linear", (1, 2), 0.5, "total"
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"strategy": "slerp"}, "'slerp' must be one of linear, ties, dare_linear, dare_ties, cat"),
        ({"strategy": "magnitude_prune"}, "magnitude_prune"),
        ({"weights": ()}, "1 to 8 adapters, not 0"),
        ({"weights": (1.0,) * (MAX_MEMBERS + 1)}, "not 9"),
        ({"weights": (1.0, math.nan)}, "finite"),
        ({"weights": (math.inf, 1.0)}, "finite"),
        ({"weights": (0.0, -0.0)}, "changes nothing"),
        ({"density": 0.0}, "ties needs a density above 0"),
        ({"density": 1.5}, "at most 1, not 1.5"),
        ({"density": math.nan}, "density"),
        ({"majority_sign": "loudest"}, "'loudest' must be one of total, frequency"),
    ],
)
def test_a_request_that_gives_no_adapter_is_refused_by_name(change, named):
    asked: dict[str, Any] = {
        "strategy": "ties",
        "weights": (1.0, 1.0),
        "density": 0.5,
        "majority_sign": "total",
    }

    with pytest.raises(InvalidRequest, match=named):
        recipe_of(**asked | change)

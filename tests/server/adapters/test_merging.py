"""Merged numbers are PEFT's own, to the last bit; its functions run here beside ours."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from loralane_server.adapters.merging import MAX_MEMBERS, Part, Recipe, merge, recipe_of
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


def parts(*weights: float, ranks: Sequence[int] = (RANK,) * 8) -> list[Part]:
    generator = torch.Generator().manual_seed(3)
    return [
        Part(
            torch.randn(rank, IN, generator=generator),
            # Coarse, as bfloat16 adapters are: so that equal values compete for a place.
            torch.randn(rank, OUT, generator=generator).mul(8).round().div(8),
            scale=0.5 + index,
            weight=weight,
        )
        for index, (weight, rank) in enumerate(zip(weights, ranks, strict=False))
    ]


def by_peft(recipe: Recipe, of: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank], as PEFT's `add_weighted_adapter` makes them of one layer."""
    factors = [part.weight * part.scale for part in of]
    roots = [math.sqrt(abs(factor)) for factor in factors]
    signs = [1 if factor >= 0 else -1 for factor in factors]
    halves = []
    for seed, tensors, weights in (
        (SEEDS[0], [p.a for p in of], [r * s for r, s in zip(roots, signs, strict=True)]),
        (SEEDS[1], [p.b.T.contiguous() for p in of], roots),
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
    members = parts(*weights)

    a, b = merge(recipe, members, SEEDS)

    expected_a, expected_b = by_peft(recipe, members)
    assert torch.equal(a, expected_a)
    assert torch.equal(b, expected_b.T)


@pytest.mark.filterwarnings("ignore:The density 1")
@pytest.mark.parametrize("strategy", ["ties", "dare_linear", "dare_ties"])
def test_a_density_of_one_keeps_everything_as_in_peft(strategy):
    recipe = recipe_of(strategy, (0.5, 0.5), 1.0, "total")
    members = parts(0.5, 0.5)

    a, b = merge(recipe, members, SEEDS)

    expected_a, expected_b = by_peft(recipe, members)
    assert torch.equal(a, expected_a)
    assert torch.equal(b, expected_b.T)


def test_strategies_and_their_options_differ():
    members = parts(0.7, -0.3, 0.25)
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

    products = [torch.matmul(b.T, a) for a, b in (merge(r, members, SEEDS) for r in recipes)]

    assert len({tuple(product.flatten().tolist()) for product in products}) == len(asked)


def test_cat_is_the_weighted_sum_of_deltas_of_any_ranks():
    recipe = recipe_of("cat", (0.5, -2.0, 1.0), 0.0, "")
    members = parts(0.5, -2.0, 1.0, ranks=(4, 16, 1))

    a, b = merge(recipe, members, SEEDS)

    assert a.shape == (21, IN)
    expected = sum(p.weight * p.scale * (p.b.double().T @ p.a.double()) for p in members)
    torch.testing.assert_close((b.T @ a).double(), expected, rtol=1e-5, atol=1e-5)


def test_what_is_drawn_depends_on_the_seeds_alone():
    recipe = recipe_of("dare_linear", (1.0, 1.0), 0.5, "total")
    members = parts(1.0, 1.0)

    torch.manual_seed(1)
    first = merge(recipe, members, SEEDS)
    torch.manual_seed(2)
    again = merge(recipe, members, SEEDS)
    other = merge(recipe, members, (1, 2))

    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])


def test_members_are_left_as_they_were():
    members = parts(1.0, -1.0)
    before = [(part.a.clone(), part.b.clone()) for part in members]

    for strategy in ("linear", "ties", "dare_linear", "dare_ties", "cat"):
        merge(recipe_of(strategy, (1.0, -1.0), 0.5, "total"), members, SEEDS)

    for part, (a, b) in zip(members, before, strict=True):
        assert torch.equal(part.a, a)
        assert torch.equal(part.b, b)


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

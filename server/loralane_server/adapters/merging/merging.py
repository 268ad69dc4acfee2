"""Several adapters as one: the numbers of PEFT's `add_weighted_adapter`, target by target.

    linear       A = sum of sqrt(w s) A_i, B = sum of sqrt(w s) B_i; so B @ A has cross terms
    ties         the largest values of each A_i and B_i, where most members agree on the sign
    dare_linear  random values of each, scaled up, then as linear
    dare_ties    random values of each, scaled up, then as ties
    cat          A_i one above the other, w s B_i side by side: the plain weighted sum, of any ranks

w is a member's weight, s its own scale. A member that lacks a target takes no part in it. The
operations and their order are PEFT's, in float32, so the numbers are PEFT's to the last bit; but
for `cat`, which folds w s into A there and into B here. PEFT lends the merge the first member's
`use_rslora` and `layers_to_transform`, so there a merge is scaled or loses layers by the order of
its members; here each counts as it is, in any order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

import torch
from torch import Tensor

from loralane_server.adapters.reading.factors import Factors
from loralane_server.errors import InvalidRequest

Strategy = Literal["linear", "ties", "dare_linear", "dare_ties", "cat"]
MajoritySign = Literal["total", "frequency"]

STRATEGIES: Final[tuple[str, ...]] = get_args(Strategy)
MAJORITY_SIGNS: Final[tuple[str, ...]] = get_args(MajoritySign)
#: Members of one merge: each is resolved on every request.
MAX_MEMBERS: Final = 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """How members become one adapter. What the strategy does not use has its default.

    So recipes that mean the same are equal.
    """

    strategy: Strategy
    #: One for each member; not all 0.
    weights: tuple[float, ...]
    #: Share of values that are kept.
    density: float = 1.0
    majority_sign: MajoritySign = "total"

    @property
    def prunes(self) -> bool:
        """Whether only a part of each member's values is kept."""
        return self.strategy not in ("linear", "cat")

    @property
    def draws(self) -> bool:
        """Whether chance decides which."""
        return self.strategy.startswith("dare")

    @property
    def elects(self) -> bool:
        """Whether values that disagree with the majority's sign are left out."""
        return self.strategy.endswith("ties")


def recipe_of(
    strategy: str, weights: Sequence[float], density: float, majority_sign: str
) -> Recipe:
    """Return the recipe that a request asks for.

    Of one member all strategies are linear, as in PEFT.

    Raises:
        InvalidRequest: unknown names, or numbers that give no adapter.
    """
    if strategy not in STRATEGIES:
        raise InvalidRequest(f"merge strategy {strategy!a} must be one of {', '.join(STRATEGIES)}")
    if not 1 <= len(weights) <= MAX_MEMBERS:
        raise InvalidRequest(f"a merge has 1 to {MAX_MEMBERS} adapters, not {len(weights)}")
    if not all(map(math.isfinite, weights)):
        raise InvalidRequest("a merge's weights must be finite numbers")
    if not any(weights):
        raise InvalidRequest("all weights of the merge are 0: it changes nothing; name the base")
    single = len(weights) == 1
    recipe = Recipe(cast(Strategy, "linear" if single else strategy), tuple(map(float, weights)))
    if recipe.prunes and not 0 < density <= 1:
        raise InvalidRequest(f"{strategy} needs a density above 0 and at most 1, not {density:g}")
    if recipe.elects and majority_sign not in MAJORITY_SIGNS:
        known = ", ".join(MAJORITY_SIGNS)
        raise InvalidRequest(f"majority sign method {majority_sign!a} must be one of {known}")
    return Recipe(
        recipe.strategy,
        recipe.weights,
        float(density) if recipe.prunes else 1.0,
        cast(MajoritySign, majority_sign) if recipe.elects else "total",
    )


def merge(
    recipe: Recipe,
    weights: Sequence[float],
    members: Sequence[Factors],
    seeds: tuple[int, int],
) -> Factors:
    """Merge one target of plain adapters: float32 in, float32 out, with all in A and B (scale 1).

    `members` are those that have the target, in the recipe's order, and `weights` theirs; all of
    one rank unless the strategy is `cat`. `seeds` are for what is drawn of the A's and of the B's.
    """
    factors = [weight * own.scale for weight, own in zip(weights, members, strict=True)]
    if recipe.strategy == "cat":
        halves = [own.b * factor for own, factor in zip(members, factors, strict=True)]
        return Factors(torch.cat([own.a for own in members]), torch.cat(halves), 1.0)
    roots = [math.sqrt(abs(factor)) for factor in factors]
    signed = [math.copysign(root, factor) for root, factor in zip(roots, factors, strict=True)]
    a = _combined(recipe, [own.a for own in members], signed, seeds[0])
    # PEFT's B is [out, rank], in memory too: draws and ties between equal values follow that order.
    b = _combined(recipe, [own.b.T.contiguous() for own in members], roots, seeds[1])
    return Factors(a, b.T, 1.0)


def _combined(
    recipe: Recipe, halves: Sequence[Tensor], weights: Sequence[float], seed: int
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.stack([_pruned(recipe, half, generator) for half in halves])  # [parts, ...]
    weighted = kept * torch.tensor(weights, dtype=torch.float32)[:, None, None]
    if not recipe.elects:
        return weighted.sum(dim=0)
    agrees = kept.sign() == _majority(kept, recipe.majority_sign)  # [parts, ...]
    return (weighted * agrees).sum(dim=0) / agrees.sum(dim=0).clamp(min=1.0)


def _pruned(recipe: Recipe, values: Tensor, generator: torch.Generator) -> Tensor:
    if recipe.density >= 1:
        return values
    if recipe.draws:
        drawn = torch.bernoulli(torch.full_like(values, recipe.density), generator=generator)
        return values * drawn / recipe.density
    largest = values.abs().reshape(-1).topk(int(recipe.density * values.numel())).indices
    mask = torch.zeros(values.numel()).index_fill_(0, largest, 1)
    return values * mask.view_as(values)


def _majority(kept: Tensor, method: MajoritySign) -> Tensor:
    """Return 1 or -1 for each value: the sign of the sum, or of most; of a draw it is 1."""
    votes = kept if method == "total" else kept.sign()
    return torch.where(votes.sum(dim=0) >= 0, 1, -1)

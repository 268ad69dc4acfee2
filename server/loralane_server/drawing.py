"""Draws a token from logits in integer arithmetic: every device draws the very same one.

How likely each token is, as an integer: its weight, 2^30 for the likeliest. What is decided by sums
of weights is decided by integers, so neither the order in which a device adds nor how it rounds an
exponential can change a token. Of the logits only a difference and a product are taken in float32,
which are the same everywhere.

    kept      the `top_k` largest logits; of these the fewest, from the largest, whose weights make
              up `top_p` of theirs together; of equal logits the lower ids first; always one
    drawn     the first id at which the weights of what is kept, added up by id, exceed the draw's
              part of them

What integers cost: a token less than 2^-30 as likely as the likeliest is never drawn; weights are
off by at most 1e-7 of themselves and 2^-30 of the likeliest; `top_p` and the draw are multiples
of 2^-24. That is less than float32 loses when it adds up a vocabulary.

Shapes: R rows, V tokens. Devices differ in how they find the logit or the id up to which weights
add up to so much (`Search`); none needs a complete order for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

#: Bits after the point of what is a part of something: `top_p`, the draw, an exponent.
_BITS: Final = 24
#: All of something.
ONE: Final = 1 << _BITS
#: Powers of two below the likeliest at which a weight is 0.
_DEPTH: Final = 31
#: 2^-t on [0, 1) is c0 - t (c1 - t (c2 - ...)), to 1e-7 of itself; each c times 2^30.
_POWER: Final = (1 << 30, 744257403, 257891465, 59375086, 9884651, 1014583)
#: Half of them, so many steps, and the slope of 2^-t at 0 times 2^15.
_HALF: Final = 12
STEPS: Final = 1 << _HALF
_LN2: Final = 22713
#: The least float32 that no device takes for 0.
LEAST: Final = 2.0**-126


class Search(Protocol):
    """What devices do in different ways, with the same results.

    Amounts [R, V] int32 are not negative. What is `wanted`, [R] int64 from 1 on, is never more than
    a row's amounts together.
    """

    def reached(self, logits: Tensor, amounts: Tensor | None, wanted: Tensor) -> Tensor:
        """Return the largest values [R] such that the logits not below have what is wanted.

        Logits [R, V]; amounts None: each has 1.
        """

    def first(self, amounts: Tensor, wanted: Tensor) -> Tensor:
        """Return the first places [R] such that those up to them have what is wanted."""

    def mapped(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return function(x), computed number by number, for int32 x from 0 to `STEPS` - 1."""

    def settled(self, amounts: Tensor) -> Tensor:
        """Return the same, computed once and for all, not anew for each use of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What rows ask for, all [R]."""

    #: float32: how many halvings of its weight a token pays for each unit of its logit.
    scale: Tensor
    #: int32; 0 = all.
    top_k: Tensor
    #: int32, times 2^24.
    top_p: Tensor
    #: int32, the draw times 2^24, below 2^24.
    draw: Tensor


def draw(
    logits: Tensor, likeliest: Tensor, wanted: Wanted, search: Search, *, cuts: bool
) -> Tensor:
    """Draw one token a row: logits [R, V] float32 -> [R] int64.

    `cuts`: whether anybody asks for top_k or top_p. Where an adapter overflows there is no
    distribution: such a row takes its token of `likeliest` [R].
    """
    top = logits.amax(dim=-1, keepdim=True)
    broken = logits.isnan().any(dim=-1) | top[:, 0].isinf()
    # Values so small are 0 to some devices, and have to be so to all.
    logits = logits.masked_fill(broken[:, None] | (logits.abs() < LEAST), 0.0)
    top = logits.amax(dim=-1, keepdim=True)
    weights = search.settled(_weights(logits, top, wanted.scale[:, None], search))
    if cuts:
        kept = _kept(logits, top, weights, wanted, search)
        weights = search.settled(weights.masked_fill(~kept, 0))
    found = search.first(weights, _part(_sum(weights), wanted.draw) + 1)
    return torch.where(broken, likeliest, found)


def _weights(logits: Tensor, top: Tensor, scale: Tensor, search: Search) -> Tensor:
    """Return 2^30 * 2^-((top - logits) * scale), int32.

    The upper half of what is after the point by a function of 4,096 numbers, the lower half, so
    small that it is nearly straight, by a product.
    """
    halvings = ((top - logits) * (scale * float(ONE))).clamp_(max=float(_DEPTH * ONE)).int()
    power = search.mapped(_power, _shifted(halvings & (ONE - 1), _HALF))
    slope = _shifted(_shifted(power, 15).mul_(_LN2), 15)
    power = power - _shifted(slope.mul_(halvings & (STEPS - 1)), 9)
    return torch.bitwise_right_shift(power, _shifted(halvings, _BITS))


def _power(t: Tensor) -> Tensor:
    """Return 2^30 * 2^-(t / 4096) for t below 4,096, int32.

    Products are made of two, since a TPU has no integers of 64 bits.
    """
    power = torch.full_like(t, _POWER[-1])
    for coefficient in reversed(_POWER[:-1]):
        upper, lower = _shifted(power, 15), power & 0x7FFF
        power = coefficient - (upper * t * 8 + _shifted(lower * t, _HALF))
    return power


def _kept(logits: Tensor, top: Tensor, weights: Tensor, wanted: Wanted, search: Search) -> Tensor:
    """Return which tokens are kept, [R, V].

    Tokens stand in one order, so what top_p keeps of all is what it keeps of the top_k, once it is
    known how much of the latter's weight is wanted.
    """
    count = wanted.top_k.clamp(1, logits.shape[-1]).long()
    least = search.reached(logits, None, count)
    above = logits > least[:, None]
    each = _weights(least, top[:, 0], wanted.scale, search).long()
    of_top_k = _sum(weights, above) + each * (count - above.sum(dim=-1))
    total = torch.where(wanted.top_k > 0, of_top_k, _sum(weights))
    limit = _part(total, wanted.top_p).clamp(min=1)
    least = search.reached(logits, weights, limit)
    above, equal = logits > least[:, None], logits == least[:, None]
    last = search.first(weights.masked_fill(~equal, 0), limit - _sum(weights, above))
    place = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return above | (equal & (place <= last[:, None].int()))


def _sum(weights: Tensor, where: Tensor | None = None) -> Tensor:
    counted = weights if where is None else weights.masked_fill(~where, 0)
    return counted.sum(dim=-1, dtype=torch.int64)


def _part(whole: Tensor, part: Tensor) -> Tensor:
    """Return whole * part / 2^24, rounded down: whole below 2^57, part at most 2^24."""
    part = part.long()
    return _shifted(whole, _BITS) * part + _shifted((whole & (ONE - 1)) * part, _BITS)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return x / 2^bits rounded down; x is not negative."""
    by = torch.full((), bits, dtype=x.dtype, device=x.device)
    return torch.bitwise_right_shift(x, by)

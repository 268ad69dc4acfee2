"""The step planner: how many tokens of each row the next step computes. Pure functions.

Every row with a single token to compute (a decoding row) is in every step; what is left of the
budget, and one token at least, goes to prompts, oldest first, in chunks. So a long prompt never
holds up a stream for longer than one chunk takes, nor do streams hold up the oldest prompt for
ever. Which rows are asked, and whether there are KV pages for them, see preemption.py.

A token attends to all before it, so the deeper in its prompt, the dearer. Beside streams a chunk is
cut to what the budget's tokens cost at the beginning of a prompt: every step takes about as long,
where chunks of so many tokens would hold streams up for longer and longer. With nobody to hold up
the budget is tokens, wherever they are: fewer steps read the weights fewer times.

Between two steps, waves (see waves.py) run some of their layers. Their work is counted in tokens
times layers, and is at most about half of the step beside which it is done.
"""

from collections.abc import Sequence
from math import isqrt
from typing import Final

#: Reading a layer's weights takes about as long as computing so many tokens; fewer cost as much.
PASS_TOKENS: Final = 32
#: A multiplication of attention takes about as long as so many of the linears: 2.2 were measured in
#: bfloat16, about 1 in float32.
ATTENTION_COST: Final = 2


def plan_step(
    pending: Sequence[int],
    budget: int,
    depths: Sequence[int] | None = None,
    doubling: int | None = None,
) -> list[int]:
    """Return the tokens that each row computes now, 0 for none.

    pending: for each row in order of arrival, how many tokens it still has to compute (>= 1).
    budget: tokens that a step may compute; single tokens, and one of a prompt, always fit.
    depths: for each row, the tokens before its next one; None = none.
    doubling: at which depth a token costs twice what it does at 0; None = the same everywhere.
    """
    streams = sum(1 for tokens in pending if tokens == 1)
    if not streams:
        doubling = None
    left = max(1, budget - streams)
    work = _cost(0, left, doubling)
    least = 1  # the oldest prompt goes on, however deep it is
    plan = []
    for tokens, depth in zip(pending, depths or [0] * len(pending), strict=True):
        if tokens == 1:
            plan.append(1)
        else:
            # Several chunks at small depths cost less than one of as many tokens.
            chunk = min(tokens, left, max(least, _fitting(depth, work, doubling)))
            left -= chunk
            work = max(0, work - _cost(depth, chunk, doubling))
            least = 0
            plan.append(chunk)
    return plan


def _cost(depth: int, tokens: int, doubling: int | None) -> int:
    """Return what tokens from a depth on cost, in a unit that depends on `doubling` alone.

    One at depth x costs in proportion to doubling + x: all of them, in whole numbers, this.
    """
    if doubling is None:
        return tokens
    return (doubling + depth + tokens) ** 2 - (doubling + depth) ** 2


def _fitting(depth: int, work: int, doubling: int | None) -> int:
    """Return how many tokens from a depth on cost no more than so much."""
    if doubling is None:
        return work
    return isqrt((doubling + depth) ** 2 + work) - doubling - depth


def wave_tokens(layers: int, budget: int) -> int:
    """Return how many tokens a wave may have, so that one layer of it fits beside any step."""
    return max(1, min(budget, layers * PASS_TOKENS // 2))


def plan_waves(
    waves: Sequence[tuple[int, int]], layers: int, streams: int | None, budget: int
) -> list[int]:
    """Return how many layers of each wave are run now, between two steps.

    waves: of each, oldest first, its tokens and the layers that it could run now.
    streams: decoding rows in the step beside; None = there is no step to hold up.
    budget: tokens that a step may compute.
    """
    left = layers * (budget if streams is None else max(streams, PASS_TOKENS) // 2)
    plan = []
    for tokens, ready in waves:
        cost = max(tokens, PASS_TOKENS)
        run = min(ready, left // cost)
        left -= run * cost
        plan.append(run)
    oldest = next((i for i, (_, ready) in enumerate(waves) if ready), None)
    if oldest is not None and not any(plan):
        plan[oldest] = 1
    return plan

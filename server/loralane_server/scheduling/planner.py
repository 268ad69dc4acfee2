"""The step planner: how many tokens of each row the next step computes. Pure functions.

Every row with a single token to compute (a decoding row) is in every step; what is left of the
budget, and one token at least, goes to prompts, oldest first, in chunks. So a long prompt never
holds up a stream for longer than one chunk takes, nor do streams hold up the oldest prompt for
ever. Which rows are asked, and whether there are KV pages for them, see preemption.py.

Between two steps, waves (see waves.py) run some of their layers. Their work is counted in tokens
times layers, and is at most about half of the step beside which it is done.
"""

from collections.abc import Sequence
from typing import Final

#: Reading a layer's weights takes about as long as computing so many tokens; fewer cost as much.
PASS_TOKENS: Final = 32


def plan_step(pending: Sequence[int], budget: int) -> list[int]:
    """Return the tokens that each row computes now, 0 for none.

    pending: for each row in order of arrival, how many tokens it still has to compute (>= 1).
    budget: tokens that a step may compute; single tokens, and one of a prompt, always fit.
    """
    left = max(1, budget - sum(1 for tokens in pending if tokens == 1))
    plan = []
    for tokens in pending:
        if tokens == 1:
            plan.append(1)
        else:
            chunk = min(tokens, left)
            left -= chunk
            plan.append(chunk)
    return plan


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

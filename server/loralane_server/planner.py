"""The step planner: how many tokens of each row the next step computes. A pure function.

Every row with a single token to compute (a decoding row) is in every step; what is left of the
budget goes to prompts, oldest first, in chunks. So a long prompt never holds up a stream for
longer than one chunk takes.
"""

from collections.abc import Sequence


def plan_step(pending: Sequence[int], budget: int) -> list[int]:
    """Return the tokens that each row computes now, 0 for none.

    pending: for each row in order of arrival, how many tokens it still has to compute (>= 1).
    budget: tokens that a step may compute; single tokens always fit.
    """
    left = budget - sum(1 for tokens in pending if tokens == 1)
    plan = []
    for tokens in pending:
        if tokens == 1:
            plan.append(1)
        else:
            chunk = max(0, min(tokens, left))
            left -= chunk
            plan.append(chunk)
    if pending and not any(plan):
        plan[0] = 1
    return plan

"""Who computes, who waits for KV pages, and who gives its pages back. Pure functions.

A row takes pages for what it computes next, so rows that were all let in may together come to need
more pages than there are. Then the youngest rows stop: they give their pages back and later compute
anew what they had. Three rules:

    1. The oldest row that can run always computes. For its pages any other row may be stopped:
       the younger ones, youngest first, then those that wait for their adapter.
    2. A row that has begun computes while there are pages. For its pages only younger rows are
       stopped; where there is none, it keeps what it owns and waits.
    3. A row begins, or begins anew, only where there is room for all its tokens so far, for those
       of all that have begun, and for one page more of each of these rows that may still grow; and
       never before an older row that waits for room. It stops nobody.

No row waits for ever. By rule 1 the oldest row that can run computes a token in each step at least:
once everybody else is stopped all pages are its own or free, and no row is let in that could need
more than all (see `Limits`). So it ends, after as many steps as it has tokens at most. Later rows
are younger, so the rows before any row become fewer until it is the oldest itself; only a row whose
adapter arrives joins those before it, each once.

Nor is a row stopped time and again for nothing: whoever begins by rule 3 finds room for PAGE_TOKENS
more tokens of every row beside it, and is stopped before only for an older row whose adapter came.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loralane_server.kv.pages import PAGE_TOKENS, pages_for
from loralane_server.scheduling.planner import plan_step


class Claim(NamedTuple):
    """What one row asks of the next step, and the pages that it has for it."""

    #: Tokens still to be computed before the next one can be sampled, >= 1.
    pending: int
    #: How many of these fit into the pages that it owns.
    covered: int
    #: Whether it may come to need more pages than its tokens so far do.
    grows: bool
    #: Whether it has begun, and was not stopped since.
    begun: bool
    #: Whether an ordinary step may compute it.
    runnable: bool
    #: Whether it owns pages.
    owns: bool
    #: Tokens that are computed, or found in the prefix cache.
    computed: int = 0

    def pages(self, tokens: int) -> int:
        """Return how many more pages so many tokens take."""
        return pages_for(max(0, tokens - self.covered))

    @property
    def lacks(self) -> int:
        """Pages that it still has to take for the tokens that it has."""
        return self.pages(self.pending)

    @property
    def room(self) -> int:
        """Pages that are promised to it from when it begins."""
        return self.lacks + self.grows


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do before the next step, or in it. Rows by their place in order of arrival."""

    #: The tokens that each row computes, 0 for none.
    counts: tuple[int, ...]
    #: Who gives its pages back first; then all is planned anew. None = nobody has to.
    stop: int | None = None
    #: Whether a row that could run waits for room to begin: nobody younger may begin.
    held: bool = False


def plan_rows(
    claims: Sequence[Claim], budget: int, free: int, doubling: int | None = None
) -> StepPlan:
    """Return what the rows compute in the next step, or who stops before it.

    claims: of all rows, in order of arrival.
    budget: tokens that a step may compute; see `plan_step`.
    free: pages that no row owns.
    doubling: see `plan_step`.
    """
    ready = [i for i, claim in enumerate(claims) if claim.runnable]
    going = beginners(claims, ready, free, first=True)
    counts = [0] * len(claims)
    pending, depths = [claims[i].pending for i in going], [claims[i].computed for i in going]
    wanted = plan_step(pending, budget, depths, doubling)
    for i, count in zip(going, wanted, strict=True):
        claim = claims[i]
        if claim.pages(count) > free:
            victim = choose_victim(claims, i, oldest=i == going[0])
            if victim is not None:
                return StepPlan(tuple(0 for _ in claims), stop=victim)
            count = min(count, claim.covered + free * PAGE_TOKENS)
        free -= claim.pages(count)
        counts[i] = count
    return StepPlan(tuple(counts), held=len(going) < len(ready))


def beginners(
    claims: Sequence[Claim], asking: Sequence[int], free: int, *, first: bool = False
) -> list[int]:
    """Return which of the rows that ask have begun or may begin now, in order of arrival.

    first: let the first of them begin whether there is room or not.
    """
    left = free - sum(claim.room for claim in claims if claim.begun)
    going: list[int] = []
    held = False
    for i in asking:
        claim = claims[i]
        if not claim.begun:
            held = held or (claim.room > left and not (first and not going))
            if held:
                continue
            left -= claim.room
        going.append(i)
    return going


def choose_victim(claims: Sequence[Claim], needy: int, *, oldest: bool) -> int | None:
    """Return who gives its pages back so that the row `needy` can go on; None = nobody."""
    younger = [i for i in range(needy + 1, len(claims)) if claims[i].owns]
    idle = [i for i in range(needy) if oldest and claims[i].owns and not claims[i].runnable]
    return max(younger or idle, default=None)

"""How fast a shard computes lately, from how long its steps took: pure.

A step takes a while whatever it computes, for the weights are read once, and longer for each token
of a prompt in it. Both are averages in which a step counts half as much as one `_HALF` steps later.
"""

from dataclasses import dataclass
from typing import Final

#: Steps after which what was measured counts half.
_HALF: Final = 16
_KEPT: Final = 0.5 ** (1 / _HALF)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean in which old values fade: sums of values and of their weights."""

    total: float = 0.0
    weight: float = 0.0

    def plus(self, total: float, weight: float) -> "Mean":
        """Return the mean with one more measurement: a sum over so much weight."""
        return Mean(self.total * _KEPT + total, self.weight * _KEPT + weight)

    @property
    def value(self) -> float:
        """The mean; 0 = nothing was measured yet."""
        return self.total / self.weight if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What steps cost, in seconds."""

    #: Of steps without prompts.
    step: Mean = Mean()
    #: Of prompt tokens, beyond what the step would have taken without them.
    token: Mean = Mean()

    def after(self, prompt_tokens: int, seconds: float) -> "Rates":
        """Return the rates after one more step, of decoding rows and so many prompt tokens.

        Weighted by tokens, so that a chunk of a few, which costs little more than nothing and by
        chance less, does not outweigh long ones.
        """
        if prompt_tokens == 0:
            return Rates(self.step.plus(seconds, 1), self.token)
        extra = max(0.0, seconds - self.step.value)
        return Rates(self.step, self.token.plus(extra, prompt_tokens))

    @property
    def step_ms(self) -> float:
        """How long a step of decoding rows takes; 0 = not yet known."""
        return self.step.value * 1e3

    @property
    def token_ms(self) -> float:
        """How much each token of a prompt adds to a step; 0 = not yet known."""
        return self.token.value * 1e3

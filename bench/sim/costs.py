"""What things cost in the simulated cluster. All of it is assumed; only ratios between policies
mean something.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Costs:
    """One shard: an 8B model on one chip, about. Seconds."""

    #: A step costs this, and what follows for what is in it.
    step_s: float = 0.015
    #: For each row that decodes.
    row_s: float = 60e-6
    #: For each token of a prompt.
    token_s: float = 100e-6
    #: For each lane of the largest adapter in it.
    rank_s: float = 20e-6
    #: Tokens of prompts and decoding rows in a step, at most.
    step_tokens: int = 512
    rows: int = 48
    #: Adapters on the device at once; those beyond wait, whatever their rank.
    slots: int = 16
    #: Adapters in host memory at once.
    host_adapters: int = 128
    #: From host memory to the device, one at a time.
    copy_s: float = 0.03
    #: From the store to host memory, any number at once.
    fetch_s: float = 0.5

    def step(self, decoding: int, tokens: int, rank: int) -> float:
        """Return how long a step takes, with so many tokens of prompts in it."""
        return self.step_s + self.row_s * decoding + self.token_s * tokens + self.rank_s * rank


#: As in the published comparison.
COSTS: Final = Costs()

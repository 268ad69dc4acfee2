"""The tokens that a step chose, on the device: there the next step takes them; the host fetches.

Of whatever shape the graph is that chose them, they are [rows of the shard]: so any graph can
follow any other. Row i is the step's span i; what is chosen for rows that are not sampled, or are
none, nobody looks at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from loralane_server.device.seam import Int32, StepOutput
from loralane_server.device.xla.transfer import fetch
from loralane_server.errors import DeviceFailed


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Implements `SubmittedStep`."""

    #: [rows of the shard] int64
    tokens: Tensor
    #: [samples] which of them is whose.
    rows: Int32
    #: What the graph `logprobs` gives; empty = nobody asked.
    found: Sequence[Tensor] = ()
    #: How many alternatives to report.
    top: int = 0

    def fetch(self) -> StepOutput:
        """See `SubmittedStep.fetch`."""
        try:
            tokens, *found = (part[self.rows] for part in fetch([self.tokens, *self.found]))
        except RuntimeError as exc:
            raise DeviceFailed(f"the device failed in a step: {exc}") from exc
        if not found:
            return StepOutput(tokens)
        logprobs, values, ids = found
        if not self.top:
            return StepOutput(tokens, logprobs)
        return StepOutput(tokens, logprobs, ids[:, : self.top], values[:, : self.top])


def padded(tokens: Tensor, rows: int) -> Tensor:
    """Return tokens [n] as [rows]; in a graph."""
    return F.pad(tokens, (0, rows - tokens.shape[0]))


def filled_in(tokens: Tensor, before: Tensor) -> Tensor:
    """Return a step's tokens [T] with what the step before chose [rows] where they say so.

    In a graph. See `StepInput.tokens`: ~t, which is -1 - t, is `chosen_for`'s inverse.
    """
    return torch.where(tokens < 0, before.index_select(0, (~tokens).clamp(min=0)), tokens)

"""`Search` on a CPU, where sorting a few and adding up one after another are fast."""

from collections.abc import Callable
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from loralane_server.drawing import STEPS

#: How many of the largest logits are sorted first.
_CANDIDATES: Final = 64
#: Places that are searched one by one, once it is known that the wanted one is among them.
_BLOCK: Final = 512


class CpuSearch:
    """Implements `Search`."""

    def reached(self, logits: Tensor, amounts: Tensor | None, wanted: Tensor) -> Tensor:
        """See `Search.reached`: the largest are sorted, and more if it takes more."""
        vocab = logits.shape[-1]
        count = min(_CANDIDATES, vocab)
        while True:
            values, ids = logits.topk(count)
            each = torch.ones_like(ids) if amounts is None else amounts.gather(1, ids)
            sums = each.cumsum(dim=-1, dtype=torch.int64)
            if count == vocab or bool((sums[:, -1] >= wanted).all()):
                return values.gather(1, (sums < wanted[:, None]).sum(-1, keepdim=True))[:, 0]
            count = min(8 * count, vocab)

    def first(self, amounts: Tensor, wanted: Tensor) -> Tensor:
        """See `Search.first`: by blocks, and then inside of one."""
        target = wanted[:, None]
        blocks = F.pad(amounts, (0, -amounts.shape[-1] % _BLOCK)).view(len(amounts), -1, _BLOCK)
        sums = blocks.sum(dim=-1, dtype=torch.int64).cumsum(dim=-1)
        at = (sums < target).sum(dim=-1, keepdim=True)
        before = sums.masked_fill(sums >= target, 0).amax(dim=-1, keepdim=True)
        block = blocks.gather(1, at[:, :, None].expand(-1, 1, _BLOCK))[:, 0]
        inside = (block.cumsum(dim=-1, dtype=torch.int64) + before < target).sum(dim=-1)
        return at[:, 0] * _BLOCK + inside

    def mapped(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """See `Search.mapped`: looked up."""
        return _table(function).index_select(0, x.flatten()).view(x.shape)

    def settled(self, amounts: Tensor) -> Tensor:
        """See `Search.settled`: here everything is."""
        return amounts


@cache
def _table(function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(torch.arange(STEPS, dtype=torch.int32))

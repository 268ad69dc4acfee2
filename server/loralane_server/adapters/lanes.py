"""LoRA lanes: each adapter owns some rank-1 lanes of a pool; a row sees the lanes of its own only.

    x        [rows, in]           activations
    a        [lanes, in]          shrink: a lane is one row of A
    b        [lanes, out]         expand: the same lane's column of B, scale folded in
    owner    [lanes]              which adapter owns a lane, FREE where nobody does
    adapter  [rows]               which adapter a row has, BASE where it has none
    mine     [rows, lanes]        whether the lane belongs to the row's adapter

Two dense products and a mask do any mix of adapters and ranks: no gather, no data-dependent shape.
What is masked is replaced, not multiplied: huge weights of one adapter can make any row's product
with them Inf, and 0 x Inf is NaN. Lanes hold finite numbers only (the reader sees to it), so 0
times what they hold is 0.

Gain, shift and what is done to the two ends are defined in `device/seam.py`: `Device.add_lora`,
`adapt_embedding`, `adapt_logits`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

FREE, BASE = -1, -2


def lora_delta(x: Tensor, a: Tensor, b: Tensor, owner: Tensor, adapter: Tensor) -> Tensor:
    """Return what to add to the base product, [rows, out]: the reference that all forms must equal.

    A base row matches no lane, so its delta is exactly zero.
    """
    mine = adapter[:, None] == owner
    return torch.where(mine, x @ a.T, 0.0) @ b


def add_lanes(
    y: Tensor, x: Tensor, a: Tensor, parts: Sequence[tuple[slice, Tensor]], mine: Tensor | None
) -> None:
    """Add the deltas of linears that share the input x to their fused output y, in place.

    y [rows, sum of outs]; a [lanes, linears, in]; parts: for each linear its columns of y and its
    b [lanes, out]; mine [rows, lanes] or None when every row owns every lane given. All linears'
    shrinks are one product. It is computed in the dtype of a and b; x and y may have another.
    """
    shrunk = _shrink(x.to(a.dtype), a, mine)
    if y.dtype == a.dtype:
        for (columns, b), part in zip(parts, shrunk, strict=True):
            torch.addmm(y[:, columns], part, b, out=y[:, columns])
        return
    delta = torch.empty(y.shape, dtype=a.dtype)
    for (columns, b), part in zip(parts, shrunk, strict=True):
        torch.mm(part, b, out=delta[:, columns])
    y.add_(delta)


def _shrink(x: Tensor, a: Tensor, mine: Tensor | None) -> list[Tensor]:
    """Return x times each linear's lanes, masked: [rows, lanes] a linear."""
    lanes, linears, width = a.shape
    h = F.linear(x, a.reshape(lanes * linears, width))
    if linears == 1:
        return [h if mine is None else torch.where(mine, h, 0.0)]
    h = h.view(-1, lanes, linears)
    if mine is not None:
        h = torch.where(mine.unsqueeze(-1), h, 0.0)
    return list(h.permute(2, 0, 1).contiguous())

"""What an adapter does to one linear, as it was trained, and how that is folded.

In float32:

    LoRA        y = W x + bias + scale (B A x + lora_bias)
    own bias    y = W x + own + ...
    DoRA        y = m / n (W + scale B A) x + bias,    n = row norms of (W + scale B A)

all become  (1 + gain) (W x + bias) + B' A x + shift.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

import torch
from torch import Tensor

from loralane_server.adapters.reading.scratch import fresh
from loralane_server.errors import AdapterCorrupt

#: Rows [begin, end) of the base's weight, float32 [end - begin, in].
WeightRows = Callable[[int, int], Tensor]

#: Elements of a weight that are held at once while its norms are computed: 16 MiB.
_BLOCK: Final = 1 << 22
#: Rows that are turned into columns at once: of many more, lines push each other out of the cache,
#: and a tensor takes three times as long.
_ROWS_TURNED: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """One target's tensors, unscaled. From `Reader.read_factors` all are float32."""

    #: [rank, in]
    a: Tensor
    #: [rank, out]
    b: Tensor
    scale: float
    #: [out] of B.
    lora_bias: Tensor | None = None
    #: [out] instead of the base's.
    bias: Tensor | None = None
    #: [out] DoRA's.
    magnitude: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but A and B."""
        return self.lora_bias is None and self.bias is None and self.magnitude is None

    def in_float32(self) -> "Factors":
        """The same with all tensors in float32."""
        optional = (self.lora_bias, self.bias, self.magnitude)
        vectors = [None if part is None else part.to(torch.float32) for part in optional]
        return Factors(self.a.to(torch.float32), self.b.to(torch.float32), self.scale, *vectors)


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """The same in the form of `TargetTensors`, float32; A is left as it is."""

    #: [rank, out]
    b: Tensor
    #: [out]
    gain: Tensor | None
    #: [out]
    shift: Tensor | None


def fold(factors: Factors, weight: WeightRows | None, bias: Tensor | None) -> Folded:
    """Fold scale, biases and magnitudes.

    `weight` is asked for only if there are magnitudes; `bias` is the base's own, None = it has none
    or it is not needed: without magnitudes and own bias.
    """
    b = factors.b.to(torch.float32).mul(factors.scale)
    shift: Tensor | None = None
    gain: Tensor | None = None
    if factors.lora_bias is not None:
        shift = factors.lora_bias.to(torch.float32) * factors.scale
    if factors.bias is not None:
        assert bias is not None, "a bias is replaced only where the base has one"
        shift = _sum(shift, factors.bias.to(torch.float32) - bias)
    if factors.magnitude is not None:
        assert weight is not None, "magnitudes need the base's weight"
        a = factors.a.to(torch.float32)
        factor = factors.magnitude.to(torch.float32) / row_norms(weight, a, b)
        b = b * factor
        gain = factor - 1
        if bias is not None:
            shift = _sum(shift, -gain * bias)
    return Folded(b, gain, shift)


def row_norms(weight: WeightRows, a: Tensor, b: Tensor) -> Tensor:
    """Return the norms of the rows of W + B^T A: a [rank, in], b [rank, out], result [out].

    The sum is formed, a block of rows at a time: its norm from W's own and products with A and B
    would cost the same large product and lose digits where B A cancels W.
    """
    out, step = b.shape[1], max(1, _BLOCK // a.shape[1])
    norms = torch.empty(out)
    for begin in range(0, out, step):
        end = min(out, begin + step)
        block = torch.addmm(weight(begin, end), b[:, begin:end].T, a)
        norms[begin:end] = torch.linalg.vector_norm(block, dim=1)
    return norms


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """A tensor that is to be served, as it is stored."""

    tensor: Tensor
    #: For errors.
    name: str
    #: What it is multiplied by in float32, before it is rounded; None = nothing.
    scale: float | None = None
    #: Whether the copy lies in memory by columns: what `copy.T` of a contiguous one would be.
    by_columns: bool = False


def serve_together(
    halves: Sequence[Half], dtype: torch.dtype, room: Callable[[int], Tensor] = fresh
) -> list[Tensor]:
    """Return dense copies in `dtype`, which share one block of memory and one check.

    `room` gives that block: so many bytes.

    Raises:
        AdapterCorrupt: one is not finite there; the message names it.
    """
    if not halves:
        return []
    sizes = [half.tensor.numel() for half in halves]
    block = room(sum(sizes) * dtype.itemsize).view(dtype)
    copies = [_laid_out(part, half) for part, half in zip(block.split(sizes), halves, strict=True)]
    to: list[Tensor] = []
    values: list[Tensor] = []
    for copy, half, value in zip(copies, halves, _scaled(halves), strict=True):
        rows = _ROWS_TURNED if half.by_columns else max(1, len(copy))
        to += copy.split(rows)
        values += value.split(rows)
    # One call for all: each gives the interpreter away, and may wait until it comes back.
    torch._foreach_copy_(to, values)
    # A sum is finite only if all it adds is: one pass, and no mask to allocate.
    if not isfinite(block.sum(dtype=torch.float32).item()):
        for half, copy in zip(halves, copies, strict=True):
            _check_finite(copy, half.name)
    return copies


def _laid_out(part: Tensor, half: Half) -> Tensor:
    """Return a part of the block in the shape of the half."""
    shape = half.tensor.shape
    return part.view(shape[::-1]).T if half.by_columns else part.view(shape)


def _scaled(halves: Sequence[Half]) -> list[Tensor]:
    """Return the tensors, those that have a scale multiplied by it in float32."""
    tensors = [half.tensor for half in halves]
    scales = {i: half.scale for i, half in enumerate(halves) if half.scale is not None}
    if scales:
        products = torch._foreach_mul(
            [tensors[i].to(torch.float32) for i in scales], list(scales.values())
        )
        for i, product in zip(scales, products, strict=True):
            tensors[i] = product
    return tensors


def served(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a contiguous copy in `dtype`; raises as `serve_together`."""
    return serve_together([Half(tensor, name)], dtype)[0]


def _check_finite(tensor: Tensor, name: str) -> None:
    if not tensor.isfinite().all():
        raise AdapterCorrupt(
            f"{name!a} is not finite: it holds NaN or Inf, or {tensor.dtype} cannot hold it",
            tensors=[name],
        )


def _sum(shift: Tensor | None, more: Tensor) -> Tensor:
    return more if shift is None else shift + more

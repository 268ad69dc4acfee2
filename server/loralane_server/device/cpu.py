"""The CPU backend: plain torch, oneDNN weights packed once, shapes as they come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from loralane_server import sampling
from loralane_server.device.cpu_attention import AttentionPlan, CpuAttention, plan_attention
from loralane_server.device.cpu_ends import CpuEnds
from loralane_server.device.cpu_gains import Plan, plan_token_gains
from loralane_server.device.cpu_lanes import CpuLanes, LaneBlock, plan_lanes
from loralane_server.device.seam import (
    ENDS,
    Int32,
    Linear,
    Sampling,
    Span,
    StepInput,
    StepOutput,
    TableRows,
    TargetTensors,
)
from loralane_server.model.spec import ModelSpec

#: oneDNN picks a weight layout for about this many tokens; measured best from 1 to 256.
_PACK_FOR_TOKENS = 32


@dataclass(frozen=True, slots=True)
class CpuBatch:
    """A step's input as tensors and plans that all layers share."""

    tokens: Tensor
    positions: Tensor
    spans: Sequence[Span]
    attention: AttentionPlan
    lanes: tuple[LaneBlock, ...]
    #: Asked only by layers in which adapters have gain or shift.
    gains: Plan
    #: [samples] index into tokens.
    sampled: Int32
    #: [samples] which tokens; None when every token is sampled, in order.
    sample_at: Tensor | None
    sampling: Sequence[Sampling]
    #: [samples] the position that each sampled token will have.
    next_positions: Sequence[int]
    top_logprobs: int | None


class PlainLinear:
    """y = x W^T + b over the stored weight, nothing copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """y = x W^T + b over a weight in oneDNN's blocked layout: 1.4-1.7 times faster at decode."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_TOKENS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class CpuDevice:
    """Implements `Device`. Owns KV pages (through `CpuAttention`) and lanes (`CpuLanes`)."""

    name = "cpu"

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        pages: int,
        page_tokens: int,
        lanes: int,
    ) -> None:
        self._dtype = dtype
        self._page_tokens = page_tokens
        self._attention = CpuAttention(
            spec.layers, pages, page_tokens, spec.kv_heads, spec.head_dim, dtype
        )
        self._lanes = CpuLanes(spec.layers, spec.linears(), lanes, dtype)
        self._ends = CpuEnds(spec.vocab, spec.hidden, lanes, dtype)
        self._packs = torch.backends.mkldnn.is_available()

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        group: str | None = None,
        shared: bool = False,
    ) -> Linear:
        """Pack a weight, unless it is shared: a packed copy of an embedding would double it."""
        if self._packs and not shared:
            return PackedLinear(weight, bias)
        return PlainLinear(weight, bias)

    def split(self, y: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """See `Device.split`: views."""
        parts: tuple[Tensor, ...] = y.split(list(sizes), dim=1)
        return parts

    def put(self, tensor: Tensor) -> Tensor:
        """Return the tensor: host memory is device memory here."""
        return tensor

    def batch(self, step: StepInput) -> CpuBatch:
        """Lay out a step; see `Device.batch`."""
        all_sampled = len(step.sample_at) == len(step.tokens)
        return CpuBatch(
            tokens=torch.from_numpy(step.tokens.astype(np.int64)),
            positions=torch.from_numpy(step.positions.astype(np.int64)),
            spans=step.spans,
            attention=plan_attention(step.spans, self._page_tokens, self._dtype),
            lanes=plan_lanes(step.spans),
            gains=cache(partial(plan_token_gains, step.spans)),
            sampled=step.sample_at,
            sample_at=None if all_sampled else torch.from_numpy(step.sample_at.astype(np.int64)),
            sampling=step.sampling,
            next_positions=(step.positions[step.sample_at] + 1).tolist(),
            top_logprobs=step.top_logprobs,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: CpuBatch) -> Tensor:
        """See `Device.attend`."""
        return self._attention.attend(layer, q, k, v, batch.attention)

    def add_lora(self, y: Tensor, x: Tensor, layer: int, group: str, batch: CpuBatch) -> None:
        """See `Device.add_lora`."""
        if batch.lanes:
            self._lanes.add(y, x, layer, group, batch.lanes, batch.gains)

    def whole(self, y: Tensor) -> Tensor:
        """See `Device.whole`: it is."""
        return y

    def write_lanes(
        self,
        layer: int,
        lane_pages: Sequence[int],
        targets: Mapping[str, TargetTensors],
        tables: Mapping[str, TableRows],
    ) -> None:
        """See `Device.write_lanes`."""
        if layer == ENDS:
            self._ends.write(lane_pages, targets, tables)
        else:
            self._lanes.write(layer, lane_pages, targets)

    def forget(self, lane_pages: Sequence[int]) -> None:
        """See `Device.forget`."""
        self._ends.forget(lane_pages)

    def adapt_embedding(self, x: Tensor, batch: CpuBatch) -> None:
        """See `Device.adapt_embedding`."""
        if self._ends.embedding.carriers:
            self._ends.adapt_embedding(x, batch.tokens, batch.spans)

    def adapt_logits(self, logits: Tensor, x: Tensor, batch: CpuBatch) -> None:
        """See `Device.adapt_logits`."""
        if self._ends.head.carriers:
            self._ends.adapt_logits(logits, x, batch.spans, batch.sampled)

    def samples_of(self, x: Tensor, batch: CpuBatch) -> Tensor:
        """See `Device.samples_of`."""
        return x if batch.sample_at is None else x[batch.sample_at]

    def sample(self, logits: Tensor, batch: CpuBatch) -> StepOutput:
        """See `Device.sample`."""
        logits = logits.float()
        sampling.add_bias(logits, batch.sampling)
        tokens = sampling.choose(logits, batch.sampling, batch.next_positions)
        if batch.top_logprobs is None:
            return StepOutput(tokens.numpy())
        return sampling.with_logprobs(logits, tokens, batch.top_logprobs)

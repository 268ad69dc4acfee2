"""Paged attention in plain torch ops: KV pages and how a step reads them.

    k, v    per layer   [KV slots, kv_heads, head_dim]; a page is `page_tokens` adjacent slots

Single tokens (decode) are attended together, padded to the longest of their group, with the query
heads of one KV head folded into the query length: on a CPU that is several times faster than
repeating K and V. A chunk (prefill) is attended alone, in two parts that are put together by their
shares of the softmax: all that was before it, which needs no mask and folds heads likewise, and
its own tokens, causally. A mask [chunk, context] would cost its memory, and time for what it hides.

What is padded or masked is still computed with, and 0 x NaN is NaN. So a row reads no page but its
own, and nothing that an earlier owner left there: huge weights of one adapter make K and V of its
rows Inf or NaN, and no other row may see them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from loralane_server.device.memory import lazy_zeros
from loralane_server.device.seam import Int32, Span

#: A group is split by length when padding would read more than this many times what is needed.
_PADDING_LIMIT = 2.0


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """Single tokens of similar context length, attended in one call."""

    #: Which tokens of the step: a range, or their indices.
    tokens: slice | Tensor
    #: [tokens, pages]; a shorter row is padded with its own first page.
    pages: Tensor
    #: [tokens, 1, 1, pages * page_tokens] additive: 0 where there is context, -inf beyond.
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens of one row."""

    tokens: slice
    #: Context before the chunk, in tokens.
    start: int
    #: [1, pages] that hold this context.
    pages: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a step's tokens are attended; the same for every layer."""

    #: [tokens] KV slot of each token.
    slots: Tensor
    #: The slots behind them on pages that this step is the first to write to; None = no such slots.
    unused: Tensor | None
    singles: tuple[SingleGroup, ...]
    chunks: tuple[Chunk, ...]


def plan_attention(spans: Sequence[Span], page_tokens: int, dtype: torch.dtype) -> AttentionPlan:
    """Lay out a step's attention from its spans."""
    slots = np.empty(sum(s.length for s in spans), dtype=np.int64)
    chunks: list[Chunk] = []
    singles: list[tuple[int, Span]] = []
    begin = 0
    for span in spans:
        end = begin + span.length
        at = np.arange(span.start, span.start + span.length)
        slots[begin:end] = span.pages[at // page_tokens].astype(np.int64) * page_tokens
        slots[begin:end] += at % page_tokens
        if span.length == 1:
            singles.append((begin, span))
        else:
            chunks.append(_chunk(span, begin, page_tokens))
        begin = end
    groups = _group_by_length(singles, page_tokens)
    return AttentionPlan(
        torch.from_numpy(slots),
        _unused(spans, page_tokens),
        tuple(_single_group(group, page_tokens, dtype) for group in groups),
        tuple(chunks),
    )


def _unused(spans: Sequence[Span], page_tokens: int) -> Tensor | None:
    slots: list[int] = []
    for span in spans:
        end = span.start + span.length
        used = (end - 1) % page_tokens + 1
        if span.length >= used:  # else an earlier step has come to this page
            first = int(span.pages[(end - 1) // page_tokens]) * page_tokens
            slots += range(first + used, first + page_tokens)
    return torch.tensor(slots) if slots else None


def _chunk(span: Span, begin: int, page_tokens: int) -> Chunk:
    pages = torch.from_numpy(span.pages[: -(-span.start // page_tokens)].astype(np.int64))
    return Chunk(slice(begin, begin + span.length), span.start, pages[None])


def _group_by_length(
    singles: Sequence[tuple[int, Span]], page_tokens: int
) -> list[list[tuple[int, Span]]]:
    """Keep rows together unless the longest would make the others read mostly padding."""
    if not singles:
        return []
    needed = [span.start // page_tokens + 1 for _, span in singles]
    if max(needed) * len(needed) <= _PADDING_LIMIT * sum(needed):
        return [list(singles)]
    classes: dict[int, list[tuple[int, Span]]] = {}
    for item, pages in zip(singles, needed, strict=True):
        classes.setdefault(pages.bit_length(), []).append(item)
    return list(classes.values())


def _single_group(
    group: Sequence[tuple[int, Span]], page_tokens: int, dtype: torch.dtype
) -> SingleGroup:
    where = [token for token, _ in group]
    lengths = np.array([span.start + 1 for _, span in group])
    width = int(-(-lengths.max() // page_tokens))
    table: Int32 = np.empty((len(group), width), dtype=np.int32)
    for row, (_, span) in enumerate(group):
        count = span.start // page_tokens + 1
        table[row, :count] = span.pages[:count]
        table[row, count:] = span.pages[0]
    beyond = np.arange(width * page_tokens)[None, :] >= lengths[:, None]
    mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(
        torch.from_numpy(beyond), float("-inf")
    )
    adjacent = where == list(range(where[0], where[0] + len(where)))
    tokens = slice(where[0], where[0] + len(where)) if adjacent else torch.tensor(where)
    return SingleGroup(tokens, torch.from_numpy(table.astype(np.int64)), mask[:, None, None, :])


class CpuAttention:
    """Owns the KV pages of all layers."""

    def __init__(
        self,
        layers: int,
        pages: int,
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        shape = (pages * page_tokens, kv_heads, head_dim)
        self._k = [lazy_zeros(shape, dtype) for _ in range(layers)]
        self._v = [lazy_zeros(shape, dtype) for _ in range(layers)]
        self._page_tokens = page_tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """Write k and v, then attend; see `Device.attend`."""
        self._k[layer][plan.slots] = k
        self._v[layer][plan.slots] = v
        if plan.unused is not None:
            self._k[layer][plan.unused] = 0
            self._v[layer][plan.unused] = 0
        out = torch.empty_like(q)
        for group in plan.singles:
            out[group.tokens] = self._attend_singles(layer, q[group.tokens], group)
        for chunk in plan.chunks:
            out[chunk.tokens] = self._attend_chunk(layer, q, k, v, chunk)
        return out.view(q.shape[0], -1)

    def _attend_singles(self, layer: int, q: Tensor, group: SingleGroup) -> Tensor:
        rows, heads, head_dim = q.shape
        keys = self._gather(self._k[layer], group.pages)
        values = self._gather(self._v[layer], group.pages)
        folded = q.reshape(rows, keys.shape[1], -1, head_dim)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask)
        return out.reshape(rows, heads, head_dim)

    def _attend_chunk(self, layer: int, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Tensor:
        queries = q[chunk.tokens]
        own = _attend_own(queries, k[chunk.tokens], v[chunk.tokens])
        if chunk.start == 0:
            return own.out
        keys = self._gather(self._k[layer], chunk.pages)[:, :, : chunk.start]
        values = self._gather(self._v[layer], chunk.pages)[:, :, : chunk.start]
        return _together(_attend_before(queries, keys, values), own)

    def _gather(self, cache: Tensor, pages: Tensor) -> Tensor:
        """Copy pages [rows, pages] together: -> [rows, kv_heads, pages * page_tokens, head_dim]."""
        rows = pages.shape[0]
        paged = cache.view(-1, self._page_tokens * cache.shape[1] * cache.shape[2])
        found = paged.index_select(0, pages.flatten())
        return found.view(rows, -1, cache.shape[1], cache.shape[2]).transpose(1, 2)


class _Part(NamedTuple):
    """Attention to some of the tokens that a chunk sees."""

    #: [tokens, heads, head_dim]
    out: Tensor
    #: [tokens, heads] logarithm of the softmax's sum over these tokens.
    weight: Tensor


def _attend_before(q: Tensor, keys: Tensor, values: Tensor) -> _Part:
    """Attend to all of keys and values [1, kv_heads, context, head_dim]; q as `Device.attend`."""
    tokens, _, head_dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    out, weight = _flash(grouped.reshape(1, kv_heads, -1, head_dim), keys, values, causal=False)
    return _Part(
        out.view(kv_heads, -1, tokens, head_dim).permute(2, 0, 1, 3).reshape(q.shape),
        weight.reshape(-1, tokens).T,
    )


def _attend_own(q: Tensor, k: Tensor, v: Tensor) -> _Part:
    """Attend causally to the chunk's own tokens; q, k, v as `Device.attend`."""
    repeat = q.shape[1] // k.shape[1]
    keys, values = (x.transpose(0, 1).repeat_interleave(repeat, 0).unsqueeze(0) for x in (k, v))
    out, weight = _flash(q.transpose(0, 1).unsqueeze(0), keys, values, causal=True)
    return _Part(out[0].transpose(0, 1), weight[0].T)


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention like q, [1, heads, tokens, head_dim], and the log-sums [1, heads, tokens].

    `scaled_dot_product_attention` runs the same kernel, and keeps the sums to itself.
    """
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, sums


def _together(a: _Part, b: _Part) -> Tensor:
    """Return attention to the tokens of both parts."""
    share = torch.sigmoid(a.weight - b.weight).unsqueeze(2)  # [tokens, heads, 1] float32
    # Not lerp: where one part overflowed it would subtract Inf from Inf.
    return (a.out * share + b.out * (1 - share)).to(a.out.dtype)

"""Paged attention in a traced step: plain operations, or the Pallas kernel on a TPU.

A layer's KV pages, the last of them the dustbin (see layout.py), are

    plain    [pages + 1, kv_heads, 2, page_tokens, head_dim]   K is 0, V is 1
    kernel   [pages + 1, page_tokens, 2 * kv_heads, padded head_dim]   K even, V odd

and layers lie one behind the other in few cells: every cell that a step updates costs the host
several microseconds. A layer finds its pages by adding where it begins to the step's page numbers.

In the plain form queries come in blocks of adjacent tokens of one row; a decode step is blocks of
one token. A page's keys of one head lie together, so what a block gathers is what it multiplies,
with the query heads of a KV head folded into the query length.

What is padded or masked is still computed with, and 0 x NaN is NaN. So values beyond a row's own
are replaced by 0, whatever an earlier owner of a page, or padding, left there; and scores are
replaced, not added to.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
import torch_xla.experimental.custom_kernel  # noqa: F401 - registers the kernel
from torch import Tensor
from torch.nn import functional as F

from loralane_server.device.xla.buckets import GraphKey
from loralane_server.device.xla.graphs import Cell
from loralane_server.device.xla.kv_shape import kv_shape
from loralane_server.device.xla.mesh import Mesh
from loralane_server.device.xla.tracing import CELL_BYTES
from loralane_server.kv.pages import PAGE_TOKENS

#: Bytes of a TPU core's vector memory that the kernel may use.
_KERNEL_BYTES: Final = 96 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """The ragged paged attention kernel, and how it works through its input: in fixed portions.

    Left to itself it looks these up by the TPU that is there, so nothing could be compiled ahead of
    time.
    """

    #: KV pages in a block: 16 of 16 tokens are 256 keys.
    kv_pages: int = 16
    #: Query tokens in a block.
    queries: int = 32

    def attend(self, q: Tensor, kv: Tensor, plan: "KernelPlan", scale: float) -> Tensor:
        """Attend causally: q [T, heads, D] to the rows' pages of kv, already written; -> as q.

        What it returns for padded tokens is anything.
        """
        out: Tensor = torch.ops.xla.ragged_paged_attention(
            q,
            kv,
            plan.lengths,
            plan.pages,
            plan.row_begins,
            plan.row_count,
            sm_scale=scale,
            num_kv_pages_per_block=min(self.kv_pages, plan.pages.shape[1]),
            num_queries_per_block=min(self.queries, q.shape[0]),
            vmem_limit_bytes=_KERNEL_BYTES,
        )
        return out


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """How a step's tokens are attended by blocks: N blocks of B tokens, L keys. For all layers."""

    #: [T] KV page and place in it of each token.
    page: Tensor
    place: Tensor
    #: [N, P]
    pages: Tensor
    #: [N, 1, B, 1, L] whether a query may look at a key.
    visible: Tensor
    #: [N, 1, L, 1] whether the block's row has a value there.
    held: Tensor
    #: [N * B] the block's tokens; None = the step's, in order.
    queries: Tensor | None
    #: [T] where each token is among the blocks'; None = in order.
    token_at: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class KernelPlan:
    """What the kernel is told of a step, int32. For all layers."""

    #: [T]
    slots: Tensor
    #: [R, P]
    pages: Tensor
    #: [R]
    lengths: Tensor
    #: [R + 1]
    row_begins: Tensor
    #: [1]
    row_count: Tensor


Plan = BlockPlan | KernelPlan


def plan_attention(key: GraphKey, part: dict[str, Any], *, kernel: bool) -> Plan:
    """Prepare what all layers share, from a step's input as `Layout.split` gives it."""
    if kernel:
        return KernelPlan(
            part["slots"], part["pages"], part["lengths"], part["row_begins"], part["row_count"]
        )
    if key.kind == "decode":
        first = part["lengths"] - 1
        return _blocks(part, part["pages"], first[:, None], part["lengths"], None, None)
    pages = part["pages"].index_select(0, part["block_row"])
    inside = _count(key.block_tokens, pages)
    at = part["block_position"][:, None] + inside
    queries = (part["block_first"][:, None] + inside).clamp(max=key.tokens - 1).flatten()
    limits = part["block_position"] + part["block_count"]
    return _blocks(part, pages, at, limits, queries, part["token_at"])


def _blocks(
    part: dict[str, Any],
    pages: Tensor,
    at: Tensor,
    limits: Tensor,
    queries: Tensor | None,
    token_at: Tensor | None,
) -> BlockPlan:
    """Return the plan of blocks whose queries have positions at [N, B] and keys below limits [N]"""
    keys = _count(pages.shape[1] * PAGE_TOKENS, pages)
    slots = part["slots"].long()
    page = torch.div(slots, PAGE_TOKENS, rounding_mode="floor")
    return BlockPlan(
        page=page,
        place=slots - page * PAGE_TOKENS,
        pages=pages,
        visible=(keys <= at[:, :, None])[:, None, :, None, :],
        held=(keys < limits[:, None])[:, None, :, None],
        queries=queries,
        token_at=token_at,
    )


@dataclass(frozen=True, slots=True, eq=False)
class LayerPages:
    """Where a layer's KV pages are."""

    cell: Cell
    #: The first of them in the cell.
    first: int


class XlaAttention:
    """Owns the KV pages of all layers."""

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Kernel | None,
        mesh: Mesh,
        cell_bytes: int = CELL_BYTES,
    ) -> None:
        """`cell_bytes`: of a cell on one device at most, but for one that holds a single layer."""
        self._kernel = kernel
        self._mesh = mesh
        self._kv_heads = kv_heads
        shape = kv_shape(pages + 1, kv_heads, head_dim, kernel=kernel is not None)
        heads = 1 if kernel is None else 2
        layer_bytes = prod(shape) * dtype.itemsize // mesh.devices
        together = min(max(cell_bytes // layer_bytes, 1), layers)
        self.cells = [
            Cell(
                mesh.place(torch.zeros(held * shape[0], *shape[1:], dtype=dtype).to(device), heads)
            )
            for held in (min(together, layers - begin) for begin in range(0, layers, together))
        ]
        #: By layer.
        self.pages = [
            LayerPages(self.cells[layer // together], layer % together * shape[0])
            for layer in range(layers)
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """See `Device.attend`."""
        own = self.pages[layer]
        if isinstance(plan, BlockPlan):
            self._write(own, k, v, plan)
            return self._by_blocks(own, q, plan)
        return self._by_kernel(own, q, k, v, plan)

    def _write(self, own: LayerPages, k: Tensor, v: Tensor, plan: BlockPlan) -> None:
        heads, kinds = _count(self._kv_heads, k).long(), _count(2, k).long()
        at = (
            _offset(plan.page, own.first)[:, None, None],
            heads[None, :, None],
            kinds[None, None, :],
            plan.place[:, None, None],
        )
        own.cell.tensor.index_put_(at, torch.stack((k, v), dim=2))

    def _by_blocks(self, own: LayerPages, q: Tensor, plan: BlockPlan) -> Tensor:
        heads, head_dim = q.shape[1:]
        blocks, size, kv_heads = plan.pages.shape[0], plan.visible.shape[2], self._kv_heads
        pages, pool = _offset(plan.pages, own.first), own.cell.tensor
        keys, values = (self._gather(pool[:, :, kind], pages) for kind in (0, 1))
        values = torch.where(plan.held, values, 0.0)
        if plan.queries is not None:
            q = q.index_select(0, plan.queries)
        # A KV head's query heads of all the block's tokens, [N, kv_heads, B * heads each, D].
        q = q.view(blocks, size, kv_heads, -1, head_dim).transpose(1, 2)
        q = q.reshape(blocks, kv_heads, -1, head_dim) * head_dim**-0.5
        scores = torch.matmul(q, keys.transpose(-1, -2)).float()
        scores = scores.view(blocks, kv_heads, size, -1, scores.shape[-1])
        scores = torch.where(plan.visible, scores, torch.finfo(torch.float32).min)
        weights = torch.softmax(scores, dim=-1).to(q.dtype).flatten(2, 3)
        out = torch.matmul(weights, values).view(blocks, kv_heads, size, -1, head_dim)
        out = out.transpose(1, 2).reshape(blocks * size, heads * head_dim)
        return out if plan.token_at is None else out.index_select(0, plan.token_at)

    def _gather(self, pool: Tensor, pages: Tensor) -> Tensor:
        """Copy pages [N, P] of [pages, kv_heads, page_tokens, D]: -> [N, kv_heads, L, D]."""
        blocks, head_dim = pages.shape[0], pool.shape[-1]
        found = pool.index_select(0, pages.flatten())
        found = found.view(blocks, -1, self._kv_heads, PAGE_TOKENS, head_dim).transpose(1, 2)
        return found.reshape(blocks, self._kv_heads, -1, head_dim)

    def _by_kernel(
        self, own: LayerPages, q: Tensor, k: Tensor, v: Tensor, plan: KernelPlan
    ) -> Tensor:
        assert self._kernel is not None
        cell = own.cell
        head_dim = q.shape[-1]
        padding = cell.tensor.shape[-1] - head_dim
        if padding:
            q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
        new = torch.stack((k, v), dim=2).flatten(1, 2)  # [T, 2 * kv_heads, padded head_dim]
        slots = cell.tensor.view(-1, *new.shape[1:])
        slots.index_put_((_offset(plan.slots, own.first * PAGE_TOKENS).long(),), new)
        kernel, scale = self._kernel, head_dim**-0.5
        rows = (_offset(plan.pages, own.first), plan.lengths, plan.row_begins, plan.row_count)

        def attend(q: Tensor, kv: Tensor, *rows: Tensor) -> Tensor:
            return kernel.attend(q, kv, KernelPlan(plan.slots, *rows), scale)

        out = self._mesh.apart(attend, (q, cell.tensor, *rows), (1, 2, None, None, None, None), 1)
        return out[..., :head_dim].flatten(1)


def _offset(numbers: Tensor, by: int) -> Tensor:
    """Add a constant of the graph; a Python number would become a parameter of its own."""
    if not by:
        return numbers
    return numbers + torch.arange(by, by + 1, dtype=numbers.dtype, device=numbers.device)


def _count(end: int, like: Tensor) -> Tensor:
    """Return 0 ... end - 1 where `like` is, int32; a constant of the graph."""
    return torch.arange(end, dtype=torch.int32, device=like.device)

"""Attention in a graph equals plain causal attention, row by row, and the CPU's numbers."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch_xla
from loralane_server.device.cpu_attention import CpuAttention
from loralane_server.device.cpu_attention import plan_attention as cpu_plan
from loralane_server.device.seam import Span
from loralane_server.device.xla.attention import (
    Kernel,
    KernelPlan,
    XlaAttention,
    plan_attention,
)
from loralane_server.device.xla.buckets import GraphKey, plan_buckets
from loralane_server.device.xla.graphs import Graph, Graphs
from loralane_server.device.xla.layout import layout_of
from loralane_server.device.xla.mesh import Mesh
from loralane_server.device.xla.tracing import CELL_BYTES
from torch import Tensor
from torch_xla.experimental.custom_kernel import ragged_paged_attention

from tests.server.device.xla.steps import step_of

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 6, 2, 8, 16, 40
BUCKETS = plan_buckets(max_rows=6, step_tokens=64, max_len=256, lanes=0)


class Row:
    """A row with its own random q, k, v for every position."""

    def __init__(self, length: int, pages: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, HEADS, HEAD_DIM, generator=generator)
        self.k = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator)
        self.v = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator)
        self.pages = np.array(pages, dtype=np.int32)
        self.done = 0

    def span(self, count: int) -> Span:
        return Span(self.done, count, self.pages)

    def expected(self, at: int) -> Tensor:
        """Attention of one token over all up to it."""
        repeat = HEADS // KV_HEADS
        k = self.k[: at + 1].repeat_interleave(repeat, 1)
        v = self.v[: at + 1].repeat_interleave(repeat, 1)
        scores = torch.einsum("hd,lhd->hl", self.q[at], k) * HEAD_DIM**-0.5
        return torch.einsum("hl,lhd->hd", scores.softmax(-1), v).flatten()


class Pages:
    """KV pages of two layers, of which the second is used, and a graph for each shape."""

    def __init__(self, cell_bytes: int = CELL_BYTES) -> None:
        self.graphs = Graphs()
        self.attention = XlaAttention(
            layers=2,
            pages=PAGES,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device=torch_xla.device(),
            kernel=None,
            mesh=Mesh(),
            cell_bytes=cell_bytes,
        )
        self.compiled: dict[GraphKey, Graph] = {}

    def attend(self, parts: Sequence[tuple[Row, int]]) -> Tensor:
        """Run one step of the rows: [tokens, heads * head_dim]."""
        step = step_of([(r.done, n, r.pages, ()) for r, n in parts])
        key = BUCKETS.choose(step)
        layout = layout_of(key, PAGES, False)
        where = [(row, at) for row, n in parts for at in range(row.done, row.done + n)]
        padding = torch.full((key.tokens - len(where), 1, HEAD_DIM), torch.nan)
        q, k, v = (
            torch.cat(
                [
                    torch.stack([getattr(row, name)[at] for row, at in where]),
                    padding.expand(-1, heads, -1),
                ]
            )
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        ints = torch.from_numpy(layout.pack(step))
        inputs = [tensor.to(torch_xla.device()) for tensor in (ints, q, k, v)]

        def attend(ints: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
            plan = plan_attention(key, layout.split(ints), kernel=False)
            return [self.attention.attend(1, q, k, v, plan)]

        if key not in self.compiled:
            updated = [self.attention.pages[1].cell]
            self.compiled[key] = self.graphs.compile(key.name, attend, inputs, updated=updated)
        out = self.compiled[key].run(inputs)[0].cpu()
        for row, n in parts:
            row.done += n
        return out[: len(where)]


def check(pages: Pages, *parts: tuple[Row, int]) -> None:
    """Run one step and compare every token with plain attention."""
    expected = [row.expected(at) for row, n in parts for at in range(row.done, row.done + n)]

    out = pages.attend(parts)

    torch.testing.assert_close(out, torch.stack(expected), atol=2e-6, rtol=1e-5)


def test_rows_of_any_length_join_leave_and_interleave() -> None:
    pages = Pages()
    long = Row(230, [*range(7, 22)], seed=1)
    short = Row(40, [0, 39, 3], seed=2)
    one = Row(20, [25, 24], seed=3)

    check(pages, (long, 64))
    check(pages, (one, 1), (long, 40), (short, 17))
    for _ in range(8):
        check(pages, (long, 1), (short, 1), (one, 1))
    check(pages, (one, 1), (short, 2), (long, 30))
    check(pages, (long, 1))


def test_many_short_rows_fill_narrow_blocks() -> None:
    pages = Pages()
    rows = [Row(30, [6 * i, 6 * i + 1], seed=i) for i in range(6)]

    check(pages, *((row, 2 + i) for i, row in enumerate(rows)))
    check(pages, *((row, 15 - i) for i, row in enumerate(rows) if i))
    check(pages, *((row, 1) for row in rows))


@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_others_and_earlier_owners_left_is_not_read(what: str, value: float) -> None:
    pages = Pages()
    poison = Row(256, range(16), seed=4)
    getattr(poison, what)[:] = value
    for _ in range(4):
        pages.attend([(poison, 64)])
    short, long = Row(20, [1, 2], seed=5), Row(100, [4, 5, 6, 7, 8, 9, 10], seed=6)
    beside = Row(60, [11, 12, 13, 14], seed=7)
    getattr(beside, what)[:] = value

    expected = torch.stack([long.expected(at) for at in range(50)])
    out = pages.attend([(beside, 14), (long, 50)])
    torch.testing.assert_close(out[14:], expected, atol=2e-6, rtol=1e-5)
    for _ in range(3):  # a page is come to one token at a time, beside longer ones
        check(pages, (short, 1), (long, 1))
    check(pages, (long, 20), (short, 15))


def test_the_cpu_device_has_the_same_numbers() -> None:
    pages = Pages()
    cpu = CpuAttention(1, PAGES, PAGE, KV_HEADS, HEAD_DIM, torch.float32)
    rows = [Row(90, range(10 * i, 10 * i + 6), seed=i) for i in range(3)]

    for counts in ([20, 1, 30], [1, 1, 1], [40, 2, 20], [1, 1, 1]):
        parts = list(zip(rows, counts, strict=True))
        plan = cpu_plan([row.span(n) for row, n in parts], PAGE, torch.float32)
        where = [(row, at) for row, n in parts for at in range(row.done, row.done + n)]
        q, k, v = (torch.stack([getattr(row, name)[at] for row, at in where]) for name in "qkv")
        expected = cpu.attend(0, q, k, v, plan)

        out = pages.attend(parts)

        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_pages_are_updated_in_place_and_no_other_layer_is_touched() -> None:
    pages = Pages()
    own = pages.attention.pages[1]
    row = Row(40, [3, 5, 7], seed=8)
    pages.attend([(row, 20)])
    handle = torch_xla._XLAC._unsafe_buffer_pointer(own.cell.tensor)

    pages.attend([(row, 3)])

    assert torch_xla._XLAC._unsafe_buffer_pointer(own.cell.tensor) == handle
    both = own.cell.tensor.cpu()
    assert not both[: own.first].any()
    stored = both[own.first + row.pages[1]]  # [kv_heads, 2, page, head_dim]
    torch.testing.assert_close(stored[:, 0, :7], row.k[16:23].transpose(0, 1))
    torch.testing.assert_close(stored[:, 1, :7], row.v[16:23].transpose(0, 1))


def test_layers_share_a_cell_as_far_as_it_may_grow() -> None:
    layer_bytes = (PAGES + 1) * KV_HEADS * 2 * PAGE * HEAD_DIM * 4

    together, apart = Pages(2 * layer_bytes).attention, Pages(2 * layer_bytes - 1)

    assert [(own.cell, own.first) for own in together.pages] == [
        (together.cells[0], 0),
        (together.cells[0], PAGES + 1),
    ]
    assert [own.first for own in apart.attention.pages] == [0, 0]
    assert len(apart.attention.cells) == 2
    check(apart, (Row(40, [3, 5, 7], seed=8), 20))


class ReferenceKernel(Kernel):
    """The kernel's own definition in plain operations, run on the host: no TPU is needed."""

    def attend(self, q: Tensor, kv: Tensor, plan: KernelPlan, scale: float) -> Tensor:
        on_host = (plan.lengths, plan.pages, plan.row_begins, plan.row_count)
        lengths, pages, begins, count = (part.cpu() for part in on_host)
        out = ragged_paged_attention(
            q.cpu(),
            kv.cpu(),
            lengths,
            pages.long(),
            begins,
            count,
            sm_scale=scale,
            use_kernel=False,
        )
        padding = torch.full((q.shape[0] - out.shape[0], *out.shape[1:]), torch.nan)
        return torch.cat((out, padding)).to(q.device)


def test_the_kernel_is_told_the_same_step() -> None:
    """What the kernel is defined to compute from what it is given is plain attention."""
    attention = XlaAttention(
        layers=2,
        pages=PAGES,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=torch_xla.device(),
        kernel=ReferenceKernel(),
        mesh=Mesh(),
    )
    buckets = plan_buckets(max_rows=6, step_tokens=64, max_len=256, lanes=0, kernel=True)
    rows = [Row(90, range(10 * i, 10 * i + 6), seed=i) for i in range(3)]

    for counts in ([20, 1, 30], [1, 1, 1], [40, 2, 20], [1, 1, 1]):
        parts = list(zip(rows, counts, strict=True))
        step = step_of([(r.done, n, r.pages, ()) for r, n in parts])
        key = buckets.choose(step)
        layout = layout_of(key, PAGES, True)
        ints = torch.from_numpy(layout.pack(step)).to(torch_xla.device())
        where = [(row, at) for row, n in parts for at in range(row.done, row.done + n)]
        q, k, v = (
            torch.stack([getattr(row, name)[at] for row, at in where]).to(torch_xla.device())
            for name in "qkv"
        )
        more = (0, 0, 0, 0, 0, key.tokens - len(where))
        q, k, v = (torch.nn.functional.pad(x, more) for x in (q, k, v))

        plan = plan_attention(key, layout.split(ints), kernel=True)
        out = attention.attend(1, q, k, v, plan).cpu()[: len(where)]

        expected = torch.stack([row.expected(at) for row, at in where])
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
        for row, n in parts:
            row.done += n

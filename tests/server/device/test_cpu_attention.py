"""Paged attention equals plain causal attention, row by row."""

import numpy as np
import pytest
import torch
from loralane_server.device.cpu_attention import CpuAttention, plan_attention
from loralane_server.device.seam import Span

HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 8, 4


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of the last token of a row over all of it: q [heads, d]; k, v [length, kv, d]."""
    repeat = HEADS // KV_HEADS
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("hd,lhd->hl", q, k) * HEAD_DIM**-0.5
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v).flatten()


class Row:
    """A row with its own random q, k, v for every position."""

    def __init__(self, length: int, pages: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, HEADS, HEAD_DIM, generator=generator)
        self.k = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator)
        self.v = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator)
        self.pages = np.array(pages, dtype=np.int32)
        self.done = 0

    def expected(self, at: int) -> torch.Tensor:
        return plain(self.q[at], self.k[: at + 1], self.v[: at + 1])


def attend(attention: CpuAttention, parts: list[tuple[Row, int]]) -> None:
    """Run one step of the rows and compare every token with plain attention."""
    spans = [Span(row.done, n, row.pages) for row, n in parts]
    plan = plan_attention(spans, PAGE, torch.float32)
    where = [(row, at) for row, n in parts for at in range(row.done, row.done + n)]
    q, k, v = (torch.stack([getattr(row, name)[at] for row, at in where]) for name in "qkv")

    out = attention.attend(0, q, k, v, plan)

    torch.testing.assert_close(out, torch.stack([row.expected(at) for row, at in where]))
    for row, n in parts:
        row.done += n


def test_rows_of_any_length_join_leave_and_interleave() -> None:
    attention = CpuAttention(1, 40, PAGE, KV_HEADS, HEAD_DIM, torch.float32)
    long = Row(60, [7, 3, 9, 1, 0, 5, 6, 2, 30, 31, 32, 33, 34, 35, 36], seed=1)
    short = Row(12, [20, 10, 12], seed=2)
    one = Row(9, [25, 24, 23], seed=3)

    attend(attention, [(long, 30)])
    attend(attention, [(one, 1), (long, 13), (short, 5)])
    for _ in range(7):
        # Lengths 44..51, 6..12 and 2..8: padding them together would read mostly nothing.
        attend(attention, [(long, 1), (short, 1), (one, 1)])


def test_a_prompt_in_chunks_of_any_size_equals_plain_attention() -> None:
    attention = CpuAttention(1, 80, PAGE, KV_HEADS, HEAD_DIM, torch.float32)
    row = Row(300, list(range(79, 4, -1)), seed=7)

    for count in (2, 37, 1, 130, 3, 127):
        attend(attention, [(row, count)])


def test_bfloat16_chunks_are_near_plain_attention_at_any_depth() -> None:
    attention = CpuAttention(1, 80, PAGE, KV_HEADS, HEAD_DIM, torch.bfloat16)
    row = Row(300, list(range(80)), seed=8)
    q, k, v = row.q.bfloat16(), row.k.bfloat16(), row.v.bfloat16()
    row.q, row.k, row.v = q.float(), k.float(), v.float()

    for start, end in ((0, 90), (90, 180), (180, 300)):
        plan = plan_attention([Span(start, end - start, row.pages)], PAGE, torch.bfloat16)
        out = attention.attend(0, q[start:end], k[start:end], v[start:end], plan)

        wanted = torch.stack([row.expected(at) for at in range(start, end)])
        torch.testing.assert_close(out.float(), wanted, atol=0.02, rtol=0.02)


def test_pages_of_other_rows_are_not_read() -> None:
    attention = CpuAttention(1, 8, PAGE, KV_HEADS, HEAD_DIM, torch.float32)
    poison = Row(4, [1], seed=4)
    poison.v[:] = float("inf")
    attention.attend(
        0,
        poison.q,
        poison.k,
        poison.v,
        plan_attention([Span(0, 4, poison.pages)], 4, torch.float32),
    )
    row = Row(6, [0, 2], seed=5)

    attend(attention, [(row, 5)])
    attend(attention, [(row, 1)])


@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_an_earlier_owner_left_on_a_page_is_not_read(what: str, value: float) -> None:
    attention = CpuAttention(1, 8, PAGE, KV_HEADS, HEAD_DIM, torch.float32)
    poison = Row(32, list(range(8)), seed=4)
    getattr(poison, what)[:] = value
    plan = plan_attention([Span(0, 32, poison.pages)], PAGE, torch.float32)
    attention.attend(0, poison.q, poison.k, poison.v, plan)
    short, long = Row(10, [1, 2, 3], seed=5), Row(13, [4, 5, 6, 7], seed=6)

    attend(attention, [(short, 1), (long, 5)])
    for _ in range(8):  # pages are come to one token at a time, and padded beside each other
        attend(attention, [(short, 1), (long, 1)])


def test_what_a_row_beside_it_computes_is_not_read_as_padding() -> None:
    attention = CpuAttention(1, 8, PAGE, KV_HEADS, HEAD_DIM, torch.float32)
    short, long = Row(3, [1], seed=5), Row(6, [2, 0], seed=6)
    attend(attention, [(short, 2), (long, 5)])
    long.v[5:] = torch.nan

    spans = [Span(row.done, 1, row.pages) for row in (short, long)]
    q, k, v = (
        torch.stack([getattr(row, name)[row.done] for row in (short, long)]) for name in "qkv"
    )
    out = attention.attend(0, q, k, v, plan_attention(spans, PAGE, torch.float32))

    torch.testing.assert_close(out[0], short.expected(2))

"""Each token, page, row, block and sample is where the graph looks; padding harms nobody."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from loralane_server.device.seam import Sampling, Span, StepInput
from loralane_server.device.xla.buckets import plan_buckets
from loralane_server.device.xla.layout import BASE, FREE, Layout, layout_of, rows_of_samples

from tests.server.device.xla.steps import Limits, step_of, steps

DUSTBIN = 30_000


def packed(limits: Limits, step: StepInput, *, kernel: bool) -> tuple[Layout, dict[str, Any]]:
    buckets = plan_buckets(
        max_rows=limits.rows,
        step_tokens=limits.step_tokens,
        max_len=limits.length,
        lanes=limits.lanes,
        kernel=kernel,
    )
    layout = layout_of(buckets.choose(step), DUSTBIN, kernel)
    ints = layout.pack(step)
    assert ints.dtype == np.int32
    assert ints.shape == (layout.size,)
    return layout, layout.split(ints)


def tokens_of(step: StepInput) -> list[tuple[int, Span, int]]:
    """Each token's row, span and position, one at a time."""
    return [
        (row, span, span.start + i)
        for row, span in enumerate(step.spans)
        for i in range(span.length)
    ]


@settings(max_examples=60, deadline=None)
@given(steps())
def test_each_token_writes_to_its_own_place_and_padding_to_the_dustbin(
    case: tuple[Limits, StepInput],
) -> None:
    limits, step = case

    _, part = packed(limits, step, kernel=False)

    count = len(step.tokens)
    assert part["tokens"][:count].tolist() == step.tokens.tolist()
    assert part["positions"][:count].tolist() == step.positions.tolist()
    expected = [int(s.pages[at // 16]) * 16 + at % 16 for _, s, at in tokens_of(step)]
    assert part["slots"][:count].tolist() == expected
    assert (part["slots"][count:] // 16 == DUSTBIN).all()
    assert not part["tokens"][count:].any()


@settings(max_examples=60, deadline=None)
@given(steps())
def test_each_row_reads_its_own_pages_and_no_other(case: tuple[Limits, StepInput]) -> None:
    limits, step = case

    _, part = packed(limits, step, kernel=False)

    for row, span in enumerate(step.spans):
        length = span.start + span.length
        used = -(-length // 16)
        assert part["lengths"][row] == length
        assert part["pages"][row, :used].tolist() == span.pages[:used].tolist()
        assert (part["pages"][row, used:] == DUSTBIN).all()
    assert not part["lengths"][len(step.spans) :].any()
    assert (part["pages"][len(step.spans) :] == DUSTBIN).all()


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_token_matches_the_lane_pages_of_its_adapter_and_no_other(
    case: tuple[Limits, StepInput],
) -> None:
    limits, step = case

    layout, part = packed(limits, step, kernel=False)

    assert bool(layout.key.lanes) == any(span.lane_pages for span in step.spans)
    if layout.key.lanes:
        mine = part["adapter_of"][:, None] == part["page_owner"]
        for token, (_, span, _) in enumerate(tokens_of(step)):
            assert np.flatnonzero(mine[token]).tolist() == list(span.lane_pages)
        assert not mine[len(step.tokens) :].any()
        assert BASE != FREE


@settings(max_examples=60, deadline=None)
@given(steps())
def test_each_token_lies_in_one_block_of_its_row(case: tuple[Limits, StepInput]) -> None:
    limits, step = case

    layout, part = packed(limits, step, kernel=False)

    if layout.key.kind == "decode":
        assert "token_at" not in part
        return
    size = layout.key.block_tokens
    for token, (row, _, position) in enumerate(tokens_of(step)):
        block, place = divmod(int(part["token_at"][token]), size)
        assert part["block_row"][block] == row
        assert part["block_first"][block] + place == token
        assert part["block_position"][block] + place == position
        assert place < part["block_count"][block]
    assert part["block_count"].sum() == len(step.tokens)
    assert (part["token_at"] < layout.key.blocks * size).all()


@settings(max_examples=60, deadline=None)
@given(steps())
def test_samples_come_from_the_logits_of_their_row(case: tuple[Limits, StepInput]) -> None:
    limits, step = case

    layout, part = packed(limits, step, kernel=False)

    rows = rows_of_samples(step)
    logits_of = part["last_token"] if layout.key.kind == "mixed" else np.arange(layout.key.rows)
    assert logits_of[rows].tolist() == step.sample_at.tolist()


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_kernel_finds_each_rows_tokens(case: tuple[Limits, StepInput]) -> None:
    limits, step = case

    layout, part = packed(limits, step, kernel=True)

    rows = len(step.spans)
    assert part["row_count"].tolist() == [rows]
    begins = part["row_begins"]
    assert np.diff(begins[: rows + 1]).tolist() == [span.length for span in step.spans]
    assert (begins[rows:] == len(step.tokens)).all()
    assert begins.shape == (layout.key.rows + 1,)
    assert "block_row" not in part


def test_a_step_by_hand() -> None:
    """One decoding row with an adapter on two lane pages, and the second chunk of a base prompt."""
    step = step_of([(17, 1, (5, 9), (1, 3)), (15, 3, (2, 7), ())], sampled=[1])
    limits = Limits(rows=2, length=64, lanes=32, step_tokens=8)

    _, part = packed(limits, step, kernel=False)

    lists = {name: values.tolist() for name, values in part.items()}
    dust = DUSTBIN
    assert lists == {
        "tokens": [100, 101, 102, 103, 0, 0, 0, 0],
        "positions": [17, 15, 16, 17, 0, 0, 0, 0],
        "slots": [9 * 16 + 1, 2 * 16 + 15, 7 * 16, 7 * 16 + 1] + [dust * 16] * 4,
        "pages": [[5, 9, dust, dust], [2, 7, dust, dust]],
        "lengths": [18, 18],
        "adapter_of": [1, BASE, BASE, BASE, BASE, BASE, BASE, BASE],
        "page_owner": [FREE, 1, FREE, 1],
        "last_token": [0, 3],
        "block_row": [0, 1],
        "block_first": [0, 1],
        "block_position": [17, 15],
        "block_count": [1, 3],
        "token_at": [0, 16, 17, 18, 0, 0, 0, 0],
    }
    assert rows_of_samples(step).tolist() == [1]
    assert step.sampling == [Sampling()]

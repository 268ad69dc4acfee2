"""Every step within the limits has a declared shape that holds it, and the shapes are few."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loralane_server.device.seam import StepInput
from loralane_server.device.xla.buckets import Buckets, GraphKey, plan_buckets
from loralane_server.scheduling.planner import plan_step

from tests.server.device.xla.steps import Limits, limits, step_of, steps


def planned(limits: Limits, *, kernel: bool = False) -> Buckets:
    return plan_buckets(
        max_rows=limits.rows,
        step_tokens=limits.step_tokens,
        max_len=limits.length,
        lanes=limits.lanes,
        kernel=kernel,
    )


@settings(max_examples=200, deadline=None)
@given(steps())
def test_what_is_chosen_is_declared_and_holds_the_step(case: tuple[Limits, StepInput]) -> None:
    limits, step = case
    for kernel in (False, True):
        buckets = planned(limits, kernel=kernel)

        key = buckets.choose(step)

        assert key in buckets.declared()
        assert_holds(key, step)


def assert_holds(key: GraphKey, step: StepInput) -> None:
    spans = step.spans
    lengths = [span.length for span in spans]
    assert sum(lengths) <= key.tokens
    assert len(lengths) <= key.rows
    assert max(span.start + span.length for span in spans) <= key.pages * 16
    assert all(page < key.lanes // 8 for span in spans for page in span.lane_pages)
    if key.kind == "decode":
        assert set(lengths) == {1}
        assert key.tokens == key.rows
    elif key.blocks:
        assert sum(-(-n // key.block_tokens) for n in lengths) <= key.blocks


@settings(max_examples=100, deadline=None)
@given(limits())
def test_each_key_is_declared_once_and_windows_begin_with_none(limits: Limits) -> None:
    for kernel in (False, True):
        buckets = planned(limits, kernel=kernel)

        declared = buckets.declared()

        assert len(set(declared)) == len(declared)
        assert buckets.lanes[0] == 0
        assert buckets.lanes[-1] == limits.lanes // 8 * 8
        assert max(buckets.rows) == limits.rows


@settings(max_examples=200, deadline=None)
@given(limits(), st.data())
def test_the_planner_never_asks_for_more_tokens_than_the_largest_shape(
    limits: Limits, data: st.DataObject
) -> None:
    largest = max((shape.tokens for shape in planned(limits).mixed), default=limits.rows)
    rows = data.draw(st.integers(1, limits.rows))
    row = st.tuples(st.sampled_from((1, 2, 30, limits.length)), st.integers(0, limits.length))
    pending, depths = zip(*data.draw(st.lists(row, min_size=rows, max_size=rows)), strict=True)
    doubling = data.draw(st.none() | st.integers(1, 4000))

    counts = plan_step(pending, limits.step_tokens, depths, doubling)

    assert sum(counts) <= largest


def test_a_step_of_base_rows_reads_no_lanes() -> None:
    buckets = planned(Limits(rows=8, length=512, lanes=512, step_tokens=512))

    base = buckets.choose(step_of([(3, 1, (0,), ()), (9, 1, (1,), ())]))
    one = buckets.choose(step_of([(3, 1, (0,), (15,)), (9, 1, (1,), ())]))
    high = buckets.choose(step_of([(3, 1, (0,), (16,)), (9, 1, (1,), ())]))

    assert (base.lanes, one.lanes, high.lanes) == (0, 128, 512)


def test_many_short_prompts_take_narrow_blocks_and_a_long_one_wide_ones() -> None:
    buckets = planned(Limits(rows=32, length=512, lanes=512, step_tokens=512))

    long = buckets.choose(step_of([(0, 512, range(32), ())]))
    short = buckets.choose(step_of([(0, 16, (i,), ()) for i in range(32)]))

    assert (long.block_tokens, short.block_tokens) == (64, 16)
    assert long.blocks < short.blocks


@pytest.mark.parametrize(("length", "graphs"), [(256, 27), (512, 27), (2048, 54), (8192, 81)])
def test_shapes_are_few(length: int, graphs: int) -> None:
    buckets = planned(Limits(rows=32, length=length, lanes=512, step_tokens=512))

    assert len(buckets.declared()) == graphs


def test_a_kernel_makes_graphs_fewer() -> None:
    limits = Limits(rows=32, length=8192, lanes=512, step_tokens=512)

    declared = planned(limits, kernel=True).declared()

    assert len(declared) == 18
    assert {key.pages for key in declared} == {512}


def test_a_shard_that_computes_single_tokens_only_needs_no_mixed_shape() -> None:
    buckets = planned(Limits(rows=4, length=64, lanes=0, step_tokens=1))

    assert {key.kind for key in buckets.declared()} == {"decode"}
    assert buckets.choose(step_of([(np.int32(5), 1, (0,), ())])).rows == 1


def test_a_short_prompt_beside_many_decoding_rows_is_not_padded_to_the_largest_shape() -> None:
    buckets = planned(Limits(rows=32, length=512, lanes=512, step_tokens=512))

    key = buckets.choose(step_of([*((9, 1, (i,), ()) for i in range(31)), (0, 60, range(4), ())]))

    assert key.tokens == 128

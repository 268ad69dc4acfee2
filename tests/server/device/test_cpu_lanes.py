"""The pool on a CPU: each row gets its own adapter's delta, and idle lanes cost nothing."""

from collections.abc import Mapping

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.cpu_gains import GainBlock, plan_token_gains
from loralane_server.device.cpu_lanes import CpuLanes, plan_lanes
from loralane_server.device.seam import GROUPS, Span, TargetTensors

HIDDEN, WIDE = 16, 24
SHAPES = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (8, HIDDEN),
    "v_proj": (8, HIDDEN),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (WIDE, HIDDEN),
    "up_proj": (WIDE, HIDDEN),
    "down_proj": (HIDDEN, WIDE),
}
NO_KV = np.empty(0, dtype=np.int32)
Targets = Mapping[str, TargetTensors]


def adapter(rank: int, modules: list[str], seed: int) -> Targets:
    generator = torch.Generator().manual_seed(seed)
    return {
        m: TargetTensors(
            torch.randn(rank, SHAPES[m][1], generator=generator),
            torch.randn(rank, SHAPES[m][0], generator=generator),
        )
        for m in modules
    }


def add(lanes: CpuLanes, y: torch.Tensor, x: torch.Tensor, group: str, spans: list[Span]) -> None:
    lanes.add(y, x, 0, group, plan_lanes(spans), lambda pages: plan_token_gains(spans, pages))


def expected(x: torch.Tensor, group: str, targets: Targets | None) -> torch.Tensor:
    """One row's delta for a group, straight from the definition: x A^T B."""
    parts = []
    for module in GROUPS[group]:
        if targets is None or module not in targets:
            parts.append(torch.zeros(SHAPES[module][0]))
        else:
            parts.append(x @ targets[module].a.T @ targets[module].b)
    return torch.cat(parts)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mix_of_rows_gets_its_own_deltas(data: st.DataObject) -> None:
    lanes = CpuLanes(1, SHAPES, 12 * LANE_PAGE, torch.float32)
    pages = data.draw(st.permutations(range(12)))
    ranks = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    modules = st.lists(st.sampled_from(sorted(SHAPES)), min_size=1, unique=True)
    adapters: list[tuple[tuple[int, ...], Targets]] = []
    for seed, rank in enumerate(ranks):
        count = -(-rank // LANE_PAGE)
        own, pages = tuple(sorted(pages[:count])), pages[count:]
        lanes.write(0, own, adapter(24, sorted(SHAPES), seed=99) if count == 3 else {})
        targets = adapter(rank, data.draw(modules), seed)
        lanes.write(0, own, targets)
        adapters.append((own, targets))
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(-1, len(ranks) - 1), st.sampled_from([1, 1, 1, 2, 5])),
            min_size=1,
            max_size=10,
        )
    )
    rows.sort(key=lambda row: (row[1] > 1, row[0] == -1))
    spans = [Span(0, n, NO_KV, adapters[who][0] if who >= 0 else ()) for who, n in rows]

    for group, names in GROUPS.items():
        x = torch.randn(sum(n for _, n in rows), SHAPES[names[0]][1])
        before = torch.randn(x.shape[0], sum(SHAPES[m][0] for m in names))
        y = before.clone()
        add(lanes, y, x, group, spans)

        at = 0
        for who, n in rows:
            for _ in range(n):
                targets_of_row = adapters[who][1] if who >= 0 else None
                want = before[at] + expected(x[at], group, targets_of_row)
                torch.testing.assert_close(y[at], want, atol=1e-4, rtol=1e-4)
                if who < 0:
                    assert torch.equal(y[at], before[at])
                at += 1


def test_a_new_tenant_leaves_nothing_of_the_old_one() -> None:
    lanes = CpuLanes(1, SHAPES, 4 * LANE_PAGE, torch.float32)
    lanes.write(0, (1, 3), adapter(16, sorted(SHAPES), seed=0))
    lanes.write(0, (1, 3), adapter(2, ["q_proj"], seed=1))
    x, y = torch.randn(1, HIDDEN), torch.zeros(1, HIDDEN)

    add(lanes, y, x, "o", [Span(0, 1, NO_KV, (1, 3))])

    assert torch.equal(y, torch.zeros(1, HIDDEN))


def test_a_base_batch_multiplies_no_lane() -> None:
    assert plan_lanes([Span(3, 1, NO_KV), Span(0, 9, NO_KV)]) == ()


def test_only_lanes_of_adapters_present_are_read() -> None:
    far_apart = [Span(0, 1, NO_KV, (0,)), Span(0, 1, NO_KV, (40,))]

    (block,) = plan_lanes(far_apart)

    assert isinstance(block.lanes, torch.Tensor)
    assert block.lanes.numel() == 2 * LANE_PAGE


def test_plain_adapters_ask_for_no_plan_of_gains() -> None:
    lanes = CpuLanes(1, SHAPES, 4 * LANE_PAGE, torch.float32)
    lanes.write(0, (0,), adapter(8, sorted(SHAPES), seed=0))
    spans = [Span(0, 1, NO_KV, (0,))]

    def no_plan(pages: frozenset[int]) -> tuple[GainBlock, ...]:
        raise AssertionError("nobody has gain or shift")

    for group, modules in GROUPS.items():
        y = torch.zeros(1, sum(SHAPES[m][0] for m in modules))
        lanes.add(y, torch.randn(1, SHAPES[modules[0]][1]), 0, group, plan_lanes(spans), no_plan)

        assert y.abs().sum() > 0

"""All that an adapter may do on a CPU equals its definition, row by row, in any mix of rows."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loralane_server.adapters.pool import LANE_PAGE, lanes_for
from loralane_server.device.cpu import CpuBatch, CpuDevice
from loralane_server.device.seam import (
    ENDS,
    GROUPS,
    Sampling,
    Span,
    StepInput,
    TableRows,
    TargetTensors,
)
from loralane_server.model.rope import Rope
from loralane_server.model.spec import ModelSpec
from torch import Tensor

from tests.server import handmade
from tests.server.handmade import TABLES, Adapter, shapes_of, table

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    layers=2,
    hidden=16,
    intermediate=24,
    heads=4,
    kv_heads=2,
    head_dim=4,
    vocab=40,
    max_positions=64,
    norm_eps=1e-6,
    rope=Rope(1e4),
    tied_head=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    fused=False,
    eos_token_ids=(),
    stored_dtype="float32",
)
SHAPES = shapes_of(SPEC)
LANE_PAGES = 12
NO_KV = np.zeros(1, dtype=np.int32)
#: Relative to outputs of about 1: what one rounding to the dtype, and one of the reference, cost.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def target(
    module: str, rank: int, seed: int, *, gain: bool = False, shift: bool = False
) -> TargetTensors:
    return handmade.target(SHAPES[module], rank, seed, gain=0.01 * gain, shift=1.0 * shift)


def everything(pages: tuple[int, ...], seed: int) -> Adapter:
    """An adapter that changes all that can be changed."""
    targets = {m: target(m, LANE_PAGE * len(pages), seed, gain=True, shift=True) for m in SHAPES}
    return Adapter(pages, targets, {m: table(SPEC, None, seed) for m in TABLES})


def linear(y: Tensor, x: Tensor, change: TargetTensors | None) -> Tensor:
    """One row of one linear, straight from the definition: (1 + gain) y + B^T A x + shift."""
    if change is None:
        return y
    delta = change.b.float().T @ (change.a.float() @ x)
    gain = 0 if change.gain is None else change.gain
    shift = 0 if change.shift is None else change.shift
    return (1 + gain) * y + delta + shift


def embedding(x: Tensor, token: int, adapter: Adapter) -> Tensor:
    """One token's embedding under an adapter."""
    rows = adapter.tables.get("embed_tokens")
    if rows is not None and (rows.ids is None or token in rows.ids.tolist()):
        at = token if rows.ids is None else rows.ids.tolist().index(token)
        return rows.rows[at].float()
    one_hot = torch.zeros(SPEC.vocab)
    one_hot[token] = 1
    return linear(x, one_hot, adapter.targets.get("embed_tokens"))


def logits(y: Tensor, x: Tensor, adapter: Adapter) -> Tensor:
    """One sample's logits under an adapter."""
    y = linear(y, x, adapter.targets.get("lm_head"))
    rows = adapter.tables.get("lm_head")
    if rows is None:
        return y
    y = y.clone()
    y[slice(None) if rows.ids is None else rows.ids] = rows.rows.float() @ x
    return y


def make_device(dtype: torch.dtype = torch.float32) -> CpuDevice:
    return CpuDevice(SPEC, dtype=dtype, pages=4, page_tokens=8, lanes=LANE_PAGES * LANE_PAGE)


def make_step(rows: list[tuple[Adapter | None, int]], sampled: list[int]) -> StepInput:
    """A step of rows (adapter, tokens), of which some tokens are sampled."""
    spans = [Span(0, n, NO_KV, () if who is None else who.pages) for who, n in rows]
    tokens = np.random.default_rng(0).integers(0, SPEC.vocab, sum(n for _, n in rows))
    return StepInput(
        tokens=tokens.astype(np.int32),
        positions=np.zeros(len(tokens), dtype=np.int32),
        spans=spans,
        sample_at=np.array(sampled, dtype=np.int32),
        sampling=[Sampling()] * len(sampled),
    )


class Outcome:
    """What a device makes of one step: before and after, for each thing that adapters change."""

    def __init__(self, device: CpuDevice, step: StepInput, dtype: torch.dtype) -> None:
        self.batch: CpuBatch = device.batch(step)
        tokens = len(step.tokens)
        torch.manual_seed(0)
        self.x: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}
        for group, modules in GROUPS.items():
            self.x[group] = torch.randn(tokens, SHAPES[modules[0]][1]).to(dtype)
            y = self._begin(group, tokens, sum(SHAPES[m][0] for m in modules), dtype)
            device.add_lora(y, self.x[group], 1, group, self.batch)
        device.adapt_embedding(self._begin("embed_tokens", tokens, SPEC.hidden, dtype), self.batch)
        self.x["lm_head"] = torch.randn(len(step.sample_at), SPEC.hidden).to(dtype)
        scores = self._begin("lm_head", len(step.sample_at), SPEC.vocab, dtype)
        device.adapt_logits(scores, self.x["lm_head"], self.batch)

    def _begin(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        self.after[name] = torch.randn(rows, width).to(dtype)
        self.before[name] = self.after[name].clone()
        return self.after[name]


def check(outcome: Outcome, step: StepInput, owners: list[Adapter | None], limit: float) -> None:
    """Compare an outcome with the definition; owners: each token's adapter."""

    def equal(name: str, row: int, want: Tensor) -> None:
        got = outcome.after[name][row].float()
        torch.testing.assert_close(got, want, atol=limit, rtol=limit)

    for token, adapter in enumerate(owners):
        if adapter is None:
            for name in (*GROUPS, "embed_tokens"):
                assert torch.equal(outcome.after[name][token], outcome.before[name][token])
            continue
        for group, modules in GROUPS.items():
            parts = outcome.before[group][token].float().split([SHAPES[m][0] for m in modules])
            x = outcome.x[group][token].float()
            pairs = zip(parts, modules, strict=True)
            equal(group, token, torch.cat([linear(y, x, adapter.targets.get(m)) for y, m in pairs]))
        before = outcome.before["embed_tokens"][token].float()
        equal("embed_tokens", token, embedding(before, int(step.tokens[token]), adapter))
    for sample, token in enumerate(step.sample_at.tolist()):
        before = outcome.before["lm_head"][sample]
        if (owner := owners[token]) is None:
            assert torch.equal(outcome.after["lm_head"][sample], before)
        else:
            x = outcome.x["lm_head"][sample].float()
            equal("lm_head", sample, logits(before.float(), x, owner))


@st.composite
def adapters(draw: st.DrawFn) -> list[Adapter]:
    """Some adapters on pages of their own, each changing what it likes."""
    free = list(draw(st.permutations(range(LANE_PAGES))))
    found: list[Adapter] = []
    for seed in range(draw(st.integers(1, 4))):
        rank = draw(st.integers(1, 20))
        count = lanes_for(rank) // LANE_PAGE
        own, free = tuple(sorted(free[:count])), free[count:]
        modules = draw(st.lists(st.sampled_from(sorted(SHAPES)), unique=True, max_size=9))
        kinds = st.tuples(st.booleans(), st.booleans())
        targets = {}
        for module in modules:
            gain, shift = draw(kinds)
            targets[module] = target(module, rank, seed, gain=gain, shift=shift)
        ids = st.none() | st.lists(
            st.integers(0, SPEC.vocab - 1), unique=True, min_size=1, max_size=30
        )
        replaced = draw(st.lists(st.sampled_from(TABLES), unique=True))
        tables = {name: table(SPEC, draw(ids), seed) for name in replaced}
        found.append(Adapter(own, targets, tables))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mix_of_rows_gets_what_its_own_adapters_do(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    device = make_device(dtype)
    present = [adapter.cast(dtype) for adapter in data.draw(adapters())]
    for number, adapter in enumerate(present):
        if data.draw(st.booleans()):  # its pages belonged to others, who changed everything
            everything(adapter.pages[-1:], 90 + number).cast(dtype).write(device, SPEC.layers)
            everything(adapter.pages, 95 + number).cast(dtype).write(device, SPEC.layers)
        adapter.write(device, SPEC.layers)
    length = st.sampled_from([1, 1, 1, 2, 5])
    rows: list[tuple[Adapter | None, int]] = data.draw(
        st.lists(st.tuples(st.sampled_from([None, *present]), length), min_size=1, max_size=10)
    )
    rows.sort(key=lambda row: (row[1] > 1, row[0] is None))
    owners = [who for who, n in rows for _ in range(n)]
    at = st.lists(st.integers(0, len(owners) - 1), unique=True).map(sorted)
    step = make_step(rows, data.draw(at))

    outcome = Outcome(device, step, dtype)

    check(outcome, step, owners, TOLERANCE[dtype])


def test_rows_of_one_adapter_far_apart_and_scattered_pages_are_found() -> None:
    device = make_device()
    scattered, plain = everything((1, 9), 0), Adapter((4,), {"q_proj": target("q_proj", 3, 1)})
    scattered.tables = {}
    for adapter in (scattered, plain):
        adapter.write(device, SPEC.layers)
    rows = [(scattered, 1), (plain, 1), (scattered, 1), (None, 1), (plain, 3), (scattered, 4)]
    step = make_step(rows, [0, 1, 2, 3, 6, 10])

    outcome = Outcome(device, step, torch.float32)

    check(outcome, step, [who for who, n in rows for _ in range(n)], 1e-4)


def test_what_later_layers_do_is_found_though_they_came_after_the_step_began() -> None:
    """A step may begin while its adapter's later layers are still being read."""
    device = make_device()
    shifted = target("o_proj", 2, seed=0, shift=True)
    device.write_lanes(ENDS, (0,), {}, {})
    device.write_lanes(0, (0,), {}, {})
    batch = device.batch(make_step([(Adapter((0,)), 2)], []))
    x, y = torch.randn(2, SPEC.hidden), torch.zeros(2, SPEC.hidden)

    device.add_lora(y, x, 0, "o", batch)
    assert torch.equal(y, torch.zeros(2, SPEC.hidden))
    device.write_lanes(1, (0,), {"o_proj": shifted}, {})
    device.add_lora(y, x, 1, "o", batch)

    for token in range(2):
        want = linear(torch.zeros(SPEC.hidden), x[token], shifted)
        torch.testing.assert_close(y[token], want, atol=1e-5, rtol=1e-5)


def test_a_small_gain_is_not_lost_in_bfloat16() -> None:
    device = make_device(torch.bfloat16)
    change = target("o_proj", 1, seed=0, gain=True)
    change = TargetTensors(change.a.bfloat16(), change.b.bfloat16() * 0, change.gain)
    adapter = Adapter((0,), {"o_proj": change})
    adapter.write(device, SPEC.layers)
    step = make_step([(adapter, 1), (adapter, 6)], [])

    outcome = Outcome(device, step, torch.bfloat16)

    assert change.gain is not None
    want = (outcome.before["o"].float() * (1 + change.gain)).bfloat16()
    assert torch.equal(outcome.after["o"], want)


def test_tables_are_let_go_when_their_adapter_leaves_or_its_pages_are_written() -> None:
    device = make_device()
    tables: list[TableRows] = []
    for page in (0, 1):
        tables.append(table(SPEC, None, page))
        device.write_lanes(ENDS, (page,), {}, {"lm_head": tables[-1]})
    alive = [weakref.ref(rows.rows) for rows in tables]
    tables.clear()
    gc.collect()
    assert all(ref() is not None for ref in alive)

    device.forget((0,))
    device.write_lanes(ENDS, (1,), {}, {})

    gc.collect()
    assert all(ref() is None for ref in alive)

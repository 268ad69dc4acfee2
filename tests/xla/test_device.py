"""The whole decoder in graphs: the logits of the CPU device for any step, rows and adapters."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch_xla
from loralane_server.adapters.pool import LANE_PAGE, AdapterPool
from loralane_server.assembly import DEMO
from loralane_server.device.cpu import CpuDevice
from loralane_server.device.seam import ENDS, Int32, StepInput, TableRows, TargetTensors
from loralane_server.device.xla.batch import XlaBatch
from loralane_server.device.xla.buckets import GraphKey, plan_buckets
from loralane_server.device.xla.device import XlaDevice
from loralane_server.device.xla.graphs import Graph, Graphs
from loralane_server.device.xla.layout import rows_of_samples
from loralane_server.errors import AdapterIncompatible, DeviceFailed
from loralane_server.kv.pages import PAGE_TOKENS
from loralane_server.model.decoder import Decoder
from loralane_server.model.spec import read_model_spec
from loralane_server.model.weights import load_decoder
from torch import Tensor

from tests.server.device.xla.steps import step_of

SPEC = read_model_spec(DEMO / "model")
PAGES, LANES, MAX_LEN = 24, 64, 128
BUCKETS = plan_buckets(max_rows=4, step_tokens=40, max_len=MAX_LEN, lanes=LANES)
#: By name; "" = base.
RANKS = {"four": 4, "eight": 8, "twenty": 20}


@dataclass
class Row:
    """A sequence with random tokens and its own pages."""

    tokens: Int32
    pages: Int32
    lane_pages: tuple[int, ...] = ()
    done: int = field(default=0)


def step_of_rows(parts: Sequence[tuple[Row, int]], vocab: int) -> StepInput:
    """The rows' next tokens, in the order in which steps take them; all rows are sampled."""
    parts = sorted(parts, key=lambda part: (part[1] > 1, not part[0].lane_pages))
    step = step_of([(row.done, n, row.pages, row.lane_pages) for row, n in parts])
    step.tokens[:] = np.concatenate([row.tokens[row.done : row.done + n] for row, n in parts])
    for row, n in parts:
        row.done += n
    return step


class Both:
    """One model on the CPU device and, in graphs, on XLA; adapters in both pools."""

    def __init__(self) -> None:
        self.cpu = CpuDevice(
            SPEC, dtype=torch.float32, pages=PAGES, page_tokens=PAGE_TOKENS, lanes=LANES
        )
        self.xla = XlaDevice(SPEC, BUCKETS, dtype=torch.float32, pages=PAGES, tpu=False)
        model = DEMO / "model"
        self.expected = load_decoder(model, SPEC, self.cpu, torch.float32, MAX_LEN)
        self.decoder: Decoder[XlaBatch] = load_decoder(
            model, SPEC, self.xla, torch.float32, MAX_LEN
        )
        self.graphs = Graphs()
        self.compiled: dict[GraphKey, Graph] = {}
        self.xla.compile_lanes(self.graphs)
        self.pool = AdapterPool(LANES)
        self.lane_pages = {"": ()} | {name: self.load(name, r) for name, r in RANKS.items()}

    def load(self, name: str, rank: int) -> tuple[int, ...]:
        """Write a random adapter of a rank to both pools; it lacks some targets."""
        generator = torch.Generator().manual_seed(rank)
        self.pool.reserve(name, rank)
        tenant = self.pool.get(name)
        assert tenant is not None
        for layer in range(SPEC.layers):
            targets = {
                module: TargetTensors(
                    torch.randn(rank, in_, generator=generator) * 0.1,
                    torch.randn(rank, out, generator=generator) * 0.1,
                )
                for place, (module, (out, in_)) in enumerate(SPEC.linears().items())
                if (place + rank) % 3
            }
            self.cpu.write_lanes(layer, tenant.pages, targets, {})
            self.xla.write_lanes(layer, tenant.pages, targets, {})
        return tenant.pages

    def logits(self, step: StepInput) -> Tensor:
        """Run a step in the graph of its shape: [samples, vocab]."""
        key = self.xla.buckets.choose(step)
        ints = torch.from_numpy(self.xla.layout(key).pack(step))
        inputs = [self.xla.put(ints)]

        def forward(ints: Tensor) -> list[Tensor]:
            return [self.decoder.logits(self.xla.batch_of(key, ints))]

        if key not in self.compiled:
            self.compiled[key] = self.graphs.compile(
                key.name,
                forward,
                inputs,
                updated=self.xla.kv_cells(),
                read=self.xla.lane_cells(key),
            )
        logits = self.compiled[key].run(inputs)[0].cpu()
        return logits[torch.from_numpy(rows_of_samples(step)).long()]

    def check(self, *parts: tuple[Row, int]) -> None:
        """Run one step on both and compare all logits."""
        step = step_of_rows(parts, SPEC.vocab)
        batch = self.cpu.batch(step)
        expected = self.expected.logits(batch)

        logits = self.logits(step)

        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.fixture(scope="module")
def both() -> Both:
    with torch.no_grad():
        return Both()


def rows_of(both: Both, seed: int) -> dict[str, Row]:
    """A row for the base and for each adapter, with pages of their own."""
    random = np.random.default_rng(seed)
    pages = random.permutation(PAGES).astype(np.int32).reshape(4, -1)
    return {
        name: Row(
            random.integers(0, SPEC.vocab, MAX_LEN).astype(np.int32),
            pages[i],
            both.lane_pages[name],
        )
        for i, name in enumerate(("", *RANKS))
    }


def test_prompts_chunks_and_decoding_of_several_adapters(both: Both) -> None:
    rows = rows_of(both, seed=1)
    base, four, eight, twenty = rows.values()

    both.check((four, 20))
    both.check((four, 1), (base, 30))
    both.check((four, 1), (base, 1), (twenty, 17), (eight, 21))
    for _ in range(4):
        both.check(*((row, 1) for row in rows.values()))
    both.check((twenty, 35), (base, 1))
    both.check((twenty, 1))


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(both: Both, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = list(rows_of(both, seed).values())

    for _ in range(12):
        chosen = [row for row in rows if random.random() < 0.7] or rows[:1]
        most = 40 // len(chosen)
        long = random.random() < 0.4
        counts = [int(random.integers(1, most + 1)) if long else 1 for _ in chosen]
        parts = [(row, n) for row, n in zip(chosen, counts, strict=True) if row.done + n <= 6 * 16]
        if parts:
            both.check(*parts)


def test_base_rows_have_the_same_bits_beside_adapters_and_alone(both: Both) -> None:
    """A graph that reads lanes leaves base rows as one that reads none."""
    rows = rows_of(both, seed=9)
    base, adapted = rows[""], rows["twenty"]
    twin = Row(base.tokens, rows["four"].pages)
    both.check((base, 30), (adapted, 10))
    both.check((twin, 30), (Row(base.tokens, rows["eight"].pages), 10))

    beside = both.logits(step_of_rows([(base, 1), (adapted, 1)], SPEC.vocab))
    alone = both.logits(
        step_of_rows([(twin, 1), (Row(base.tokens, rows["eight"].pages), 1)], SPEC.vocab)
    )

    assert torch.equal(beside[1], alone[0])


def test_what_is_not_in_lanes_is_refused_and_writes_nothing(both: Both) -> None:
    weight = TargetTensors(torch.ones(1, 256), torch.ones(1, 256), gain=torch.ones(256))
    table = TableRows(None, torch.ones(SPEC.vocab, SPEC.hidden))
    before = [cell.tensor.cpu() for cell in both.xla.lane_cells(both_key())]

    for layer, targets, tables in (
        (0, {"o_proj": weight}, {}),
        (ENDS, {"lm_head": TargetTensors(torch.ones(1, 256), torch.ones(1, SPEC.vocab))}, {}),
        (ENDS, {}, {"embed_tokens": table}),
    ):
        with pytest.raises(AdapterIncompatible, match="--device cpu"):
            both.xla.write_lanes(layer, (0,), targets, tables)
    both.xla.write_lanes(ENDS, (0,), {}, {})

    after = [cell.tensor.cpu() for cell in both.xla.lane_cells(both_key())]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_write_that_fails_leaves_a_device_that_is_not_to_be_trusted(both: Both) -> None:
    misshapen = TargetTensors(torch.ones(1, 7), torch.ones(1, 256))

    with pytest.raises(DeviceFailed, match="lanes"):
        both.xla.write_lanes(0, (LANES // LANE_PAGE - 1,), {"q_proj": misshapen}, {})


def both_key() -> GraphKey:
    return BUCKETS.choose(step_of([(0, 1, (0,), (LANES // LANE_PAGE - 1,))]))


def test_steps_update_pages_in_place(both: Both) -> None:
    pointer = torch_xla._XLAC._unsafe_buffer_pointer
    row = rows_of(both, seed=3)["eight"]
    both.check((row, 20))
    before = [pointer(cell.tensor) for cell in both.xla.kv_cells()]

    both.check((row, 1))
    both.check((row, 9))

    assert [pointer(cell.tensor) for cell in both.xla.kv_cells()] == before


def test_a_shared_head_on_a_tpu_is_not_copied() -> None:
    embedding = torch.randn(5, 3)
    device = XlaDevice(SPEC, BUCKETS, dtype=torch.float32, pages=1, tpu=True)
    placed = device.put(embedding)
    x = torch.randn(2, 3)

    head = device.pack(placed, None, shared=True)

    torch.testing.assert_close(head(device.put(x)).cpu(), x @ embedding.T)


def test_a_step_can_be_brought_to_the_device_without_a_graph(both: Both) -> None:
    step = step_of([(3, 1, (2,), ()), (0, 4, (1,), ())])

    batch = both.xla.batch(step)

    assert batch.key == BUCKETS.choose(step)
    assert batch.tokens.cpu()[:5].tolist() == step.tokens.tolist()
    assert batch.positions.cpu()[:5].tolist() == [3, 0, 1, 2, 3]
    assert batch.lanes == ()

"""Lane writes: the right lanes, in place, without compiling."""

from collections.abc import Mapping

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from loralane_server.device.seam import GROUPS, TargetTensors
from loralane_server.device.xla.graphs import Cell, Graphs
from loralane_server.device.xla.host_writer import HostWriter
from loralane_server.device.xla.lanes import XlaLanes
from loralane_server.device.xla.mesh import Mesh
from loralane_server.device.xla.writers import GraphWriter, LaneWriter
from torch import Tensor

from tests.xla.compilations import Compilations
from tests.xla.shapes import SHAPES

LAYERS = 3


class Pool:
    """Lanes, a writer, and the same memory on the host."""

    def __init__(self, *, graphs: bool, together: bool = False) -> None:
        device = torch_xla.device()
        self.lanes = XlaLanes(LAYERS, SHAPES, (16, 80), torch.float32, device, Mesh(), together)
        self.writer: LaneWriter = (
            GraphWriter(self.lanes, torch.float32, device) if graphs else HostWriter(self.lanes)
        )
        self.writer.compile(Graphs())
        self.a = [{m: torch.zeros(80, i) for m, (_, i) in SHAPES.items()} for _ in range(LAYERS)]
        self.b = [{m: torch.zeros(80, o) for m, (o, _) in SHAPES.items()} for _ in range(LAYERS)]

    def write(
        self, layer: int, pages: tuple[int, ...], targets: Mapping[str, TargetTensors]
    ) -> None:
        """Write to both."""
        self.writer.write(layer, pages, targets)
        lanes = [page * 8 + lane for page in pages for lane in range(8)]
        for module in SHAPES:
            self.a[layer][module][lanes] = 0
            self.b[layer][module][lanes] = 0
            if module in targets:
                rank = targets[module].a.shape[0]
                self.a[layer][module][lanes[:rank]] = targets[module].a.float()
                self.b[layer][module][lanes[:rank]] = targets[module].b.float()

    def check(self) -> None:
        """Assert that both hold the same."""
        for layer in range(LAYERS):
            for group, modules in GROUPS.items():
                parts = [s.layers[layer].a[group].tensor.cpu() for s in self.lanes.segments]
                of_linears = [part.view(part.shape[0], len(modules), -1) for part in parts]
                for place, module in enumerate(modules):
                    found = torch.cat([part[:, place] for part in of_linears], dim=1)
                    assert torch.equal(found.T, self.a[layer][module])
            for module in SHAPES:
                parts = [s.layers[layer].b[module].tensor.cpu() for s in self.lanes.segments]
                assert torch.equal(torch.cat(parts), self.b[layer][module])

    @property
    def cells(self) -> list[Cell]:
        return self.lanes.cells(80)

    def pointers(self) -> list[int]:
        xm.wait_device_ops()
        return [torch_xla._XLAC._unsafe_buffer_pointer(cell.tensor) for cell in self.cells]


def adapter(
    rank: int,
    seed: int,
    modules: tuple[str, ...] = tuple(SHAPES),
    dtype: torch.dtype = torch.float32,
) -> dict[str, TargetTensors]:
    generator = torch.Generator().manual_seed(seed)
    return {
        module: TargetTensors(
            torch.randn(rank, SHAPES[module][1], generator=generator).to(dtype),
            torch.randn(rank, SHAPES[module][0], generator=generator).to(dtype),
        )
        for module in modules
    }


@pytest.fixture(
    params=[(True, False), (True, True), (False, False)],
    ids=["graphs", "graphs-layers together", "host"],
)
def pool(request: pytest.FixtureRequest) -> Pool:
    graphs, together = request.param
    return Pool(graphs=graphs, together=together)


def test_lanes_arrive_in_the_pages_of_their_layer_and_nowhere_else(pool: Pool) -> None:
    pool.write(0, (0,), adapter(8, 1))
    pool.write(2, (1, 2), adapter(16, 2))
    pool.write(1, (9,), adapter(8, 3))

    pool.check()


def test_lanes_that_an_adapter_does_not_fill_become_zero(pool: Pool) -> None:
    pool.write(1, (3, 7, 4), adapter(24, 1))

    pool.write(1, (7, 3), adapter(11, 2, ("q_proj", "down_proj")))
    pool.write(1, (4,), {})
    pool.write(2, (9, 1, 0, 2), adapter(32, 3))

    pool.check()


def test_what_has_another_dtype_is_cast(pool: Pool) -> None:
    pool.write(0, (5,), adapter(3, 1, dtype=torch.bfloat16))

    pool.check()


def test_a_by_columns_is_the_same(pool: Pool) -> None:
    targets = adapter(11, 1)
    turned = {m: TargetTensors(t.a.T.contiguous().T, t.b) for m, t in targets.items()}

    pool.write(0, (4, 5), turned)
    pool.write(1, (6, 1), turned)

    pool.check()


def test_a_graph_that_runs_reads_what_was_there_when_it_began(pool: Pool) -> None:
    pool.write(0, (0,), adapter(8, 1))
    part = pool.lanes.segments[0].layers[0].b["q_proj"]
    factor = (torch.eye(512) * 0.5).to(torch_xla.device())

    def slow(factor: Tensor) -> list[Tensor]:
        for _ in range(40):  # some tens of milliseconds before the lanes are read
            factor = factor @ factor + factor * 0.5
        return [part.tensor + factor[0, 0]]

    graph = Graphs().compile("slow", slow, [factor], read=[part.cell])
    before = graph.run([factor])[0].cpu()

    running = graph.run([factor])[0]
    pool.write(0, (0,), adapter(8, 2))

    assert torch.equal(running.cpu(), before)
    assert not torch.equal(graph.run([factor])[0].cpu(), before)
    pool.check()


def test_the_pool_stays_where_it_is(pool: Pool) -> None:
    before = pool.pointers()

    for turn in range(10):
        pool.write(turn % LAYERS, (turn,), adapter(1 + turn % 8, turn))

    assert pool.pointers() == before


def test_no_rank_and_no_targets_compile_anything(pool: Pool) -> None:
    pool.write(0, (0,), adapter(8, 0))
    before = Compilations.so_far()

    for rank in range(1, 65):
        pages = tuple(range(-(-rank // 8)))
        pool.write(rank % LAYERS, pages, adapter(rank, rank, tuple(SHAPES)[rank % 8 :]))

    assert Compilations.so_far() == before
    pool.check()

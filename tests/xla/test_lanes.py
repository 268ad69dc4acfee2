"""LoRA in a graph: every token gets its own adapter's delta, and a base token nothing."""

import pytest
import torch
import torch_xla
from loralane_server.adapters.lanes import lora_delta
from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.seam import GROUPS
from loralane_server.device.xla.graphs import Graph, Graphs
from loralane_server.device.xla.lanes import Part, XlaLanes
from loralane_server.device.xla.layout import BASE, FREE
from loralane_server.device.xla.mesh import Mesh
from torch import Tensor

from tests.xla.shapes import SHAPES

LAYERS, LANES, WINDOWS = 2, 64, (16, 64)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Pool:
    """Random lanes on the device and on the host, and a graph for each group and window."""

    def __init__(self, seed: int = 0, *, together: bool = False) -> None:
        self.graphs = Graphs()
        self.lanes = XlaLanes(
            LAYERS, SHAPES, WINDOWS, torch.float32, torch_xla.device(), Mesh(), together
        )
        generator = torch.Generator().manual_seed(seed)
        self.a = {m: torch.randn(LANES, i, generator=generator) for m, (_, i) in SHAPES.items()}
        self.b = {m: torch.randn(LANES, o, generator=generator) for m, (o, _) in SHAPES.items()}

    def upload(self, layer: int) -> None:
        for segment in self.lanes.segments:
            own = slice(segment.begin * LANE_PAGE, segment.end * LANE_PAGE)
            cells = segment.layers[layer]
            for group, modules in GROUPS.items():
                put(cells.a[group], torch.cat([self.a[module][own] for module in modules]).T)
            for module in SHAPES:
                put(cells.b[module], self.b[module][own])

    def graph(self, tokens: int, layer: int, group: str, window: int) -> Graph:
        out, in_ = outs(group), SHAPES[GROUPS[group][0]][1]

        def add(adapter_of: Tensor, page_owner: Tensor, y: Tensor, x: Tensor) -> list[Tensor]:
            masks = self.lanes.masks(adapter_of, page_owner)
            y = y.clone()
            self.lanes.add(y, x, layer, group, masks)
            return [y]

        inputs = [
            ints([BASE] * tokens),
            ints([FREE] * (window // LANE_PAGE)),
            torch.zeros(tokens, out),
            torch.zeros(tokens, in_),
        ]
        name = f"{group}-{layer}-{tokens}-{window}"
        placed = [tensor.to(torch_xla.device()) for tensor in inputs]
        return self.graphs.compile(name, add, placed, read=self.lanes.cells(window))

    def expected(self, y: Tensor, x: Tensor, group: str, adapter: Tensor, owner: Tensor) -> Tensor:
        deltas = [
            lora_delta(
                x, self.a[module][: len(owner)], self.b[module][: len(owner)], owner, adapter
            )
            for module in GROUPS[group]
        ]
        return y + torch.cat(deltas, dim=1)


def put(part: Part, values: Tensor) -> None:
    """Give a part of a cell these values."""
    memory = part.cell.tensor.cpu()
    memory[part.layer] = values
    part.cell.tensor = memory.to(torch_xla.device())


def outs(group: str) -> int:
    return sum(SHAPES[module][0] for module in GROUPS[group])


def run(graph: Graph, *inputs: Tensor) -> Tensor:
    return graph.run([tensor.to(torch_xla.device()) for tensor in inputs])[0].cpu()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("together", [False, True])
def test_each_token_gets_the_delta_of_its_own_adapter(
    group: str, window: int, together: bool
) -> None:
    pool = Pool(together=together)
    pool.upload(1)
    pages = window // LANE_PAGE
    page_owner = ints([0, 1, 0, *([FREE] * 4), 7][:pages])
    adapter_of = ints([0, 1, BASE, 0, pages - 1, 1])
    x, y = torch.randn(6, SHAPES[GROUPS[group][0]][1]), torch.randn(6, outs(group))

    found = run(pool.graph(6, 1, group, window), adapter_of, page_owner, y, x)

    owner = page_owner.repeat_interleave(LANE_PAGE)
    expected = pool.expected(y, x, group, adapter_of, owner)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_base_token_is_left_as_it_is_whatever_lanes_hold() -> None:
    pool = Pool()
    for module in SHAPES:  # with these, products of others' lanes are infinite
        pool.a[module].fill_(3e38)
    pool.upload(0)
    x, y = torch.randn(4, 16) + 2, torch.randn(4, outs("qkv"))

    graph = pool.graph(4, 0, "qkv", 64)
    found = run(graph, ints([BASE, 5, BASE, BASE]), ints([5] * 8), y, x)

    assert torch.equal(found[[0, 2, 3]], y[[0, 2, 3]])
    assert not found[1].isfinite().all()


def test_a_wider_window_changes_nothing() -> None:
    pool = Pool()
    pool.upload(0)
    x, y = torch.randn(3, 16), torch.randn(3, outs("gate_up"))
    adapter_of = ints([1, BASE, 0])

    narrow = run(pool.graph(3, 0, "gate_up", 16), adapter_of, ints([0, 1]), y, x)
    wide = run(pool.graph(3, 0, "gate_up", 64), adapter_of, ints([0, 1] + [FREE] * 6), y, x)

    assert torch.equal(narrow, wide)

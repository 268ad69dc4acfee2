"""Compiled graphs: right, in place, and never compiled again."""

import weakref
from collections.abc import Sequence

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from loralane_server.device.xla.graphs import Graphs
from loralane_server.device.xla.tracing import Cell, trace
from torch import Tensor

CACHED = [pytest.param(True, id="cached"), pytest.param(False, id="openxla")]


def put(tensor: Tensor) -> Tensor:
    return tensor.to(torch_xla.device())


def pointers(cells: Sequence[Cell]) -> list[int]:
    xm.wait_device_ops()
    return [torch_xla._XLAC._unsafe_buffer_pointer(cell.tensor) for cell in cells]


def compilations() -> tuple[int, int]:
    return (
        met.counter_value("UncachedCompile") or 0,
        torch_xla._XLAC._xla_get_num_cached_compilation_graph(),
    )


class Memory:
    """Cells [slots, width], the same on the host, and a step that writes to all and reads them."""

    def __init__(self, cells: int, slots: int = 16, width: int = 8) -> None:
        generator = torch.Generator().manual_seed(7)
        self.weight = torch.randn(width, width, generator=generator)
        self.host = [torch.randn(slots, width, generator=generator) for _ in range(cells)]
        self.cells = [Cell(put(host)) for host in self.host]
        self._weight = put(self.weight)

    def step(self, x: Tensor, at: Tensor) -> list[Tensor]:
        for cell in reversed(self.cells):
            cell.tensor.view(-1, x.shape[1]).index_put_((at,), x * 2.5 + 1)
            x = x @ self._weight + cell.tensor[at] * 0.25
        return [x.argmax(dim=-1), x]

    def reference(self, x: Tensor, at: Tensor) -> Tensor:
        for host in reversed(self.host):
            host[at] = x * 2.5 + 1
            x = x @ self.weight + host[at] * 0.25
        return x


@pytest.mark.parametrize("cached", CACHED)
def test_a_graph_computes_what_its_function_does_and_updates_its_cells(cached: bool) -> None:
    memory = Memory(cells=3)
    inputs = [put(torch.zeros(2, 8)), put(torch.zeros(2, dtype=torch.int64))]
    graph = Graphs(cached=cached).compile("step", memory.step, inputs, updated=memory.cells)

    for seed in range(5):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
        at = torch.tensor([seed, 9 + seed])
        tokens, y = graph.run([put(x), put(at)])
        expected = memory.reference(x, at)

        torch.testing.assert_close(y.cpu(), expected)
        assert tokens.cpu().tolist() == expected.argmax(dim=-1).tolist()
    for cell, host in zip(memory.cells, memory.host, strict=True):
        torch.testing.assert_close(cell.tensor.cpu(), host)


@pytest.mark.parametrize("cached", CACHED)
def test_cells_hold_after_compiling_what_they_held_before(cached: bool) -> None:
    memory = Memory(cells=3)
    inputs = [put(torch.ones(2, 8)), put(torch.tensor([1, 2]))]

    Graphs(cached=cached).compile("step", memory.step, inputs, updated=memory.cells)
    torch_xla.sync()

    for cell, host in zip(memory.cells, memory.host, strict=True):
        assert cell.tensor.cpu().equal(host)


@pytest.mark.parametrize("cached", CACHED)
def test_updated_cells_stay_where_they_are_in_memory(cached: bool) -> None:
    memory = Memory(cells=40)
    inputs = [put(torch.ones(2, 8)), put(torch.tensor([1, 2]))]
    graph = Graphs(cached=cached).compile("step", memory.step, inputs, updated=memory.cells)

    graph.run(inputs)
    before = pointers(memory.cells)
    for _ in range(3):
        graph.run(inputs)

    assert pointers(memory.cells) == before
    assert len(set(before)) == 40


def test_donated_memory_has_a_name_until_the_run_is_long_done() -> None:
    """Who lets go of it waits for the run: then no host work would overlap the device's."""
    memory = Memory(cells=2)
    inputs = [put(torch.ones(2, 8)), put(torch.tensor([1, 2]))]
    graph = Graphs(cached=True).compile("step", memory.step, inputs, updated=memory.cells)
    donated = weakref.ref(memory.cells[0].tensor)

    kept = []
    for _ in range(40):
        graph.run(inputs)
        kept.append(donated() is not None)

    assert all(kept[:8])
    assert not any(kept[30:])


@pytest.mark.parametrize("cached", CACHED)
def test_a_hundred_runs_compile_nothing(cached: bool) -> None:
    memory = Memory(cells=2)
    inputs = [put(torch.zeros(2, 8)), put(torch.zeros(2, dtype=torch.int64))]
    graph = Graphs(cached=cached).compile("step", memory.step, inputs, updated=memory.cells)
    graph.run(inputs)[1].cpu()
    before = compilations()

    for i in range(100):
        x = torch.full((2, 8), i / 10)
        graph.run([put(x), put(torch.tensor([i % 16, (i + 1) % 16]))])[1].cpu()

    assert compilations() == before


def test_the_counters_do_count_when_a_shape_changes() -> None:
    memory = Memory(cells=1)
    graphs = Graphs()
    inputs = [put(torch.zeros(2, 8)), put(torch.tensor([1, 2]))]
    graphs.compile("two", memory.step, inputs, updated=memory.cells)
    before = compilations()

    inputs = [put(torch.zeros(5, 8)), put(torch.tensor([1, 2, 3, 4, 5]))]
    graphs.compile("five", memory.step, inputs, updated=memory.cells)

    assert compilations() == (before[0] + 1, before[1] + 1)
    assert graphs.compiled == 2


def test_what_is_compiled_after_the_set_is_complete_is_counted() -> None:
    graphs = Graphs()
    graphs.compile("more", lambda x: [x + 1], [put(torch.ones(17))])
    graphs.close()
    assert graphs.compiled == 1

    (put(torch.ones(19)) * 3 + 1).cpu()

    assert graphs.compiled == 2


@pytest.mark.parametrize("cached", CACHED)
def test_graphs_share_a_cell_that_one_updates_and_another_reads(cached: bool) -> None:
    cell = Cell(put(torch.zeros(4, 8)))
    row = put(torch.zeros(1, dtype=torch.int64))

    def write(at: Tensor, value: Tensor) -> list[Tensor]:
        cell.tensor.index_put_((at,), value)
        return []

    def total(x: Tensor) -> list[Tensor]:
        return [cell.tensor.sum(dim=0) + x]

    graphs = Graphs(cached=cached)
    writer = graphs.compile("write", write, [row, put(torch.zeros(1, 8))], updated=[cell])
    reader = graphs.compile("total", total, [put(torch.zeros(8))], read=[cell])

    writer.run([put(torch.tensor([1])), put(torch.full((1, 8), 2.0))])
    first = reader.run([put(torch.ones(8))])[0].cpu()
    before = pointers([cell])
    writer.run([put(torch.tensor([3])), put(torch.full((1, 8), 5.0))])
    second = reader.run([put(torch.ones(8))])[0].cpu()

    assert first.tolist() == [3.0] * 8
    assert second.tolist() == [8.0] * 8
    assert pointers([cell]) == before


def test_runs_under_inference_mode_go_on_from_each_other() -> None:
    memory = Memory(cells=2)
    inputs = [put(torch.ones(2, 8)), put(torch.tensor([1, 2]))]
    graph = Graphs().compile("step", memory.step, inputs, updated=memory.cells)

    with torch.inference_mode():
        for _ in range(3):
            y = graph.run([put(torch.ones(2, 8)), put(torch.tensor([1, 2]))])[1].cpu()
            expected = memory.reference(torch.ones(2, 8), torch.tensor([1, 2]))

    torch.testing.assert_close(y, expected)


def test_a_trace_knows_where_its_parameters_come_from() -> None:
    memory = Memory(cells=2)
    inputs = [put(torch.ones(2, 8)), put(torch.tensor([1, 2]))]

    with trace(memory.step, inputs, updated=memory.cells) as traced:
        places = sorted(s.place for s in traced.sources if not isinstance(s, Cell | Tensor))
        cells = [source for source in traced.sources if isinstance(source, Cell)]

    assert places == [0, 1]
    assert {id(cell) for cell in cells} == {id(cell) for cell in memory.cells}
    assert len(traced.results) == 4


def test_a_cell_that_is_not_updated_is_refused() -> None:
    memory = Memory(cells=1)
    idle = Cell(put(torch.ones(3)))
    inputs = [put(torch.ones(2, 8)), put(torch.tensor([1, 2]))]

    with pytest.raises(ValueError, match="cell 1 was to be updated and was not"):
        Graphs().compile("step", memory.step, inputs, updated=[*memory.cells, idle])

    assert idle.tensor.cpu().tolist() == [1.0] * 3
    assert memory.cells[0].tensor.cpu().equal(memory.host[0])


def test_an_output_that_is_an_input_is_refused() -> None:
    with pytest.raises(ValueError, match="output 0 is not computed by the graph"):
        Graphs().compile("same", lambda x: [x], [put(torch.ones(2))])


def test_an_output_twice_is_refused() -> None:
    def twice(x: Tensor) -> list[Tensor]:
        y = x + 1
        return [y, y]

    with pytest.raises(ValueError, match="the same value"):
        Graphs().compile("twice", twice, [put(torch.ones(2))])


def test_a_name_is_taken_once() -> None:
    graphs = Graphs()
    graphs.compile("more", lambda x: [x + 1], [put(torch.ones(2))])

    with pytest.raises(ValueError, match="compiled already"):
        graphs.compile("more", lambda x: [x + 1], [put(torch.ones(2))])


@pytest.mark.parametrize("how", ["reads", "updates"])
def test_a_graph_that_touches_what_only_another_declared_is_refused(how: str) -> None:
    own, foreign = Cell(put(torch.ones(4))), Cell(put(torch.ones(4)))
    graphs = Graphs(cached=True)

    def update(x: Tensor) -> list[Tensor]:
        foreign.tensor.add_(x)
        return [x * 2]

    def stray(x: Tensor) -> list[Tensor]:
        own.tensor.add_(foreign.tensor if how == "reads" else x)
        return [x * 3] if how == "reads" else update(x)

    graphs.compile("updates", update, [put(torch.ones(4))], updated=[foreign])

    with pytest.raises(ValueError, match="touches a cell that it does not declare"):
        graphs.compile("strays", stray, [put(torch.ones(4))], updated=[own])

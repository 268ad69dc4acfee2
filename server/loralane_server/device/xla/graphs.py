"""Compiled graphs: traced once, compiled once, then run without any Python of the model.

A step of a traced model costs torch_xla some 0.3 ms of host time for each layer; running the graph
that it left behind costs a few microseconds a layer, by how much is handed over (bench/XLA.md). So
every graph that a shard will ever need is compiled before it is ready, with real arguments, and
`Graph.run` does nothing but hand them over.

Where this torch_xla lacks the names that this takes, graphs run through the public `openxla`
backend of `torch.compile`: the same results, more host time (see dynamo_graph.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import torch
import torch_xla
import torch_xla.debug.metrics as met
from torch import Tensor

from loralane_server.device.xla.dynamo_graph import DynamoGraph
from loralane_server.device.xla.mesh import Mesh
from loralane_server.device.xla.tracing import Cell as Cell
from loralane_server.device.xla.tracing import Input, Trace, trace

_C = torch_xla._XLAC

#: Runs of steps and lane writes that are surely done once as many more have begun: at most two
#: steps are under way, and it does no harm to wait for a lane write.
_KEPT: Final = 16

_PRIVATE: Final = (
    "_check_tensor_need_materialization",
    "_clear_pending_irs",
    "_get_graph_hash",
    "_get_tensors_handle",
    "_get_tensors_xla_device_data_node",
    "_run_cached_graph",
    "_set_buffer_donation",
    "_unique_id_for_ir_and_data",
    "_xla_set_enable_alias_with_buffer_donor_config",
    "_xla_warm_up_cache",
)


class Graph(Protocol):
    """One compiled graph."""

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run it on inputs of the shapes and types that it was compiled for.

        Updates its cells, in place, and returns its outputs, both before they are computed: who
        fetches one waits for it. Returns no tensor that an input or cell shares memory with.
        """


class CachedGraph:
    """A graph in torch_xla's cache, and who its parameters are."""

    def __init__(
        self, traced: Trace, inputs: Sequence[Tensor], kept: deque[Sequence[Tensor]]
    ) -> None:
        """`kept`: see `Graphs`."""
        with _donations():
            self._hash = _C._get_graph_hash(list(traced.results))
            _C._xla_warm_up_cache(list(traced.results), [])
        self._kept, sources = kept, traced.sources
        self._updated = tuple(traced.updated)
        #: The arguments but for those that may differ from run to run.
        self._arguments = [_bare(s) if isinstance(s, Tensor) else None for s in sources]
        self._cells = [(at, s) for at, s in enumerate(sources) if isinstance(s, Cell)]
        self._inputs = [(at, s.place) for at, s in enumerate(sources) if isinstance(s, Input)]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See `Graph`."""
        arguments = self._arguments.copy()
        for at, place in self._inputs:
            arguments[at] = inputs[place]
        for at, cell in self._cells:
            arguments[at] = cell.tensor
        if self._updated:
            self._kept.append([cell.tensor for cell in self._updated])
        results: list[Tensor] = _C._run_cached_graph(self._hash, arguments)
        for cell, tensor in zip(self._updated, results, strict=False):
            cell.tensor = tensor
        return results[len(self._updated) :]


class Graphs:
    """Compiles the graphs of one shard, and counts them. Touched by one thread at a time."""

    def __init__(
        self,
        *,
        mesh: Mesh | None = None,
        cached: bool | None = None,
        began: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`cached`: whether graphs run directly, None = if this torch_xla can.

        Outputs are the same on every device of the mesh: to fetch one that is cut, torch_xla
        compiles each time. `began` is told the name of each graph before it is compiled.
        """
        self._mesh = mesh or Mesh()
        self._cached = all(hasattr(_C, name) for name in _PRIVATE) if cached is None else cached
        self._began = began
        self._graphs: dict[str, Graph] = {}
        #: All that graphs declared so far, by identity.
        self._cells: dict[int, Cell] = {}
        #: What the last runs updated, as it was before them. Who lets go of memory that was donated
        #: waits until the run is done: so nobody does before it is.
        self._kept: deque[Sequence[Tensor]] = deque(maxlen=_KEPT)
        self._closed_at: int | None = None

    @property
    def compiled(self) -> int:
        """How many graphs are compiled: those ready to run, and any that came after `close`."""
        late = 0 if self._closed_at is None else _compilations() - self._closed_at
        return len(self._graphs) + late

    def close(self) -> None:
        """Declare the set complete: from now on whatever torch_xla compiles is one too many."""
        self._closed_at = _compilations()

    def compile(
        self,
        name: str,
        fn: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Tensor],
        *,
        updated: Sequence[Cell] = (),
        read: Sequence[Cell] = (),
    ) -> Graph:
        """Compile `fn(*inputs)`; every cell holds afterwards what it held before.

        `fn` takes device tensors of the very shapes and types that the graph will run on. It
        updates all cells of `updated` in place, may read those of `read`, touches no other cell,
        leaves its inputs as they are, and returns tensors that it computed, each once. Whatever
        else it touches, weights say, becomes part of the graph. Raises `ValueError` if it does
        otherwise (of the cells that it does not declare, if a graph before did), or if there is
        such a graph already.
        """
        if name in self._graphs:
            raise ValueError(f"graph {name} is compiled already")
        self._began(name)

        def everywhere(*inputs: Tensor) -> list[Tensor]:
            return [self._mesh.place(output) for output in fn(*inputs)]

        own = {id(cell): cell for cell in (*updated, *read)}
        others = [cell for known, cell in self._cells.items() if known not in own]
        self._cells |= own
        graph: Graph
        if self._cached:
            with trace(everywhere, inputs, updated=updated, read=read, others=others) as traced:
                graph = CachedGraph(traced, inputs, self._kept)
        else:
            graph = DynamoGraph(everywhere, inputs, [*updated, *read], len(updated))
        self._graphs[name] = graph
        return graph


def _bare(tensor: Tensor) -> Tensor:
    """Return a tensor without its wrapper, which each run would have to look through."""
    return torch._from_functional_tensor(tensor) if torch._is_functional_tensor(tensor) else tensor


def _compilations() -> int:
    return met.counter_value("UncachedCompile") or 0


@contextmanager
def _donations() -> Iterator[None]:
    """Let graphs reuse the memory of what is marked as donated: off elsewhere in torch_xla."""
    _C._xla_set_enable_alias_with_buffer_donor_config(True)
    try:
        yield
    finally:
        _C._xla_set_enable_alias_with_buffer_donor_config(False)

"""Tracing: a function run once with lazy tensors leaves the operations behind, not their results.

    with trace(fn, inputs, updated=cells) as traced:
        ...  # hash it, compile it, export it
    # every cell holds what it held before, and nothing is left to be computed

Names that torch_xla calls private are used here, in `graphs.py` and in `transfer.py` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor

_C = torch_xla._XLAC

#: Bytes of a cell on one device at most, where layers share it: what int32 can count.
CELL_BYTES: Final = 1 << 31
#: Orders of results that are tried; the second has always done.
_ORDERS: Final = 8


@dataclass(slots=True, eq=False)
class Cell:
    """Device memory that graphs read and update in place: KV pages, lanes.

    The memory stays where it is; the handle changes with every update, so nobody keeps `tensor`.
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Input:
    """A parameter that takes one of the inputs, by its place among them."""

    place: int


#: Where a parameter's value comes from: an input, a cell, or a tensor that stays what it is.
Source = Input | Cell | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What a function computes, not yet computed."""

    #: New values of `updated`, then the outputs.
    results: Sequence[Tensor]
    #: The graph's parameters, in the order in which it takes them. What it does not use is absent.
    sources: Sequence[Source]
    #: The updated cells, in the order of `results`.
    updated: Sequence[Cell]


@contextmanager
def trace(
    fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    *,
    updated: Sequence[Cell] = (),
    read: Sequence[Cell] = (),
    others: Sequence[Cell] = (),
) -> Iterator[Trace]:
    """Trace `fn(*inputs)`; inside the block the cells' tensors stand for their new values.

    `fn` updates every cell of `updated` in place, may read those of `read`, touches none of
    `others`, leaves its inputs as they are, and returns tensors that it computed, each once; raises
    `ValueError` otherwise.
    """
    torch_xla.sync()
    xm.wait_device_ops()
    cells = [*updated, *read]
    apart = _C._get_tensors_handle([cell.tensor for cell in others])
    sources = _by_handle(inputs, cells)
    with torch.inference_mode(False), torch.no_grad():
        held = [torch.clone(cell.tensor) for cell in cells]  # the same memory, another handle
        try:
            for cell in updated:
                _C._set_buffer_donation(cell.tensor, True)
            outputs = list(fn(*inputs))
            _check_results([*(cell.tensor for cell in updated), *outputs], len(updated))
            traced = _in_order(updated, outputs, sources)
            _check_others(traced, others, apart)
            yield traced
        finally:
            for cell, tensor in zip(cells, held, strict=True):
                _C._set_buffer_donation(tensor, False)
                cell.tensor = tensor
            _C._clear_pending_irs(str(torch_xla.device()))


def _in_order(
    updated: Sequence[Cell], outputs: Sequence[Tensor], known: Mapping[int, Source]
) -> Trace:
    """Return the trace with its updated cells in the order of their parameters.

    XLA gives the n-th donated parameter of a size to the n-th result of that size: in any other
    order it would have to copy. What the parameters' order is depends on the results' in turn.
    """
    for _ in range(_ORDERS):
        results = [*(cell.tensor for cell in updated), *outputs]
        _, values = _C._get_tensors_xla_device_data_node(results)
        handles = _C._get_tensors_handle(values)
        sources = [known.get(h, value) for h, value in zip(handles, values, strict=True)]
        place = {id(source): at for at, source in enumerate(sources)}
        ordered = sorted(updated, key=lambda cell: place.get(id(cell), len(place)))
        if ordered == list(updated):
            return Trace(results, sources, updated)
        updated = ordered
    raise ValueError("the updated cells of a graph have no order in which XLA would not copy them")


def _by_handle(inputs: Sequence[Tensor], cells: Sequence[Cell]) -> dict[int, Source]:
    places = [Input(place) for place in range(len(inputs))]
    tensors = [*inputs, *(cell.tensor for cell in cells)]
    sources: list[Source] = [*places, *cells]
    handles = _C._get_tensors_handle(tensors)
    if len(set(handles)) != len(handles):
        raise ValueError("two inputs or cells of a graph are the same device memory")
    return dict(zip(handles, sources, strict=True))


def _check_others(traced: Trace, others: Sequence[Cell], apart: Sequence[int]) -> None:
    """Check that no other cell, by its handle before, is a parameter, nor has a new value."""
    kept = [source for source in traced.sources if isinstance(source, Tensor)]
    read = set(_C._get_tensors_handle(kept)) & set(apart)
    changed = _C._check_tensor_need_materialization([cell.tensor for cell in others])
    if read or any(changed):
        raise ValueError("a graph touches a cell that it does not declare")


def _check_results(results: Sequence[Tensor], updated: int) -> None:
    computed = _C._check_tensor_need_materialization(list(results))
    if not all(computed[:updated]):
        raise ValueError(f"cell {computed.index(False)} was to be updated and was not")
    if not all(computed):
        raise ValueError(f"output {computed.index(False) - updated} is not computed by the graph")
    if len({_C._unique_id_for_ir_and_data(result) for result in results}) != len(results):
        raise ValueError("two results of a graph are the same value; return it once")

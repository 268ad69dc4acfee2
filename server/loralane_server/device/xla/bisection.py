"""`Search` on XLA: bisection. Nothing is sorted, nothing added up one after another.

A round is a comparison and a sum; some twenty or thirty of them are a loop of XLA's own, which is
one round to compile. (A complete order of a vocabulary takes a TPU's compiler minutes, for each
number of rows.) torch_xla knows no such loop in a traced function, nor how to take an integer for a
float's bits, so this is written in XLA's operations.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch_xla.core.xla_model as xm
import torch_xla.core.xla_op_registry as registry
from torch import Tensor
from torch_xla.core import xla_builder as xb

from loralane_server.drawing import LEAST

#: Floats stand in the order of integers: their bits, those of negative ones counted down from 0.
_LOWEST: Final = -(1 << 31)


class Bisection:
    """Implements `Search` in a traced function."""

    def reached(self, logits: Tensor, amounts: Tensor | None, wanted: Tensor) -> Tensor:
        """See `Search.reached`."""
        if amounts is None:
            found: Tensor = torch.ops.loralane.reached_by_count(logits, wanted)
        else:
            found = torch.ops.loralane.reached_by_amount(logits, amounts, wanted)
        # Where numbers so small count as 0, any of them may have been found in its place.
        return found.masked_fill(found.abs() < LEAST, 0.0)

    def first(self, amounts: Tensor, wanted: Tensor) -> Tensor:
        """See `Search.first`."""
        found: Tensor = torch.ops.loralane.first(amounts, wanted)
        return found.long()

    def mapped(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """See `Search.mapped`: computed; a TPU looks up slowly."""
        return function(x)

    def settled(self, amounts: Tensor) -> Tensor:
        """See `Search.settled`. Else XLA computes them again in every sum, and compiles longer."""
        found: Tensor = torch.ops.loralane.settled(amounts)
        return found


def _reached(logits: Any, *given: Any) -> Any:
    """Take logits [R, V], amounts [R, V] unless each has 1, wanted [R]; XLA's operations, all."""
    rows = logits.shape().sizes[:1]

    def enough(order: Any, logits: Any, *given: Any) -> Any:
        *amounts, wanted = given
        reaching = logits >= _across(_float_of(order), logits)
        return _sum(reaching, *amounts) >= wanted

    zero, lowest = (
        xb.Op.scalar(logits.builder(), value, xb.Type.S32).broadcast(rows) for value in (0, _LOWEST)
    )
    order = enough(zero, logits, *given).select(zero, lowest)
    return _float_of(_highest(order, 30, enough, (logits, *given)))


def _first(amounts: Any, wanted: Any) -> Any:
    """Take amounts [R, V] and wanted [R]: how many places, from the first, have less -> [R]."""
    rows, vocab = amounts.shape().sizes

    def too_little(count: Any, amounts: Any, wanted: Any) -> Any:
        shape = xb.mkshape(xb.Type.S32, (rows, vocab))
        place = xb.Op.iota(count.builder(), shape, 1)
        return _sum(place < _across(count, amounts), amounts) < wanted

    none = xb.Op.scalar(amounts.builder(), 0, xb.Type.S32).broadcast((rows,))
    return _highest(none, vocab.bit_length() - 1, too_little, (amounts, wanted))


def _highest(start: Any, bit: int, holds: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Return the highest integers [R] for which `holds(integers, *given)` [R] is true.

    It is true for `start`, for those between, and for none that exceed it by 2^(bit + 1).
    """

    def body(found: Any, step: Any, *given: Any) -> Any:
        higher = found + step.broadcast(found.shape().sizes)
        found = holds(higher, *given).select(higher, found)
        return xb.Op.tuple((found, step / step.scalar_like(2), *given))

    def goes_on(found: Any, step: Any, *given: Any) -> Any:
        return step > step.scalar_like(0)

    step = xb.Op.scalar(start.builder(), 1 << bit, xb.Type.S32)
    return xb.Op.mkwhile((start, step, *given), goes_on, body).get_tuple_element(0)


def _sum(where: Any, *amounts: Any) -> Any:
    """Return what there is `where` [R, V], of amounts [R, V] or of ones, [R] int64."""
    counted = where.select(amounts[0], amounts[0].zeros_like()) if amounts else where
    nothing = xb.Op.zero(where.builder(), xb.Type.S64)
    return counted.cast(xb.Type.S64).reduce(nothing, lambda a, b: a + b, (1,))


def _across(values: Any, like: Any) -> Any:
    return values.broadcast_in_dim(like.shape().sizes, (0,))


def _float_of(order: Any) -> Any:
    """Return the numbers at places [R] of the order."""
    lowest, zero = (order.scalar_like(value) for value in (_LOWEST, 0))
    return (order < zero).select(lowest - order, order).bitcast(xb.Type.F32)


_REACHED: Final = registry.register("loralane_reached", _reached)
_FIRST: Final = registry.register("loralane_first", _first)


@torch.library.custom_op("loralane::reached_by_count", mutates_args=())
def _by_count(logits: Tensor, wanted: Tensor) -> Tensor:
    found: Tensor = _REACHED(logits, wanted)
    return found


@torch.library.custom_op("loralane::reached_by_amount", mutates_args=())
def _by_amount(logits: Tensor, amounts: Tensor, wanted: Tensor) -> Tensor:
    found: Tensor = _REACHED(logits, amounts, wanted)
    return found


@torch.library.custom_op("loralane::first", mutates_args=())
def _place(amounts: Tensor, wanted: Tensor) -> Tensor:
    found: Tensor = _FIRST(amounts, wanted)
    return found


@torch.library.custom_op("loralane::settled", mutates_args=())
def _settled(amounts: Tensor) -> Tensor:
    found = amounts.clone()
    xm.optimization_barrier_([found])
    return found


# What `torch.compile` has to know (dynamo_graph.py).
@_by_count.register_fake
def _(logits: Tensor, wanted: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0])


@_by_amount.register_fake
def _(logits: Tensor, amounts: Tensor, wanted: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0])


@_place.register_fake
def _(amounts: Tensor, wanted: Tensor) -> Tensor:
    return amounts.new_empty(amounts.shape[0])


@_settled.register_fake
def _(amounts: Tensor) -> Tensor:
    return torch.empty_like(amounts)

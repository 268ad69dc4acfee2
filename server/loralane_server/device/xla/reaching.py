"""`Reach` for XLA: bisection over the order of float32 numbers. Nothing is sorted.

Thirty-two rounds of a comparison and a sum, as a loop of XLA's own: to compile, it is one round. (A
complete order of a vocabulary takes a TPU's compiler minutes, for each number of rows.)

torch_xla knows no such loop in a traced function, nor how to take an integer for a float's bits, so
this is written in XLA's operations.
"""

from typing import Any, Final

import torch
import torch_xla.core.xla_op_registry as registry
from torch import Tensor
from torch_xla.core import xla_builder as xb

from loralane_server.drawing import LEAST

#: Orders as integers do: a float's bits, those of its size negated if it is negative.
_FIRST: Final = -(1 << 31)


def reached(logits: Tensor, weights: Tensor | None, wanted: Tensor) -> Tensor:
    """Implement `Reach` in a traced function."""
    if weights is None:
        found: Tensor = torch.ops.loralane.reached_by_count(logits, wanted)
    else:
        found = torch.ops.loralane.reached_by_weight(logits, weights, wanted)
    # Where such numbers count as 0, any of them may have been found in its place.
    return found.masked_fill(found.abs() < LEAST, 0.0)


def _bisected(logits: Any, *weights_and_wanted: Any) -> Any:
    """Return what `Reach` does: logits [R, V], weights [R, V] unless each weighs 1, wanted [R]."""
    *weights, wanted = weights_and_wanted
    rows, vocab = logits.shape().sizes
    builder = logits.builder()

    def enough(order: Any, logits: Any, *given: Any) -> Any:
        *weights, wanted = given
        reach = logits >= _float_of(order).broadcast_in_dim((rows, vocab), (0,))
        weighed = reach
        if weights:
            weighed = reach.select(weights[0], weights[0].zeros_like())
        nothing = xb.Op.zero(order.builder(), xb.Type.S64)
        return weighed.cast(xb.Type.S64).reduce(nothing, lambda a, b: a + b, (1,)) >= wanted

    def body(order: Any, step: Any, *given: Any) -> Any:
        higher = order + step.broadcast((rows,))
        order = enough(higher, *given).select(higher, order)
        return xb.Op.tuple((order, step / step.scalar_like(2), *given))

    def goes_on(order: Any, step: Any, *given: Any) -> Any:
        return step > step.scalar_like(0)

    given = (logits, *weights, wanted)
    zero, first = (
        xb.Op.scalar(builder, value, xb.Type.S32).broadcast((rows,)) for value in (0, _FIRST)
    )
    order = enough(zero, *given).select(zero, first)
    step = xb.Op.scalar(builder, 1 << 30, xb.Type.S32)
    done = xb.Op.mkwhile((order, step, *given), goes_on, body)
    return _float_of(done.get_tuple_element(0))


def _float_of(order: Any) -> Any:
    """Return the number at a place [R] of the order."""
    first, zero = (order.scalar_like(value) for value in (_FIRST, 0))
    return (order < zero).select(first - order, order).bitcast(xb.Type.F32)


_OPERATION: Final = registry.register("loralane_reach", _bisected)


@torch.library.custom_op("loralane::reached_by_count", mutates_args=())
def _by_count(logits: Tensor, wanted: Tensor) -> Tensor:
    found: Tensor = _OPERATION(logits, wanted)
    return found


@torch.library.custom_op("loralane::reached_by_weight", mutates_args=())
def _by_weight(logits: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    found: Tensor = _OPERATION(logits, weights, wanted)
    return found


@_by_count.register_fake
def _(logits: Tensor, wanted: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0])


@_by_weight.register_fake
def _(logits: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0])

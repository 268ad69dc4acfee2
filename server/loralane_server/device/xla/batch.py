"""A step's input on XLA: slices of one vector, and what all layers share of it."""

from dataclasses import dataclass

from torch import Tensor

from loralane_server.device.xla.attention import Plan
from loralane_server.device.xla.buckets import GraphKey
from loralane_server.device.xla.lanes import Masks


@dataclass(frozen=True, slots=True, eq=False)
class XlaBatch:
    """Implements `Batch` in the shapes of one graph."""

    key: GraphKey
    #: [tokens] int64
    tokens: Tensor
    #: [tokens] int64
    positions: Tensor
    attention: Plan
    #: Which lanes are whose; empty in a graph of base rows.
    lanes: Masks
    #: [rows] the last token of each; None when every token is a row.
    last_token: Tensor | None

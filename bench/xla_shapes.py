"""Layers that the benchmarks of single parts use: (out, in) of each linear."""

from collections.abc import Mapping
from typing import Final

Shapes = Mapping[str, tuple[int, int]]

_LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layer(hidden: int, kv: int, mlp: int) -> Shapes:
    """Return the shapes of a Llama layer whose heads are as wide as its residual stream."""
    outs = (hidden, kv, kv, hidden, mlp, mlp, hidden)
    ins = (hidden, hidden, hidden, hidden, hidden, hidden, mlp)
    return dict(zip(_LINEARS, zip(outs, ins, strict=True), strict=True))


SQUARE: Final = layer(2048, 2048, 2048)
LLAMA_1B: Final = layer(2048, 512, 8192)
#: The model of bench/model.py.
M160: Final = layer(768, 256, 2048)

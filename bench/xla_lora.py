"""What LoRA costs in one layer on XLA, by form of the arithmetic and phase.

    PJRT_DEVICE=CPU python -m bench.xla_lora [--rounds 9]

One Llama layer in float32: its four products, alone (`base`) and with eight adapters of rank 16 on
all seven linears added in different ways. Forms take turns, round after round, so that a slow
minute of the machine hits all alike; figures are medians of what a form adds to the base.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.seam import GROUPS
from loralane_server.device.threads import use_threads
from loralane_server.device.xla.graphs import Graph, Graphs
from loralane_server.device.xla.lanes import XlaLanes
from loralane_server.device.xla.mesh import Mesh
from torch import Tensor
from torch.nn import functional as F

from bench.xla_shapes import LLAMA_1B, M160, Shapes

_ADAPTERS: Final = 8
_RANK: Final = 16
_ACTIVE: Final = _ADAPTERS * _RANK
_POOL: Final = 512
#: Tokens of a block that belong to one adapter, in the form by blocks.
_BLOCK: Final = 16
_TOKENS: Final = (1, 8, 32, 512)

#: Adds to y [tokens, outs] of a group what its input x [tokens, in] gives.
Form = Callable[[Tensor, Tensor, str], Tensor]


@dataclass(frozen=True)
class Lanes:
    """The same random lanes in the shapes that the forms want, on the device."""

    shapes: Shapes
    tokens: int

    def put(self, *shape: int) -> Tensor:
        """Return small random numbers, on the device."""
        return (torch.randn(shape) * 0.02).to(torch_xla.device())

    @property
    def adapter(self) -> Tensor:
        """[tokens] which adapter each has: decode rows in turn, prompts in stretches."""
        turns = torch.arange(self.tokens)
        stretch = max(self.tokens // _ADAPTERS, 1)
        return (turns // stretch % _ADAPTERS).to(torch.int32)


def forms(lanes: Lanes) -> Mapping[str, Form]:
    """Return every form that is worth running at this many tokens."""
    found: dict[str, Form] = {
        "laned, window 128": _laned(lanes, 128),
        "laned, window 512": _laned(lanes, _POOL),
        "128, shrinks apart": _apart(lanes),
        "128, A [lanes, in]": _rows(lanes),
        "active of 512, A [lanes, in]": _compact(lanes),
        "active of 512, A [in, lanes]": _compact_columns(lanes),
    }
    if lanes.tokens <= 32:
        found["gather a token"] = _gather(lanes)
    else:
        found["gather a block"] = _blocks(lanes)
    return found


def _laned(lanes: Lanes, window: int) -> Form:
    """What the server does."""
    device = torch_xla.device()
    pool = XlaLanes(1, lanes.shapes, (128, window), torch.float32, device, Mesh())
    for segment in pool.segments:
        for cell in segment.layers[0].cells:
            cell.tensor = lanes.put(*cell.tensor.shape)
    owner = torch.arange(window // LANE_PAGE, dtype=torch.int32) // (_RANK // LANE_PAGE)
    masks = pool.masks(lanes.adapter.to(device), owner.to(device))

    def add(y: Tensor, x: Tensor, group: str) -> Tensor:
        pool.add(y, x, 0, group, masks)
        return y

    return add


def _mine(lanes: Lanes) -> Tensor:
    """[tokens, active lanes]"""
    owner = torch.arange(_ACTIVE) // _RANK
    return (lanes.adapter[:, None] == owner[None]).to(torch_xla.device())


def _expand(shrunk: Sequence[Tensor], mine: Tensor, b: Sequence[Tensor]) -> Tensor:
    parts = [own.masked_fill(~mine, 0.0) @ each for own, each in zip(shrunk, b, strict=True)]
    return torch.cat(parts, dim=1)


def _halves(
    lanes: Lanes, count: int, *, by_rows: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    a = {}
    for module, (_, in_) in lanes.shapes.items():
        a[module] = lanes.put(count, in_) if by_rows else lanes.put(in_, count)
    return a, {module: lanes.put(count, out) for module, (out, _) in lanes.shapes.items()}


def _apart(lanes: Lanes) -> Form:
    (a, b), mine = _halves(lanes, _ACTIVE, by_rows=False), _mine(lanes)

    def add(y: Tensor, x: Tensor, group: str) -> Tensor:
        modules = GROUPS[group]
        return y + _expand([x @ a[m] for m in modules], mine, [b[m] for m in modules])

    return add


def _rows(lanes: Lanes) -> Form:
    (a, b), mine = _halves(lanes, _ACTIVE, by_rows=True), _mine(lanes)
    fused = {group: torch.cat([a[m] for m in modules]) for group, modules in GROUPS.items()}
    torch_xla.sync()

    def add(y: Tensor, x: Tensor, group: str) -> Tensor:
        shrunk = F.linear(x, fused[group]).split(_ACTIVE, dim=1)
        return y + _expand(shrunk, mine, [b[m] for m in GROUPS[group]])

    return add


def _compact(lanes: Lanes) -> Form:
    (a, b), mine = _halves(lanes, _POOL, by_rows=True), _mine(lanes)
    active = (torch.arange(_ACTIVE) * (_POOL // _ACTIVE)).to(torch_xla.device())

    def add(y: Tensor, x: Tensor, group: str) -> Tensor:
        modules = GROUPS[group]
        shrunk = [F.linear(x, a[m].index_select(0, active)) for m in modules]
        return y + _expand(shrunk, mine, [b[m].index_select(0, active) for m in modules])

    return add


def _compact_columns(lanes: Lanes) -> Form:
    (a, b), mine = _halves(lanes, _POOL, by_rows=False), _mine(lanes)
    active = (torch.arange(_ACTIVE) * (_POOL // _ACTIVE)).to(torch_xla.device())

    def add(y: Tensor, x: Tensor, group: str) -> Tensor:
        modules = GROUPS[group]
        shrunk = [x @ a[m].index_select(1, active) for m in modules]
        return y + _expand(shrunk, mine, [b[m].index_select(0, active) for m in modules])

    return add


def _by_adapter(lanes: Lanes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    slots = _POOL // _RANK
    a = {m: lanes.put(slots, in_, _RANK) for m, (_, in_) in lanes.shapes.items()}
    return a, {m: lanes.put(slots, _RANK, out) for m, (out, _) in lanes.shapes.items()}


def _gather(lanes: Lanes) -> Form:
    (a, b), own = _by_adapter(lanes), lanes.adapter.long().to(torch_xla.device())

    def add(y: Tensor, x: Tensor, group: str) -> Tensor:
        parts = [torch.bmm(torch.bmm(x[:, None], a[m][own]), b[m][own]) for m in GROUPS[group]]
        return y + torch.cat(parts, dim=2)[:, 0]

    return add


def _blocks(lanes: Lanes) -> Form:
    (a, b), own = _by_adapter(lanes), lanes.adapter[::_BLOCK].long().to(torch_xla.device())

    def add(y: Tensor, x: Tensor, group: str) -> Tensor:
        blocks = x.view(-1, _BLOCK, x.shape[1])
        parts = [torch.bmm(torch.bmm(blocks, a[m][own]), b[m][own]) for m in GROUPS[group]]
        return y + torch.cat(parts, dim=2).view(y.shape)

    return add


class Layer:
    """The base products of a layer, and graphs that add to them."""

    def __init__(self, shapes: Shapes, tokens: int) -> None:
        self.lanes = Lanes(shapes, tokens)
        self._weights = {
            group: self.lanes.put(shapes[modules[0]][1], sum(shapes[m][0] for m in modules))
            for group, modules in GROUPS.items()
        }
        self.inputs = [self.lanes.put(tokens, weight.shape[0]) for weight in self._weights.values()]

    def graph(self, name: str, form: Form | None) -> Graph:
        """Compile the four products, with what a form adds to each."""

        def run(*inputs: Tensor) -> list[Tensor]:
            outs = []
            for x, (group, weight) in zip(inputs, self._weights.items(), strict=True):
                y = x @ weight
                outs.append(y if form is None else form(y, x, group))
            return outs

        torch_xla.sync()
        return Graphs().compile(name, run, self.inputs)


def measure(shapes: Shapes, tokens: int, rounds: int) -> dict[str, float]:
    """Return milliseconds: of the base, and what each form adds."""
    layer = Layer(shapes, tokens)
    graphs = {"base": layer.graph("base", None)}
    for name, form in forms(layer.lanes).items():
        graphs[name] = layer.graph(name, form)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds * max(1, 64 // tokens) + 1):
        for name, graph in graphs.items():
            xm.wait_device_ops()
            began = time.perf_counter()
            outputs = graph.run(layer.inputs)
            xm.wait_device_ops()
            if turn:  # the first touches memory for the first time
                times[name].append((time.perf_counter() - began) * 1e3)
            del outputs
    base = median(times.pop("base"))
    return {"base": base} | {name: median(each) - base for name, each in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    use_threads(1)
    torch.manual_seed(0)
    for name, shapes in (("Llama-3.2-1B", LLAMA_1B), ("160M", M160)):
        for tokens in _TOKENS:
            found = measure(shapes, tokens, args.rounds)
            row = " | ".join(f"{form} {ms:.2f}" for form, ms in found.items())
            print(f"{name}, {tokens} tokens: {row}", flush=True)


if __name__ == "__main__":
    main()

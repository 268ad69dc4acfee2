"""`make bench-xla-host`: what does a step cost the host on XLA, by layers and resident adapters?

    PJRT_DEVICE=CPU python -m bench.xla_host [--layers 4,12,32] [--arithmetic]

Host time is the processor time of the thread that runs a step, from the step's input to its tokens
on the host: laying out, bringing it over, handing the graph its arguments, reading the tokens.
Waiting for the device takes none, and the device has nothing to do: it takes the model's arguments,
every weight and lane, and updates the KV pages, but computes one layer's attention instead of the
model (`Idle`). XLA has one thread, which leaves a core to the thread that is measured, as a TPU
would. Rows decode. Each adapter has rank 8; rows use adapters from all over the pool, or none.

`--arithmetic` has the device compute the whole model, however narrow. XLA:CPU takes milliseconds
for that, on the host's own processor: after such a pause the host's caches are cold, and the same
work, down to copying a vector, takes two to three times as long.

How many tensors a graph takes decides what its steps cost. So the pool is measured as it lies on a
TPU, where layers share tensors; what is promised is promised of that. How XLA:CPU itself has it,
each layer apart (see lanes.py), is measured beside it.

Cases are measured in short turns, and compared within a turn: a machine that others share changes
its speed from one second to the next.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.seam import Sampling, Span, StepInput, TargetTensors
from loralane_server.device.xla import hardware
from loralane_server.device.xla.batch import XlaBatch
from loralane_server.device.xla.buckets import plan_buckets
from loralane_server.device.xla.device import XlaDevice
from loralane_server.device.xla.runner import Model, XlaRunner
from loralane_server.kv.pages import PAGE_TOKENS
from loralane_server.model.spec import ModelSpec, read_model_spec
from loralane_server.model.weights import load_decoder
from torch import Tensor

from bench.promises import Promise, at_most, conclude
from bench.report import save
from bench.tiny import save_tiny

#: Whose layout the pool has; all is run on XLA:CPU.
Layout = Literal["tpu", "cpu"]

ROWS: Final = 4
_PAGES_OF_A_ROW: Final = 8
_ADAPTERS: Final = (0, 8, 64)
_TURNS: Final = 30
_MOST_MS: Final = 0.35
_MOST_US_A_LAYER: Final = 10
#: How far from its mean a figure may lie that shall not depend on the resident adapters.
_FLAT: Final = 0.1


@dataclass(frozen=True, slots=True)
class Cost:
    """In milliseconds, of one step or medians of several."""

    #: Processor time of the thread.
    host: float
    #: From the step's input to its tokens.
    whole: float


#: By case, what its turns cost.
Costs = Mapping[str, Sequence[Cost]]


class Placed(XlaDevice):
    """A device that knows what was brought to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.placed: list[Tensor] = []
        super().__init__(*args, **kwargs)

    def put(self, tensor: Tensor) -> Tensor:
        """See `XlaDevice.put`."""
        self.placed.append(super().put(tensor))
        return self.placed[-1]


class Idle:
    """A model that takes its arguments and does next to nothing with them."""

    def __init__(self, spec: ModelSpec, device: Placed) -> None:
        """`device`: with all weights, before anything else is brought there."""
        self._spec, self._device, self._weights = spec, device, tuple(device.placed)

    def logits(self, batch: XlaBatch) -> Tensor:
        """Return logits [rows, vocab], of no meaning, that depend on every weight and lane."""
        spec, rows = self._spec, batch.key.rows
        lanes = [cell.tensor for cell in self._device.lane_cells(batch.key)]
        touched = [memory.flatten()[:1] for memory in (*self._weights, *lanes)]
        x = torch.cat(touched).sum() + sum(mask.float().sum() for mask in batch.lanes)
        q, kv = (
            x.expand(rows, heads, spec.head_dim) + batch.positions[:, None, None]
            for heads in (spec.heads, spec.kv_heads)
        )
        attended = self._device.attend(0, q, kv, kv, batch)
        return attended[:, :1] + batch.tokens[:, None] + torch.arange(spec.vocab, device=x.device)


class Rig:
    """A tiny model on XLA, and steps of rows that decode."""

    def __init__(self, folder: Path, layers: int, layout: Layout, *, arithmetic: bool) -> None:
        self._spec = spec = read_model_spec(save_tiny(folder, layers))
        max_len, pages = _PAGES_OF_A_ROW * PAGE_TOKENS, ROWS * _PAGES_OF_A_ROW
        # Steps of single tokens need no shapes for prompts, so there is less to compile.
        buckets = plan_buckets(
            max_rows=ROWS, step_tokens=1, max_len=max_len, lanes=max(_ADAPTERS) * LANE_PAGE
        )
        self._device = Placed(
            spec, buckets, dtype=torch.float32, pages=pages, tpu=False, together=layout == "tpu"
        )
        model: Model = load_decoder(folder, spec, self._device, torch.float32, max_len)
        if not arithmetic:
            model = Idle(spec, self._device)
        self._runner = XlaRunner(model, self._device, spec.vocab)
        self._runner.compile()
        self._resident = 0

    def load(self, adapters: int) -> None:
        """Make so many adapters resident, each of one lane page; the others are evicted."""
        for page in range(self._resident, adapters):
            for layer in range(self._spec.layers):
                self._device.write_lanes(layer, (page,), _random_targets(self._spec), {})
        self._resident = adapters

    def steps(self, with_adapters: bool) -> Iterator[StepInput]:
        """Yield steps that go on for ever; rows use adapters from the first page to the last."""
        ends = np.linspace(0, max(self._resident - 1, 0), ROWS, dtype=int).tolist()
        while True:
            for start in range(_PAGES_OF_A_ROW * PAGE_TOKENS):
                yield _step(start, [(page,) if with_adapters else () for page in ends])

    def measure(self, with_adapters: bool, count: int) -> Cost:
        """Return what so many steps cost, after some that warm up."""
        costs, submit, warm = [], self._runner.submit, count // 10
        for _, step in zip(range(warm + count), self.steps(with_adapters), strict=False):
            began, busy = time.perf_counter(), time.thread_time()
            submit(step).fetch()
            busy, began = time.thread_time() - busy, time.perf_counter() - began
            costs.append(Cost(busy * 1e3, began * 1e3))
        return _medians(costs[warm:])


def _random_targets(spec: ModelSpec) -> Mapping[str, TargetTensors]:
    return {
        module: TargetTensors(
            torch.randn(LANE_PAGE, inside) * 0.1, torch.randn(LANE_PAGE, outside) * 0.1
        )
        for module, (outside, inside) in spec.linears().items()
    }


def _step(start: int, lane_pages: Sequence[tuple[int, ...]]) -> StepInput:
    pages = np.arange(len(lane_pages) * _PAGES_OF_A_ROW, dtype=np.int32).reshape(
        -1, _PAGES_OF_A_ROW
    )
    count = len(lane_pages)
    return StepInput(
        tokens=np.full(count, 17 + start, dtype=np.int32),
        positions=np.full(count, start, dtype=np.int32),
        spans=[
            Span(start, 1, own[: start // PAGE_TOKENS + 1], lanes)
            for own, lanes in zip(pages, lane_pages, strict=True)
        ],
        sample_at=np.arange(count, dtype=np.int32),
        sampling=[Sampling()] * count,
    )


def measure(layers: int, steps: int, layout: Layout, *, arithmetic: bool) -> Costs:
    """Return what steps cost at one depth, of base rows and of rows with adapters."""
    found: dict[str, list[Cost]] = {}
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), layers, layout, arithmetic=arithmetic)
        gc.collect()
        gc.freeze()  # as a shard does before it is ready
        for adapters in _ADAPTERS * _TURNS:
            rig.load(adapters)
            for kind in ("base", "adapters")[: 2 if adapters else 1]:
                cost = rig.measure(kind == "adapters", steps // _TURNS)
                found.setdefault(f"{kind}, {adapters} resident", []).append(cost)
    return found


def judge(found: Mapping[int, Costs]) -> list[Promise]:
    """Say what holds in a TPU's layout: by layers, what the cases cost."""
    few, many = min(found), max(found)
    promises = []
    for case, turns in found[many].items():
        host = _medians(turns).host
        promises.append(at_most(f"{case}, {many} layers: host", host, _MOST_MS, " ms"))
        if many > few:
            us = (host - _medians(found[few][case]).host) / (many - few) * 1e3
            promises.append(at_most(f"{case}: host a layer", us, _MOST_US_A_LAYER, " us"))
    for layers, cases in found.items():
        for kind in ("base", "adapters"):
            off = _off_the_mean([turns for case, turns in cases.items() if case.startswith(kind)])
            what = f"{kind}, {layers} layers: off the mean over resident adapters"
            promises.append(at_most(what, off * 100, _FLAT * 100, " %"))
    return promises


def _medians(costs: Sequence[Cost]) -> Cost:
    return Cost(median(cost.host for cost in costs), median(cost.whole for cost in costs))


def _off_the_mean(cases: Sequence[Sequence[Cost]]) -> float:
    """Return how far a case lies from the mean of all at most: of its turns, the median."""
    ratios = []
    for turn in zip(*cases, strict=True):
        even = mean(cost.host for cost in turn)
        ratios.append([cost.host / even for cost in turn])
    off: float = max(abs(median(case) - 1) for case in zip(*ratios, strict=True))
    return off


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    hardware.use_threads(1)
    plain: dict[str, dict[str, tuple[float, float]]] = {}
    promises: list[Promise] = []
    for layout in args.layouts:
        found = {}
        for layers in map(int, args.layers.split(",")):
            found[layers] = measure(layers, args.steps, layout, arithmetic=args.arithmetic)
            name = f"{layout}, {layers} layers"
            costs = {case: _medians(turns) for case, turns in found[layers].items()}
            for case, cost in costs.items():
                line = f"{name:15}, {case:24} host {cost.host:.3f} ms, whole {cost.whole:.3f}"
                print(line, flush=True)
            plain[name] = {case: (cost.host, cost.whole) for case, cost in costs.items()}
        if layout == "tpu":
            promises = judge(found)
    print(f"written to {save(args.out, {'ms': plain})}")
    return conclude(promises) if promises else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.xla_host", allow_abbrev=False)
    parser.add_argument("--layers", default="4,12,32", help="depths, by commas")
    parser.add_argument("--layouts", nargs="+", choices=get_args(Layout), default=get_args(Layout))
    parser.add_argument(
        "--arithmetic", action="store_true", help="the device computes the whole model"
    )
    parser.add_argument("--steps", type=int, default=1500, help="of each case")
    parser.add_argument("--out", type=Path, default=Path("bench/results/xla_host.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

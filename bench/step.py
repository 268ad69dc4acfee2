"""How long a step of the model takes, without router, gRPC and engine.

    python -m bench.step [--dtype bf16] [--profile decode:eight:8]

Drives the real decoder and CPU device with hand-made steps. Cases take turns, round after round, so
that a slow minute of the machine hits all alike.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import torch
from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.cpu import CpuBatch, CpuDevice
from loralane_server.device.seam import Sampling, Span, StepInput, StepOutput, TargetTensors
from loralane_server.kv.pages import PAGE_TOKENS, pages_for
from loralane_server.model.decoder import Decoder
from loralane_server.model.spec import ModelSpec, read_model_spec
from loralane_server.model.weights import load_decoder
from torch.profiler import ProfilerActivity, profile

from bench.model import DEFAULT_FOLDER, make, rank_of

_DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16}
#: Adapters present in a step; "dora" is eight with gain and shift besides LoRA.
_MODES: Final[Mapping[str, int]] = {"base": 0, "one": 1, "eight": 8, "dora": 8}
_ROWS: Final = (1, 8, 32)
_PREFILLS: Final = (64, 512)
#: Tokens before the one that a decoding row computes.
_CONTEXT: Final = 96
_LANES: Final = 512
_PAGES: Final = max(32 * pages_for(_CONTEXT + 1), pages_for(max(_PREFILLS)))
_TOP_OPS: Final = 14


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step."""

    kind: str
    mode: str
    #: Decoding rows, or tokens of the one prompt.
    size: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.mode}:{self.size}"


class Bench:
    """A decoder on a device, with the lanes of eight plain adapters and eight with gain filled."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        spec = read_model_spec(folder)
        self._device = CpuDevice(
            spec, dtype=dtype, pages=_PAGES, page_tokens=PAGE_TOKENS, lanes=_LANES
        )
        self._decoder: Decoder[CpuBatch] = load_decoder(
            folder, spec, self._device, dtype, max(_PREFILLS)
        )
        plain = _fill_lanes(self._device, spec, dtype, first=0, gain=False)
        after = plain[-1][-1] + 1
        dora = _fill_lanes(self._device, spec, dtype, first=after, gain=True)
        self._lane_pages = {mode: dora if mode == "dora" else plain for mode in _MODES}

    def step(self, case: Case) -> StepInput:
        """Lay out the input of one step."""
        adapters = self._lane_pages[case.mode][: _MODES[case.mode]] or [()]
        if case.kind == "prefill":
            pages = np.arange(pages_for(case.size), dtype=np.int32)
            return _step([Span(0, case.size, pages, adapters[0])])
        own = pages_for(_CONTEXT + 1)
        rows = [
            Span(
                _CONTEXT,
                1,
                np.arange(row * own, (row + 1) * own, dtype=np.int32),
                adapters[row % len(adapters)],
            )
            for row in range(case.size)
        ]
        return _step(rows)

    def run(self, step: StepInput) -> StepOutput:
        """Compute one step as the engine does."""
        batch = self._device.batch(step)
        return self._device.sample(self._decoder.logits(batch), batch)


def _fill_lanes(
    device: CpuDevice, spec: ModelSpec, dtype: torch.dtype, *, first: int, gain: bool
) -> list[tuple[int, ...]]:
    """Write eight random adapters, ranks 8 and 16 in turn, from page `first`; return all pages."""
    given = []
    for adapter in range(_MODES["eight"]):
        rank = rank_of(adapter)
        pages = tuple(range(first, first + rank // LANE_PAGE))
        first += len(pages)
        given.append(pages)
        targets = {
            module: TargetTensors(
                torch.randn(rank, inside, dtype=dtype) * inside**-0.5,
                torch.randn(rank, outside, dtype=dtype) * 0.1,
                torch.randn(outside) * 0.01 if gain else None,
                torch.randn(outside) * 0.01 if gain else None,
            )
            for module, (outside, inside) in spec.linears().items()
        }
        for layer in range(spec.layers):
            device.write_lanes(layer, pages, targets, {})
    return given


def _step(spans: Sequence[Span]) -> StepInput:
    lengths = [span.length for span in spans]
    positions = [np.arange(s.start, s.start + s.length, dtype=np.int32) for s in spans]
    tokens = np.random.default_rng(0).integers(16, 1000, sum(lengths), dtype=np.int32)
    return StepInput(
        tokens=tokens,
        positions=np.concatenate(positions),
        spans=spans,
        sample_at=(np.cumsum(lengths) - 1).astype(np.int32),
        sampling=[Sampling()] * len(spans),
    )


def measure(bench: Bench, cases: Sequence[Case], rounds: int) -> dict[Case, float]:
    """Return each case's median step time in milliseconds."""
    steps = {case: bench.step(case) for case in cases}
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        for case, step in steps.items():
            began = time.perf_counter()
            bench.run(step)
            taken = (time.perf_counter() - began) * 1000
            if turn:  # the first turn warms up
                times[case].append(taken)
    return {case: median(taken) for case, taken in times.items()}


def show(times: Mapping[Case, float]) -> None:
    """Print step times in milliseconds, and each mode's share of the base's."""
    shares = "".join(f"{mode + '/base':>11}" for mode in list(_MODES)[1:])
    print(f"{'step':16}" + "".join(f"{mode:>9}" for mode in _MODES) + shares)
    for kind, size in dict.fromkeys((case.kind, case.size) for case in times):
        row = [times.get(Case(kind, mode, size)) for mode in _MODES]
        base = row[0] or 1.0
        cells = "".join(f"{'' if t is None else f'{t:.2f}':>9}" for t in row)
        ratios = "".join(f"{'' if t is None else f'{t / base:.2f}':>11}" for t in row[1:])
        print(f"{f'{kind} {size}':16}{cells}{ratios}")


def print_profile(bench: Bench, case: Case, steps: int) -> None:
    """Print which operations take the time of one case's steps."""
    step = bench.step(case)
    bench.run(step)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            bench.run(step)
    print(f"{case}, {steps} steps")
    averages = recorded.key_averages()
    print(
        averages.table(sort_by="self_cpu_time_total", row_limit=_TOP_OPS, max_name_column_width=40)
    )


def _cases() -> list[Case]:
    decodes = [Case("decode", mode, rows) for rows in _ROWS for mode in _MODES]
    # A prompt has one adapter.
    prefills = [Case("prefill", mode, n) for n in _PREFILLS for mode in ("base", "one", "dora")]
    return decodes + prefills


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    folder: Path = args.model / args.dtype
    if not folder.is_dir():
        make(args.model)
    torch.set_num_threads(args.threads)
    cases = _cases()
    with torch.inference_mode():
        bench = Bench(folder, _DTYPES[args.dtype])
        if args.profile:
            wanted = [case for case in cases if str(case) == args.profile]
            if not wanted:
                sys.exit(f"--profile is one of {', '.join(map(str, cases))}")
            print_profile(bench, wanted[0], args.rounds)
            return 0
        show(measure(bench, cases, args.rounds))
    print(f"{args.dtype}, ms, medians of {args.rounds}, load {os.getloadavg()[0]:.1f}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.step")
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--profile", metavar="KIND:MODE:SIZE", help="e.g. decode:eight:8")
    return parser


if __name__ == "__main__":
    sys.exit(main())

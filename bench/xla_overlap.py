"""`make bench-xla-overlap`: what does it gain that the host prepares a step while XLA computes one?

    PJRT_DEVICE=CPU python -m bench.xla_overlap [--rounds 5]

One shard alone in this process decodes with one step under way beside the one that is prepared, and
with none (`StepRunner.depth` 2 and 1), in turns; a ratio compares the two of one turn. The demo
model's steps keep the host busy, the random model's the device. On XLA:CPU both share the cores.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

from loralane_server.config import ShardConfig
from loralane_server.device.xla.runner import XlaRunner

from bench.adapters import RANK, rank16, warm_page_cache
from bench.alone import Alone
from bench.model import DEFAULT_FOLDER, ready
from bench.report import save
from bench.xla_decode import ROWS, config_of

_PROMPT: Final = 32


@contextmanager
def depth(steps: int) -> Iterator[None]:
    """Let so many steps be under way; nothing may run when the block begins or ends."""
    usual, XlaRunner.depth = XlaRunner.depth, steps
    try:
        yield
    finally:
        XlaRunner.depth = usual


def step_ms(alone: Alone, digests: Sequence[str], tokens: int) -> float:
    """Return the mean step in ms while all rows decode."""
    streams = alone.finish(alone.start(digests, _PROMPT, tokens))
    begin, end = max(times[1] for times in streams), min(times[-1] for times in streams)
    together = [time for time in streams[0] if begin <= time <= end]
    return (together[-1] - together[0]) / (len(together) - 1) * 1e3


def compare(
    alone: Alone, digests: Sequence[str], tokens: int, rounds: int
) -> list[tuple[float, float]]:
    """Decode without overlap and with it, in turns; return the steps of each turn in ms."""
    step_ms(alone, digests, tokens)
    pairs = []
    for _ in range(rounds):
        with depth(1):
            apart = step_ms(alone, digests, tokens)
        with depth(2):
            pairs.append((apart, step_ms(alone, digests, tokens)))
    return pairs


def measure(
    name: str, config: ShardConfig, adapters: Sequence[str], args: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    """Compare one row and eight."""
    found = {}
    with Alone.running(config) as alone:
        digests = [alone.digest(adapter) for adapter in adapters] or [""] * ROWS
        for rows in (1, ROWS):
            case = f"{name}, {rows} rows"
            found[case] = compare(alone, digests[:rows], args.tokens, args.rounds)
            print(f"{case:16}{_line(found[case])}", flush=True)
    return found


def _line(pairs: Sequence[tuple[float, float]]) -> str:
    apart, overlapping = (median(steps) for steps in zip(*pairs, strict=True))
    gains = sorted(before / after for before, after in pairs)
    return (
        f"{apart:8.2f} ms a step apart,{overlapping:8.2f} overlapping: {median(gains):.2f} times "
        f"the rate ({gains[0]:.2f} to {gains[-1]:.2f})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    ready(args.model, "f32")
    adapters = rank16(args.model, "f32", ROWS)
    warm_page_cache(adapters.values())
    demo = ShardConfig(
        device="xla", dtype="float32", max_rows=ROWS, max_model_len=256, step_tokens=64, lanes=0
    )
    found = measure("demo", demo, (), args)
    config = config_of("xla", args.model, max_model_len=256, lanes=ROWS * RANK)
    found |= measure("m160", config, list(adapters), args)
    print(f"written to {save(args.out, {'apart_and_overlapping_ms': found})}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.xla_overlap", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160, help="of each row in a round")
    parser.add_argument("--out", type=Path, default=Path("bench/results/xla_overlap.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-xla-load`: what do eight decoding rows notice of an adapter that is being loaded?

    python -m bench.xla_load [--device xla] [--loads 24] [--rounds 5]

A shard alone in this process decodes eight rows with an adapter each. In turns nothing else
happens, or adapters that were never used before are loaded, one after another without a pause. The
p99 of the gaps between tokens is compared round by round.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from bench.adapters import RANK, rank16, warm_page_cache
from bench.alone import Alone
from bench.model import DEFAULT_FOLDER, ready
from bench.promises import at_most, conclude
from bench.report import save
from bench.windows import Gaps, Window, gaps_within
from bench.xla_decode import ROWS, config_of

#: Rows decode this long after the last load of a round, so that all windows lie within.
_MOST_OF_QUIET: Final = 1.3
_PROMPT: Final = 32
_LENGTH: Final = 512


@dataclass(frozen=True, slots=True)
class Round:
    """Gaps between tokens in a quiet window and in one of loads, which are as long; seconds."""

    quiet: Gaps
    loads: Gaps
    #: Median seconds of a load.
    load: float

    @property
    def p99_of_quiet(self) -> float:
        """The loads' p99 over that of the quiet window."""
        return self.loads.p99 / self.quiet.p99


def measure_round(alone: Alone, rows: Sequence[str], fresh: Sequence[str]) -> Round:
    """Decode; load every fresh adapter; then look for as long on rows that are left alone."""
    numbers = alone.start(rows, _PROMPT, _LENGTH - _PROMPT)
    alone.wait_for_tokens(numbers, 8)
    loads, begin = [], time.perf_counter()
    for digest in fresh:
        began = time.perf_counter()
        alone.load(digest)
        loads.append(time.perf_counter() - began)
    end = time.perf_counter()
    streams = alone.finish(numbers)
    last = min(times[-1] for times in streams)
    return Round(
        quiet=gaps_within(streams, Window(end, last)),
        loads=gaps_within(streams, Window(begin, end)),
        load=median(loads),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    ready(args.model, "f32")
    adapters = rank16(args.model, "f32", ROWS + args.loads * args.rounds)
    warm_page_cache(adapters.values())
    config = config_of(
        args.device, args.model, max_model_len=_LENGTH, lanes=2 * ROWS * RANK, host_cache=0
    )
    rounds = []
    with Alone.running(config) as alone:
        digests = [alone.digest(name) for name in adapters]
        rows, fresh = digests[:ROWS], digests[ROWS:]
        for turn in range(args.rounds):
            loaded = fresh[turn * args.loads : (turn + 1) * args.loads]
            rounds.append(measure_round(alone, rows, loaded))
            print(_line(rounds[-1]), flush=True)
    print(f"written to {save(args.out, {'rounds': [asdict(each) for each in rounds]})}")
    ratio = median(each.p99_of_quiet for each in rounds)
    return conclude([at_most("p99 between tokens while loading, of quiet", ratio, _MOST_OF_QUIET)])


def _line(found: Round) -> str:
    quiet, loads = found.quiet, found.loads
    return (
        f"p50 {quiet.p50 * 1e3:.1f} -> {loads.p50 * 1e3:.1f} ms, "
        f"p99 {quiet.p99 * 1e3:.1f} -> {loads.p99 * 1e3:.1f} ms ({found.p99_of_quiet:.2f}), "
        f"gaps {quiet.count} and {loads.count}, a load {found.load * 1e3:.0f} ms"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.xla_load", allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "xla"), default="xla")
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--loads", type=int, default=10, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/results/xla_load.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-xla-load`: what do eight decoding rows notice of an adapter that is being loaded?

    python -m bench.xla_load [--device xla] [--loads 24] [--rounds 5]

A shard alone in this process decodes eight rows with an adapter each. For a while nothing else
happens; then adapters that were never used before are loaded, one after another without a pause;
then nothing again. The p99 of the gaps between tokens is compared round by round.
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
from bench.windows import Comparison, Window, compare
from bench.xla_decode import ROWS, config_of

_MOST_OF_QUIET: Final = 1.3
_PROMPT: Final = 32
_LENGTH: Final = 256
#: Tokens of each row before rows count, and before the loads begin.
_WARM: Final = 8
_BEFORE: Final = 72


@dataclass(frozen=True, slots=True)
class Round:
    """What loads did to the gaps between tokens, in seconds."""

    gaps: Comparison
    #: Median seconds of a load.
    load: float


def measure_round(alone: Alone, rows: Sequence[str], fresh: Sequence[str]) -> Round:
    """Decode, and load every fresh adapter in the midst of it."""
    numbers = alone.start(rows, _PROMPT, _LENGTH - _PROMPT)
    alone.wait_for_tokens(numbers, _WARM)
    quiet = time.perf_counter()
    alone.wait_for_tokens(numbers, _BEFORE)
    loads, begin = [], time.perf_counter()
    for digest in fresh:
        began = time.perf_counter()
        alone.load(digest)
        loads.append(time.perf_counter() - began)
    end = time.perf_counter()
    streams = alone.finish(numbers)
    last = min(times[-1] for times in streams)
    gaps = compare(streams, Window(quiet, begin), Window(begin, end), Window(end, last))
    return Round(gaps, median(loads))


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
    ratio = median(each.gaps.p99_of_quiet for each in rounds)
    return conclude([at_most("p99 between tokens while loading, of quiet", ratio, _MOST_OF_QUIET)])


def _line(found: Round) -> str:
    quiet, loads, ratio = found.gaps.quiet, found.gaps.storm, found.gaps.p99_of_quiet
    return (
        f"p50 {quiet.p50 * 1e3:.1f} -> {loads.p50 * 1e3:.1f} ms, "
        f"p99 {quiet.p99 * 1e3:.1f} -> {loads.p99 * 1e3:.1f} ms ({ratio:.2f}), "
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

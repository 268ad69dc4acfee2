"""`make bench-sim`: the highest load that each rule for choosing a shard carries, on four traces.

    python -m bench.sim [--quick] [--requests 12000] [--policies "expected time,least loaded"]

Nothing is measured: the figures are the same on every machine. Exits with 1 if a goal is missed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.sim.goodput import LIMIT_S, SHARE, Trial, goodput
from bench.sim.policies import POLICIES
from bench.sim.traces import WORKLOADS, Workload, trace

#: What the product's policy must carry over what these carry, on every trace.
GOALS: Final = {"least loaded": 1.35, "ray multiplex": 1.15}
OURS: Final = "expected time"
_SEEDS: Final = (1, 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(argv)
    names = options.policies.split(",")
    print(f"requests/s of 16 shards with {SHARE:.0%} of first tokens within {LIMIT_S} s")
    print(f"{'':16}" + "".join(f"{name:>15}" for name in names))
    table = {}
    for workload in WORKLOADS:
        table[workload.name] = row = _row(workload, names, options.requests)
        print(f"{workload.name:16}" + "".join(f"{row[name]:15.1f}" for name in names), flush=True)
    return 0


def _row(workload: Workload, names: Sequence[str], requests: int) -> dict[str, float]:
    traces = [trace(workload, requests, seed) for seed in _SEEDS]
    return {name: goodput(Trial(POLICIES[name], traces)) for name in names}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.sim", allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=12000, help="of each trace")
    parser.add_argument("--policies", default=",".join(POLICIES), help="by commas")
    parser.add_argument("--out", type=Path, default=Path("bench/results/sim.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-sim`: the highest load that each rule for choosing a shard carries, on four traces.

    python -m bench.sim [--quick] [--requests 6000] [--policies "expected time,least loaded"]

Nothing is measured: the figures are the same on every machine. Exits with 1 if a goal is missed.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.report import save
from bench.sim.cluster import SHARDS, Cluster, Outcome
from bench.sim.costs import COSTS
from bench.sim.goodput import LIMIT_S, SHARE, Trial, goodput
from bench.sim.policies import POLICIES
from bench.sim.traces import ADAPTERS, WORKLOADS, Arrival, Workload, trace

OURS: Final = "expected time"
#: On every trace the product's policy must carry so many times what these carry.
GOALS: Final = {"least loaded": 1.35, "ray multiplex": 1.15}
_SEEDS: Final = (1, 2)
_REQUESTS, _QUICK_REQUESTS = 6000, 2000
#: Requests per second at which latency is drawn, and on which trace.
_LOADS: Final = (10, 20, 30, 36, 42, 48, 54, 60, 66, 72)
_DRAWN: Final = WORKLOADS[0]

#: By workload, then by policy.
Table = Mapping[str, Mapping[str, float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(argv)
    names = options.policies.split(",")
    requests = options.requests or (_QUICK_REQUESTS if options.quick else _REQUESTS)
    wanted = [w for w in WORKLOADS if w.name in options.traces.split(",")]
    table = _table(wanted, names, requests)
    missed = missed_goals(table)
    curves = {} if options.quick else {name: _curve(name, requests // 2) for name in names}
    about = {"shards": SHARDS, "adapters": ADAPTERS, "requests": requests, "costs": asdict(COSTS)}
    results = {**about, "goodput": table, "missed": missed, "drawn": _DRAWN.name, "curves": curves}
    print(f"written to {save(options.out, results)}")
    for line in missed:
        print(line)
    return 1 if missed else 0


def missed_goals(table: Table) -> list[str]:
    """Return what is missing, a line for each goal that is missed."""
    return [
        f"{workload}: {row[OURS] / row[other]:.2f} x {other}, must be {least:.2f}"
        for workload, row in table.items()
        for other, least in GOALS.items()
        if OURS in row and other in row and row[OURS] < least * row[other]
    ]


def _table(
    workloads: Sequence[Workload], names: Sequence[str], requests: int
) -> dict[str, dict[str, float]]:
    print(f"requests/s of {SHARDS} shards with {SHARE:.0%} of first tokens within {LIMIT_S} s")
    print(f"{'':16}" + "".join(f"{name:>15}" for name in names), flush=True)
    table = {}
    for workload in workloads:
        table[workload.name] = row = _row(workload, names, requests)
        print(f"{workload.name:16}" + "".join(f"{row[name]:15.1f}" for name in names), flush=True)
    return table


def _row(workload: Workload, names: Sequence[str], requests: int) -> dict[str, float]:
    traces = [trace(workload, requests, seed) for seed in _SEEDS]
    return {name: goodput(Trial(POLICIES[name], traces)) for name in names}


def _curve(name: str, requests: int) -> list[dict[str, float]]:
    arrivals = trace(_DRAWN, requests, _SEEDS[0])
    return [{"rate": rate, **asdict(_outcome(name, arrivals, rate))} for rate in _LOADS]


def _outcome(name: str, arrivals: Sequence[Arrival], rate: float) -> Outcome:
    cluster = Cluster(POLICIES[name](), COSTS, SHARDS)
    cluster.play(arrivals, rate)
    return cluster.outcome()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.sim", allow_abbrev=False)
    parser.add_argument("--requests", type=int, help=f"of each trace (default: {_REQUESTS})")
    parser.add_argument("--quick", action="store_true", help="a third of that, without latency")
    parser.add_argument("--policies", default=",".join(POLICIES), help="by commas")
    names = ",".join(workload.name for workload in WORKLOADS)
    parser.add_argument("--traces", default=names, help="by commas")
    parser.add_argument("--out", type=Path, default=Path("bench/results/sim.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`make fuzz`: many mutated adapters through the real reading path.

    python -m tests.fuzz.run [--headers 200000] [--configs 20000] [--first SEED]
    python -m tests.fuzz.run --headers 1 --configs 0 --first 4711     one case again

Each must be read or refused by a typed error, within 50 ms of processor time and 64 MiB.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from loralane_server.errors import ShardError
from tqdm import tqdm

from tests.fuzz.configs import config_case
from tests.fuzz.headers import header_case
from tests.fuzz.memory import peak_bytes, restart_peak
from tests.fuzz.reading import Case, read

MOST_CPU_S: Final = 0.050
MOST_BYTES: Final = 64 << 20
KINDS: Final[dict[str, Callable[[int], Case]]] = {"headers": header_case, "configs": config_case}
#: A case that was too slow is timed again so often: a neighbour on the processor is no defect.
_AGAIN: Final = 4
_SHOWN: Final = 20


@dataclass(frozen=True)
class Cost:
    """What reading one case took."""

    cpu_s: float = 0.0
    #: Growth of the process at its highest.
    bytes: int = 0


@dataclass
class Report:
    """What a run found."""

    kind: str
    most_cpu_s: float = MOST_CPU_S
    #: Seeds that broke a promise, and which.
    failures: list[tuple[int, str]] = field(default_factory=list)
    #: "read", or the name of the error that refused it -> cases.
    outcomes: Counter[str] = field(default_factory=Counter)
    #: By their seeds.
    slowest: tuple[Cost, int] = (Cost(), 0)
    largest: tuple[Cost, int] = (Cost(), 0)

    def add(self, seed: int, outcome: str, cost: Cost) -> None:
        """Take over one case."""
        self.outcomes[outcome] += 1
        self.slowest = max(self.slowest, (cost, seed), key=lambda one: one[0].cpu_s)
        self.largest = max(self.largest, (cost, seed), key=lambda one: one[0].bytes)
        if cost.cpu_s > self.most_cpu_s:
            self.failures.append((seed, f"{cost.cpu_s * 1e3:.0f} ms of processor time: {outcome}"))
        if cost.bytes > MOST_BYTES:
            self.failures.append((seed, f"{cost.bytes / 2**20:.0f} MiB: {outcome}"))

    def lines(self) -> list[str]:
        """Return the report as text; each failure with the command that shows it again."""
        told = [f"{self.kind}: {self.outcomes.total()} cases, {len(self.failures)} failures"]
        told += [f"  {count:7} {name}" for name, count in self.outcomes.most_common()]
        for what, (cost, seed) in (("slowest", self.slowest), ("largest", self.largest)):
            told.append(
                f"  {what}: seed {seed}, {cost.cpu_s * 1e3:.1f} ms, {cost.bytes / 2**20:.1f} MiB"
            )
        others = " ".join(f"--{kind} {int(kind == self.kind)}" for kind in KINDS)
        for seed, failure in self.failures[:_SHOWN]:
            told += [f"FAILED {failure}", f"  python -m tests.fuzz.run {others} --first {seed}"]
        return told


def fuzz(kind: str, seeds: Iterable[int], folder: Path, most_cpu_s: float = MOST_CPU_S) -> Report:
    """Read the case of every seed; `folder` takes the files of those that are read from a disk."""
    report = Report(kind, most_cpu_s)
    gc.collect()
    gc.freeze()  # what was imported is not searched again during somebody's 50 ms
    try:
        for seed in seeds:
            case = KINDS[kind](seed)
            outcome, cost = _measured(case, folder)
            for _ in range(_AGAIN):
                if cost.cpu_s > most_cpu_s:
                    cost = Cost(min(cost.cpu_s, _measured(case, folder)[1].cpu_s), cost.bytes)
            if outcome.startswith("defect"):
                report.failures.append((seed, outcome))
            report.add(seed, outcome.partition(":")[0], cost)
    finally:
        gc.unfreeze()
    return report


def _measured(case: Case, folder: Path) -> tuple[str, Cost]:
    before, began = restart_peak(), time.process_time()
    outcome = _outcome(case, folder)
    cpu_s = time.process_time() - began
    return outcome, Cost(cpu_s, max(peak_bytes() - before, 0))


def _outcome(case: Case, folder: Path) -> str:
    """How a case ended: "read", the name of the typed error, or "defect: ..."."""
    try:
        read(case, folder)
    except ShardError as exc:
        return _refusal(exc)
    except Exception as exc:
        return f"defect: {type(exc).__name__}: {exc!a:.300}"
    return "read"


def _refusal(error: ShardError) -> str:
    """What is told to a client must be short, and must fit into a message of the wire."""
    try:
        size = len(error.to_proto().SerializeToString())
    except ValueError as exc:
        return f"defect: an error that cannot be sent: {exc!a:.300}"
    if size > 4096:
        return f"defect: a message of {size} bytes: {error.message!a:.100}"
    return type(error).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run")
    parser.add_argument("--headers", type=int, default=200_000)
    parser.add_argument("--configs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    args = parser.parse_args(argv)
    failed = False
    for kind in KINDS:
        seeds = range(args.first, args.first + getattr(args, kind))
        if not seeds:
            continue
        with tempfile.TemporaryDirectory() as folder:
            report = fuzz(kind, tqdm(seeds, kind, mininterval=1), Path(folder))
        sys.stdout.write("\n".join(report.lines()) + "\n")
        failed |= bool(report.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.cases.run [FILE] [ID ...]`: one line a case, exit status 1 on a failure."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.cases.case import read_cases
from tests.cases.runner import Runner, Verdict, ordered
from tests.cases.tensors import NotUnderstood

DEFAULT = Path(__file__).with_name("cases.dev.jsonl")


def main(arguments: Sequence[str]) -> int:
    """Run the cases of a file, or those of its ids that are named."""
    path = Path(arguments[0]) if arguments else DEFAULT
    try:
        cases = [c for c in read_cases(path) if not arguments[1:] or c.id in arguments[1:]]
    except (OSError, ValueError, NotUnderstood) as exc:
        sys.stdout.write(f"{path}: {exc}\n")
        return 2
    counts: Counter[str] = Counter()
    runner = Runner()
    try:
        for case in ordered(cases):
            started = time.monotonic()
            verdict = runner.run(case)
            counts[verdict.outcome] += 1
            sys.stdout.write(f"{line(case.id, verdict)}  [{time.monotonic() - started:.1f} s]\n")
            sys.stdout.flush()
    finally:
        runner.close()
    sys.stdout.write(", ".join(f"{counts[k]} {k}" for k in ("pass", "fail", "skip")) + "\n")
    return 1 if counts["fail"] or not cases else 0


def line(id: str, verdict: Verdict) -> str:
    """Return what a person reads about one case."""
    return f"{verdict.outcome:4}  {id}" + "".join(f"\n      {why}" for why in verdict.reasons)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

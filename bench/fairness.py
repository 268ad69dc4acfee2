"""Draws what each adapter got in a flood, from the last run of `bench.flood`.

python -m bench.fairness [--results bench/results/flood.json] [--out docs/img/fairness.png]
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes

from bench.flood import FAIR, FIRST_COME, FLOOD, NAMES
from bench.plots import ACCENT, COLORS, INK, picture

_COLORS: Final = {FAIR: INK, FLOOD: ACCENT, FIRST_COME: COLORS[0]}
_LABELS: Final = {
    FAIR: "nobody floods",
    FLOOD: "one floods",
    FIRST_COME: "one floods, first come first served",
}


def fairness(rounds: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a run's rounds, as `bench.flood` writes them.

    Left: tokens that each adapter had got, by time, in the first round. Right: how long those that
    do not flood waited for a first token, in all rounds.
    """
    with picture(path, panels=2) as (left, right):
        _draw_served(left, rounds)
        _draw_waits(right, rounds)
        left.legend(handles=right.get_lines(), loc="upper left", fontsize="small")


def _draw_served(axes: Axes, rounds: Sequence[Mapping[str, Any]]) -> None:
    """Lines of all victims look alike: that they lie together is the point."""
    for name in (FLOOD, FIRST_COME):
        *victims, flooder = next(one for one in rounds if one["name"] == name)["served"].values()
        for line in victims:
            axes.plot(line, color=_COLORS[name], linewidth=1.0, alpha=0.8)
        axes.plot(flooder, color=_COLORS[name], linewidth=1.6, linestyle="--")
    axes.set_title("tokens of each adapter (dashed: the one that floods)")
    axes.set_xlabel("seconds")


def _draw_waits(axes: Axes, rounds: Sequence[Mapping[str, Any]]) -> None:
    """Waits without an end are what a line lacks to 100 %."""
    for name in NAMES:
        waits = sorted(wait for one in rounds if one["name"] == name for wait in one["victims"])
        shares = [(n + 1) / len(waits) * 100 for n in range(len(waits))]
        axes.plot(waits, shares, color=_COLORS[name], linewidth=1.6, label=_LABELS[name])
    axes.set_xscale("log")
    axes.set_title("% of the others' requests with a first token")
    axes.set_xlabel("seconds after they were sent")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.fairness")
    parser.add_argument("--results", type=Path, default=Path("bench/results/flood.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/img/fairness.png"))
    args = parser.parse_args(argv)
    if not args.results.exists():
        sys.exit(f"there is no {args.results}: make bench-flood writes it")
    fairness(json.loads(args.results.read_text(encoding="utf-8"))["rounds"], args.out)
    print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
from matplotlib.figure import Figure

from bench.flood import FAIR, FIRST_COME, FLOOD, NAMES

#: Readable on white and on black.
_GREY, _BLUE, _ORANGE = "#8a8f98", "#3b82c4", "#e0803a"
_COLOURS: Final = {FAIR: _GREY, FLOOD: _BLUE, FIRST_COME: _ORANGE}
_LABELS: Final = {
    FAIR: "nobody floods",
    FLOOD: "one floods, Loralane",
    FIRST_COME: "one floods, first come first served",
}
_SIZE: Final = (8.0, 3.2)
_DPI: Final = 110


def draw(rounds: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the picture of a run's rounds, as `bench.flood` writes them; of each kind the first.

    Left: tokens that each adapter had got, by time. Right: how long the victims waited.
    """
    by_name = {name: next(one for one in rounds if one["name"] == name) for name in NAMES}
    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    _served(left, by_name)
    _waits(right, rounds)
    for axes in (left, right):
        _plain(axes)
    return figure


def _served(axes: Axes, by_name: Mapping[str, Mapping[str, Any]]) -> None:
    """Lines of all victims look alike: that they lie together is the point."""
    for name in (FLOOD, FIRST_COME):
        *victims, flooder = by_name[name]["served"].values()
        for n, line in enumerate(victims):
            label = f"victims: {_LABELS[name]}" if n == 0 else None
            axes.plot(line, color=_COLOURS[name], linewidth=0.9, alpha=0.9, label=label)
        axes.plot(flooder, color=_COLOURS[name], linewidth=1.6, linestyle="--")
    axes.set_xlabel("seconds (dashed: the adapter that floods)")
    axes.set_ylabel("tokens it had got")


def _waits(axes: Axes, rounds: Sequence[Mapping[str, Any]]) -> None:
    for name in NAMES:
        waits = sorted(wait for one in rounds if one["name"] == name for wait in one["victims"])
        shares = [(n + 1) / len(waits) * 100 for n in range(len(waits))]
        axes.plot(waits, shares, color=_COLOURS[name], linewidth=1.6, label=_LABELS[name])
    axes.set_xscale("log")
    axes.set_xlabel("seconds to the first token")
    axes.set_ylabel("% of the victims' requests")
    legend = axes.legend(loc="lower right", frameon=False, fontsize=7.5)
    for text in legend.get_texts():
        text.set_color(_GREY)


def _plain(axes: Axes) -> None:
    axes.patch.set_alpha(0)
    axes.grid(color=_GREY, alpha=0.25, linewidth=0.6)
    axes.tick_params(colors=_GREY, labelsize=8)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(_GREY)
        label.set_fontsize(8.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GREY)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.fairness")
    parser.add_argument("--results", type=Path, default=Path("bench/results/flood.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/img/fairness.png"))
    args = parser.parse_args(argv)
    rounds = json.loads(args.results.read_text(encoding="utf-8"))["rounds"]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(rounds).savefig(args.out, transparent=True)
    print(f"{args.out}: {args.out.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

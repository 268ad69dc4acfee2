"""`make bench-plots`: pictures for the guides, from what the benches wrote.

    python -m bench.plots [--sim bench/results/sim.json] [--folder docs/img]

Pictures have no background, and colours that can be read on a light page and on a dark one.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: Of the page's text and lines: the same contrast to white and to black.
INK: Final = "#7d8590"
#: Ours, then others in turn.
ACCENT: Final = "#2f81f7"
COLORS: Final = ("#db6d28", "#3fb950", "#a371f7", "#bf8700", "#e5534b", "#39a0a0", "#d4539b")
#: A guide is a page of text: a picture may not weigh more than much of it, bytes.
LARGEST: Final = 60_000
_STYLE: Final[Mapping[str, Any]] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": "medium",
    "font.size": 9,
    "grid.alpha": 0.3,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
#: Seconds that the panels show at most: of the median and of the 99th percentile.
_SHOWN: Final = {"p50": 1.5, "p99": 3.0}


@contextmanager
def picture(path: Path, panels: int) -> Iterator[Sequence[Axes]]:
    """Give axes side by side to draw on; the picture is written afterwards.

    Raises ValueError if it is larger than a picture in a guide may be.
    """
    with style.context(dict(_STYLE)):
        figure = Figure(figsize=(4.2 * panels, 3.0), layout="constrained")
        axes = [figure.add_subplot(1, panels, number + 1) for number in range(panels)]
        for panel in axes:
            panel.grid(visible=True)
            panel.set_prop_cycle(color=COLORS)
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=90, transparent=True)
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(f"{path} has {size} bytes, {LARGEST} are allowed: draw less")


def latency_against_load(results: Mapping[str, Any], path: Path) -> None:
    """Draw the time to first token by policy, from what `bench.sim` wrote."""
    ours, *others = results["curves"]
    with picture(path, panels=len(_SHOWN)) as axes:
        for panel, (figure, most) in zip(axes, _SHOWN.items(), strict=True):
            for name in (*others, ours):
                points = results["curves"][name]
                rates = [point["rate"] for point in points]
                seconds = [point[figure] for point in points]
                (line,) = panel.plot(rates, seconds, label=name, linewidth=1.2)
            line.set(color=ACCENT, linewidth=2.6)
            panel.set_ylim(0, most)
            panel.set_xlabel(f"requests/s, {results['shards']} shards ({results['drawn']})")
            panel.set_title(f"time to first token, {figure}, seconds")
        axes[0].legend(fontsize="small")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots", allow_abbrev=False)
    parser.add_argument("--sim", type=Path, default=Path("bench/results/sim.json"))
    parser.add_argument("--folder", type=Path, default=Path("docs/img"))
    options = parser.parse_args(argv)
    results = json.loads(options.sim.read_text(encoding="utf-8"))
    latency_against_load(results, options.folder / "routing.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Results for people (a table) and for later (a JSON file)."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_HEADER: Final = (
    "mode streams   tok/s  decode  of base   first p50     p99   token p50     p99  client  load"
)


@dataclass(frozen=True, slots=True)
class Case:
    """Medians of several rounds of one mode with one number of streams."""

    mode: str
    streams: int
    #: Requests per second of open arrivals; None = a burst.
    rate: float | None
    #: The fields of `figures.Round`, medians.
    figures: Mapping[str, float]
    #: Median of the rounds' decode rates, each over the base's of the same turn; None without base.
    decode_of_base: float | None
    #: CPU seconds of the load generator per second.
    client_share: float
    #: The machine's load average over a minute, at the end.
    load: float


def show(cases: Sequence[Case]) -> None:
    """Print a table: rates in tokens per second, times in milliseconds."""
    print(_HEADER)
    for case in cases:
        print(_row(case))


def _row(case: Case) -> str:
    f = case.figures
    decode = f"{f['decode']:.0f}" if case.rate is None else ""
    ratio = "" if case.decode_of_base is None else f"{case.decode_of_base:.2f}"
    return (
        f"{case.mode:5}{case.streams:7} {f['end_to_end']:7.0f} {decode:>7} {ratio:>8} "
        f"{f['first_p50'] * 1e3:11.1f} {f['first_p99'] * 1e3:7.1f} "
        f"{f['between_p50'] * 1e3:11.1f} {f['between_p99'] * 1e3:7.1f} "
        f"{case.client_share:7.0%} {case.load:5.1f}"
    )


def write(path: Path, about: Mapping[str, object], cases: Sequence[Case]) -> Path:
    """Write everything as JSON; return the path."""
    return save(path, {**about, "cases": [asdict(case) for case in cases]})


def save(path: Path, results: Mapping[str, object]) -> Path:
    """Write results as JSON, with when and where they were measured; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()}
    record = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        **results,
    }
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return path

"""Checks of the server after a case: alive, neighbours right, memory, metrics, logs, the hub."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tests.cases.expect import Scope, check
from tests.cases.tensors import NotUnderstood
from tests.cases.watch import read_metrics

#: Growth that an allocator may keep where a case allows none.
_SLACK_MB: Final = 32
_TEMPORARY: Final = re.compile(r".*\.incomplete|tmp.*|.*\.tmp")


@check("server_alive")
def _alive(value: Any, scope: Scope) -> Iterator[str]:
    if scope.run.alive is not value:
        yield "the server is not ready afterwards"


@check("other_adapters_ok")
def _others(_: Any, scope: Scope) -> Iterator[str]:
    if scope.run.neighbour_fault is not None:
        yield f"afterwards {scope.run.neighbour_fault}"


@check("warning")
def _warning(_: Any, scope: Scope) -> Iterator[str]:
    if not re.search(r"\bwarning\b", scope.run.log, re.IGNORECASE):
        yield "the server logged no warning"


@check("logs_never_contain")
def _logs(value: Any, scope: Scope) -> Iterator[str]:
    yield from (f"the log holds {text!r}" for text in value if text in scope.run.log)


@check("file_absent")
def _absent(value: Any, scope: Scope) -> Iterator[str]:
    path = Path(value.replace("$TMP", str(scope.run.server.tmp)))
    if path.exists():
        yield f"{value} was made"


@check("no_hub_traffic")
def _no_traffic(_: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.replies:
        if reply.hub_requests:
            yield f"{reply.name}: {reply.hub_requests} requests to the hub"


@check("hub_get_count")
def _downloads(value: Any, scope: Scope) -> Iterator[str]:
    """How often a file was sent whole; looks at a header by range are no downloads."""
    for name, count in value.items():
        owner, repo, file = name.split("/", 2)
        found = scope.run.server.hub.downloads(f"{owner}/{repo}", file)
        if found != count:
            yield f"{name} was downloaded {found} times"


@check("hub_get_count_max")
def _few_requests(value: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        counts = scope.run.server.hub.requests(str(reply.adapter))
        for file, count in counts.items():
            if count > value:
                yield f"{reply.adapter}: {file} was asked for {count} times"


@check("no_partial_entry_in_model_list")
def _no_entry(_: Any, scope: Scope) -> Iterator[str]:
    listed = {model["id"] for model in scope.run.models["data"]}
    yield from (f"{r.adapter} is listed" for r in scope.answers if r.adapter in listed)


@check("no_temp_files_left")
def _no_temporary(_: Any, scope: Scope) -> Iterator[str]:
    cache = scope.run.server.seen_from_inside(scope.run.server.cache)
    left = [p.name for p in cache.rglob("*") if p.is_file() and _TEMPORARY.fullmatch(p.name)]
    if left:
        yield f"left behind: {left}"


@check("metrics_after")
def _metrics_after(value: Any, scope: Scope) -> Iterator[str]:
    for name, wanted in value.items():
        found = read_metrics(scope.run.metrics_after, name)
        if found != wanted:
            yield f"{name} is {found:g}"


@check("metric_delta")
def _metric_delta(value: Any, scope: Scope) -> Iterator[str]:
    for name, wanted in value.items():
        change = read_metrics(scope.run.metrics_after, name) - scope.run.steps.marks[name]
        if change != wanted:
            yield f"{name} changed by {change:g}"


@check("slot_freed_within_s")
def _freed(value: Any, scope: Scope) -> Iterator[str]:
    seconds = scope.run.idle_after_s
    if seconds is None or seconds > value:
        yield f"idle after {seconds} s"


@check("parallel_health_latency_s_max")
def _health(value: Any, scope: Scope) -> Iterator[str]:
    if not scope.run.health_s or max(scope.run.health_s) > value:
        yield f"health took {max(scope.run.health_s, default=0):.2f} s"


@check("rss_growth_mb_max")
def _growth(value: Any, scope: Scope) -> Iterator[str]:
    first, *_, last = scope.run.steps.resident
    yield from _grown(last - first, value)


@check("rss_growth_after_first_pass_mb_max")
def _growth_after(value: Any, scope: Scope) -> Iterator[str]:
    """Resident bytes are kept before the steps, after each round of a repeat, and at the end."""
    if len(scope.run.steps.resident) < 4:
        raise NotUnderstood("growth after the first pass without a repeat")
    yield from _grown(scope.run.steps.resident[-1] - scope.run.steps.resident[1], value)


@check("memory_returns_to_start")
def _returned(_: Any, scope: Scope) -> Iterator[str]:
    yield from _growth(_SLACK_MB, scope)


def _grown(growth: int, most_mb: float) -> Iterator[str]:
    if growth > most_mb * 1_000_000:
        yield f"memory grew by {growth / 1e6:.0f} MB"


@check("device_memory_growth_after_first_pass_mb_max")
def _device_growth(_: Any, scope: Scope) -> Iterator[str]:
    """Lanes and pages are allocated once: their number is the device memory that adapters have."""
    for name in ("pool_lanes", "pool_pages"):
        if read_metrics(scope.run.metrics_after, name) != read_metrics(
            scope.run.metrics_before, name
        ):
            yield f"{name} changed"


@check("max_inter_token_gap_s")
def _gap(value: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        times = [at for at, line in reply.lines if line.startswith("data:")]
        gap = max((b - a for a, b in pairwise(times)), default=0.0)
        if gap > value:
            yield f"{reply.name}: {gap:.1f} s between two tokens"

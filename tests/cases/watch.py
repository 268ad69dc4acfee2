"""The server seen from outside: its metrics, and when it is idle."""

import asyncio
import time
from typing import Final

import httpx

from tests.cases.tensors import NotUnderstood

_TICK_S: Final = 0.02
#: What case files call a quantity, in terms of the exported gauges.
_QUANTITIES: Final = {
    "running": ("loralane_requests_running",),
    "queued": ("loralane_requests_waiting",),
    "kv_used": ("loralane_pages", "loralane_pages_free"),
    "rows_used": ("loralane_rows", "loralane_rows_free"),
    "compiled_graphs": ("loralane_graphs_compiled_total",),
    "pool_lanes": ("loralane_lanes",),
    "pool_pages": ("loralane_pages",),
}


def samples(exposition: str) -> dict[str, float]:
    """Return the samples of a Prometheus page, by name with labels."""
    lines = (line for line in exposition.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def read_metrics(page: httpx.Response, quantity: str) -> float:
    """Return one quantity. Raises NotUnderstood where the server exports none of that name."""
    found = samples(page.text)
    names = _QUANTITIES.get(quantity, (quantity,))
    if names[0] not in found:
        raise NotUnderstood(f"metric {quantity!r}: the server exports none")
    return found[names[0]] - sum(found[name] for name in names[1:])


async def wait_idle(http: httpx.AsyncClient, timeout_s: float) -> bool:
    """Wait until nothing runs, waits or holds a row; whether that came in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        page = await http.get("/metrics")
        if not any(read_metrics(page, name) for name in ("running", "queued", "rows_used")):
            return True
        await asyncio.sleep(_TICK_S)
    return False

"""The process's memory at its highest, as Linux counts it."""

from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")


def restart_peak() -> int:
    """Forget the peak so far; return the bytes that the process holds now."""
    _CLEAR.write_text("5")  # proc(5): resets the high-water mark
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the most bytes that the process held since `restart_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no {field} in {_STATUS}")

"""A server's health asked again and again, from a process of its own.

The case's client builds bodies of many megabytes, and whoever shares its interpreter waits for that
too: such a wait would be taken for the server's.
"""

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import httpx

_EVERY_S: Final = 0.05
_TIMEOUT_S: Final = 60


@contextlib.contextmanager
def pinged(url: str) -> Iterator[list[float]]:
    """Ask until the end of the block; the list then holds the seconds that each answer took."""
    latencies: list[float] = []
    command = [sys.executable, "-m", "tests.cases.pings", url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the first answer: from now on every pause is seen
        try:
            yield latencies
        finally:
            later, _ = process.communicate()
            latencies += map(float, later.split())
    assert process.returncode == 0, "the server's health could not be asked"


def _ping(url: str) -> None:
    latencies = []
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as http:
        http.get("/health/live")
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        while not select.select([sys.stdin], [], [], _EVERY_S)[0]:
            started = time.monotonic()
            http.get("/health/live")
            latencies.append(time.monotonic() - started)
    sys.stdout.write(" ".join(map(str, latencies)))


if __name__ == "__main__":
    _ping(sys.argv[1])

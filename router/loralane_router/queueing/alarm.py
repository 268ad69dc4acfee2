"""Calls back once, at a time that may be changed until then."""

import asyncio
from collections.abc import Callable


class Alarm:
    """One timer of the running event loop."""

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Ring at that time of the clock instead of any other; None = not at all."""
        if at == self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at, self._timer = at, None
        if at is not None:
            delay = max(0.0, at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._go_off)

    def _go_off(self) -> None:
        self._at = self._timer = None
        self._ring()

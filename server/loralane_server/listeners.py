"""Who is told what each step changed."""

from collections.abc import Sequence
from dataclasses import dataclass

from loralane_server.rows import Capacity, Residency, Row, Sink, StepEvent


@dataclass(slots=True)
class _Count:
    """Admissions of one sink."""

    admitted: int = 0
    told: int = 0


class Listeners:
    """Owns the sinks, in order of arrival. Touched only by the engine's thread."""

    def __init__(self) -> None:
        self._sinks: dict[Sink, _Count] = {}
        self._told_capacity: Capacity | None = None

    def add(self, sink: Sink, step: int, capacity: Capacity) -> None:
        """Tell `sink` everything from now on, beginning with the capacity."""
        self._sinks[sink] = _Count()
        sink(StepEvent(step, (), (), capacity))

    def remove(self, sink: Sink) -> None:
        """Tell `sink` nothing more."""
        del self._sinks[sink]

    def count(self, sink: Sink) -> None:
        """Note an admission of `sink`, refused or not; one that does not listen is not told."""
        if sink in self._sinks:
            self._sinks[sink].admitted += 1

    def tell(
        self,
        step: int,
        rows: Sequence[Row],
        residency: tuple[Residency, ...],
        capacity: Capacity,
    ) -> None:
        """Send each sink the news of its own rows, which are old news then; nobody nothing.

        capacity: counts all admissions that were noted.
        """
        told = [row for row in rows if row.events]
        is_news = bool(residency) or capacity != self._told_capacity
        for sink, count in self._sinks.items():
            events = tuple(event for row in told if row.sink == sink for event in row.events)
            if events or is_news or count.admitted != count.told:
                sink(StepEvent(step, events, residency, capacity, count.admitted))
                count.told = count.admitted
        for row in told:
            row.events.clear()
        self._told_capacity = capacity

    def check(self) -> None:
        """Assert that nobody was told of more admissions than there were."""
        assert all(0 <= count.told <= count.admitted for count in self._sinks.values())

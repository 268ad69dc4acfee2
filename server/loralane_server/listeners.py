"""Who is told what each step changed."""

from collections.abc import Sequence

from loralane_server.rows import Capacity, Residency, Row, Sink, StepEvent


class Listeners:
    """Owns the sinks, in order of arrival. Touched only by the engine's thread."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self._told_capacity: Capacity | None = None

    def add(self, sink: Sink, step: int, capacity: Capacity) -> None:
        """Tell `sink` everything from now on, beginning with the capacity."""
        self._sinks.append(sink)
        sink(StepEvent(step, (), (), capacity))

    def remove(self, sink: Sink) -> None:
        """Tell `sink` nothing more."""
        self._sinks.remove(sink)

    def tell(
        self,
        step: int,
        rows: Sequence[Row],
        residency: tuple[Residency, ...],
        capacity: Capacity,
    ) -> None:
        """Send each sink the news of its own rows, which are old news then; nobody nothing."""
        told = [row for row in rows if row.events]
        for sink in self._sinks:
            events = tuple(event for row in told if row.sink == sink for event in row.events)
            if events or residency or capacity != self._told_capacity:
                sink(StepEvent(step, events, residency, capacity))
        for row in told:
            row.events.clear()
        self._told_capacity = capacity

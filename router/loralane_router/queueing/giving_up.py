"""What happens when an adapter is not ready in time: its request ends, or asks the base."""

from collections.abc import Callable

from loralane_router.metrics.counters import Metrics
from loralane_router.queueing.alarm import Alarm
from loralane_router.queueing.entry import Entry
from loralane_router.queueing.roster import Roster


class GivingUp:
    """Does as those said whose adapters are late (`deadlines`), and rings when the next is due."""

    def __init__(
        self,
        roster: Roster,
        metrics: Metrics,
        is_resident: Callable[[str], bool],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._metrics = metrics
        self._is_resident = is_resident
        self._alarm = Alarm(wake, clock)

    def act(self, now: float) -> None:
        """End or change every request whose wait is over."""
        for request_id, wait in self._roster.waits.due(now, self._is_resident):
            self._metrics.adapter_waits_ended.labels(wait.policy).inc()
            entry = self._roster.find(request_id)
            assert entry is not None, "who waits for an adapter has not ended"
            if wait.policy == "base":
                self._fall_back(entry)
            else:
                entry.generation.fail(wait.error(entry.generation.adapter, now))
                self._roster.cancel(request_id)

    def set_alarm(self) -> None:
        """Ring when the next wait is over; not at all if nobody waits."""
        self._alarm.set(self._roster.waits.next_end)

    def _fall_back(self, entry: Entry) -> None:
        """Ask the base instead: now if the request waits, when its row has ended if it runs."""
        if self._roster.withdraw(entry.ask.request_id):
            entry.fall_back()
            self._roster.enqueue(entry)
        else:
            entry.falls_back = True
            self._roster.stop(entry.ask.request_id)

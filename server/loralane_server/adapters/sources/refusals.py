"""What was just refused, and how long nobody needs to ask again: the negative answers' memory.

A client that names a missing adapter in a loop must not make the shard ask the hub in a loop. The
first waits are short, because whoever uploads an adapter and tries again must see it at once.
"""

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from math import ceil
from typing import Final

from loralane_server.errors import InvalidRequest, ShardError, SourceUnavailable

_MAX_KEYS: Final = 4096
#: How long after its wait has passed a key's earlier refusals still count.
_REMEMBERED_S: Final = 60.0
#: A source that wants to be left alone for longer is asked again after this.
MAX_RETRY_AFTER_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class BackOff:
    """How long to wait after the first refusal in a row, and at most; it doubles in between.

    The first `free` refusals cost no wait: what failed once may be well again at once.
    """

    first_s: float
    most_s: float
    free: int = 0

    def wait_s(self, times: int) -> float:
        """The wait after so many refusals in a row, 1 or more."""
        if times <= self.free:
            return 0.0
        return min(self.most_s, self.first_s * 2.0 ** min(times - self.free - 1, 30))


#: Missing, forbidden, unusable: the answer changes only if somebody changes the adapter.
REFUSED: Final = BackOff(1.0, 30.0)
#: The source is busy or away; what it says itself (`Retry-After`) comes first.
UNAVAILABLE: Final = BackOff(0.5, 30.0, free=1)


@dataclass(frozen=True, slots=True)
class _Refusal:
    error: ShardError
    times: int
    until: float


class Refusals:
    """Refusals by key, the oldest forgotten first. Any thread may call; time comes from `clock`.

    Keys must hold no secret: a caller's token enters as a salted hash.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        refused: BackOff = REFUSED,
        max_retry_after_s: float = MAX_RETRY_AFTER_S,
    ) -> None:
        self._clock = clock
        self._refused = refused
        self._max_retry_after_s = max_retry_after_s
        self._lock = threading.Lock()
        #: Guarded by the lock; the latest last.
        self._known: OrderedDict[Hashable, _Refusal] = OrderedDict()

    def check(self, key: Hashable) -> None:
        """Raise what was raised for this key, while it is too early to ask again.

        An unavailable source's error then says how much of the wait is left.
        """
        with self._lock:
            known = self._known.get(key)
        if known is None:
            return
        left_s = known.until - self._clock()
        if left_s <= 0:
            return
        error = copy.copy(known.error)
        if isinstance(error, SourceUnavailable):
            error.retry_after_ms = ceil(left_s * 1000)
        raise error

    def refused(self, key: Hashable, error: ShardError) -> None:
        """Remember an error, and set the `retry_after_ms` that its caller should be told.

        `InvalidRequest` is not remembered: it is decided without asking anybody.
        """
        if isinstance(error, InvalidRequest):
            return
        now = self._clock()
        with self._lock:
            known = self._known.pop(key, None)
            if known is not None and now > known.until + _REMEMBERED_S:
                known = None
            times = 1 if known is None else known.times + 1
            wait_s = self._wait_s(error, times)
            # A copy has neither traceback nor cause, which would keep whole requests alive.
            self._known[key] = _Refusal(copy.copy(error), times, now + wait_s)
            if len(self._known) > _MAX_KEYS:
                self._known.popitem(last=False)
        if isinstance(error, SourceUnavailable):
            error.retry_after_ms = ceil((wait_s or UNAVAILABLE.first_s) * 1000)

    def succeeded(self, key: Hashable) -> None:
        """Forget a key: it was answered."""
        with self._lock:
            self._known.pop(key, None)

    def check_bounds(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            assert len(self._known) <= _MAX_KEYS
            assert all(known.error.__traceback__ is None for known in self._known.values())

    def _wait_s(self, error: ShardError, times: int) -> float:
        if not isinstance(error, SourceUnavailable):
            return self._refused.wait_s(times)
        if error.retry_after_ms:
            return min(error.retry_after_ms / 1000, self._max_retry_after_s)
        return UNAVAILABLE.wait_s(times)


def retry_after_ms(header: str, now: float | None = None) -> int:
    """Read a `Retry-After` header: seconds or a date; 0 = it says nothing that can be used.

    `now` is the time of day in seconds since 1970; None = this machine's.
    """
    text = header.strip()
    if text.isascii() and text.isdigit():
        return 1000 * min(int(text[:9]), int(MAX_RETRY_AFTER_S))
    try:
        at = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return 0
    left_s = at - (time.time() if now is None else now)
    return ceil(1000 * min(max(left_s, 0.0), MAX_RETRY_AFTER_S))

"""When each adapter was last wanted, how long its last load took, and when it may be forgotten.

Written by the engine's thread only. Each record is replaced whole, so any thread may read.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from loralane_server.adapters.reading.reader import ReadTimes


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Milliseconds of one load, summed over its layers; reading and writing overlap."""

    open_ms: float = 0.0
    read_ms: float = 0.0
    cast_ms: float = 0.0
    #: Into lanes.
    write_ms: float = 0.0
    #: Layers that were ready and waited for the step under way.
    wait_ms: float = 0.0

    def plus(self, read: ReadTimes, write_ms: float, wait_ms: float) -> "LoadTimes":
        """Return the sum with one more layer."""
        return LoadTimes(
            self.open_ms + read.open_ms,
            self.read_ms + read.read_ms,
            self.cast_ms + read.cast_ms,
            self.write_ms + write_ms,
            self.wait_ms + wait_ms,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """What is remembered of one adapter."""

    #: Unix time at which a row last began or ended with it; 0 = never.
    last_used: float = 0.0
    #: Unix time at which anybody last wanted it: the time to live counts from here.
    touched: float = 0.0
    #: First byte read to last lane written; 0 = never loaded.
    load_ms: float = 0.0
    times: LoadTimes = LoadTimes()
    #: Seconds; 0 = it lives for ever, None = as the shard's default.
    ttl: float | None = None


_UNKNOWN: Final = Usage()
#: The longest untouched are forgotten beyond: adapters come and go for as long as a shard runs.
MAX_KNOWN: Final = 20_000


class UsageBook:
    """Owns the records, by digest. `clock` gives unix seconds."""

    def __init__(self, default_ttl: float, clock: Callable[[], float]) -> None:
        self._default_ttl = default_ttl
        self._clock = clock
        #: The one touched last is the last.
        self._known: dict[str, Usage] = {}

    def get(self, digest: str) -> Usage:
        """Return what is known of an adapter, which may be nothing."""
        return self._known.get(digest, _UNKNOWN)

    def ttl(self, digest: str) -> float:
        """Return after how many unused seconds the adapter is forgotten; 0 = never."""
        own = self.get(digest).ttl
        return self._default_ttl if own is None else own

    def used(self, digest: str) -> None:
        """Note that a row begins or ends with the adapter."""
        now = self._clock()
        self._touch(digest, replace(self.get(digest), last_used=now, touched=now))

    def wanted(self, digest: str) -> None:
        """Note that somebody wants the adapter, without a row."""
        self._touch(digest, replace(self.get(digest), touched=self._clock()))

    def loaded(self, digest: str, load_ms: float, times: LoadTimes) -> None:
        """Note how long a load took that ends now."""
        known, now = self.get(digest), self._clock()
        self._touch(digest, replace(known, touched=now, load_ms=load_ms, times=times))

    def set_ttl(self, digest: str, seconds: float) -> None:
        """Give the adapter a time to live of its own, which begins now; 0 = for ever."""
        self._touch(digest, replace(self.get(digest), touched=self._clock(), ttl=seconds))

    def take_expired(self, kept: Collection[str]) -> list[str]:
        """Forget whoever was not wanted for longer than its time to live, but for `kept`."""
        now = self._clock()
        expired = [
            digest
            for digest, usage in self._known.items()
            if digest not in kept and 0 < self.ttl(digest) < now - usage.touched
        ]
        for digest in expired:
            del self._known[digest]
        return expired

    def forget(self, digest: str) -> None:
        """Drop an adapter's record."""
        self._known.pop(digest, None)

    def _touch(self, digest: str, usage: Usage) -> None:
        self._known.pop(digest, None)
        self._known[digest] = usage
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

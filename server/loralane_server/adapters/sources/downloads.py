"""Whole files from a source into a local cache: bounded in time, verified before they are placed.

A file appears under its name only when size and checksum are right: it is written beside its place
and renamed. What is wrong is moved aside for whoever wants to look at it, never served, and fetched
once more; if that is wrong too, nobody asks again for a while.
"""

import errno
import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from loralane_server.adapters.sources.files import opened
from loralane_server.adapters.sources.refusals import BackOff, Refusals
from loralane_server.errors import AdapterCorrupt, SourceUnavailable

#: A source that sends less than this in a while holds a thread that others need.
LEAST_BYTES_PER_S: Final = 16 << 10
PACE_WINDOW_S: Final = 30.0
#: One caller's token may be told to wait longer than others need to.
MAX_RETRY_AFTER_S: Final = 30.0
#: A download is dear, and what is wrong twice is wrong at its source.
CORRUPT: Final = BackOff(10.0, 600.0)
QUARANTINE_SUFFIX: Final = ".quarantined"

_log = logging.getLogger(__name__)


class CacheUnavailable(SourceUnavailable):
    """The disk that downloads are kept on fails; no source needs to be spared for that."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a file's bytes must be. `checksum` is "sha256:..." or "md5:..." in hex; "" = unknown."""

    name: str
    size: int
    checksum: str = ""


class Pace:
    """Whether bytes come fast enough: a pure judge of what is added to it, by `clock`."""

    def __init__(
        self,
        clock: Callable[[], float],
        least_per_s: float = LEAST_BYTES_PER_S,
        window_s: float = PACE_WINDOW_S,
    ) -> None:
        self._clock = clock
        self._least_per_s = least_per_s
        self._window_s = window_s
        self._since = clock()
        self._count = 0

    def add(self, count: int) -> None:
        """Count bytes; raises `TimeoutError` if too few came since the window began."""
        self._count += count
        took_s = self._clock() - self._since
        if took_s < self._window_s:
            return
        if self._count < self._least_per_s * took_s:
            raise TimeoutError(f"{self._count} bytes in {took_s:.0f} s")
        self._since += took_s
        self._count = 0


class Downloads:
    """Fetches files into places of a local cache; knows which were wrong. Any thread may call.

    `cache` names the cache in errors, as the operator knows it.
    """

    def __init__(self, cache: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._refusals = Refusals(clock, CORRUPT, MAX_RETRY_AFTER_S)

    def ensure(
        self, target: Path, expected: Expected, read_from: Callable[[int], Iterator[bytes]]
    ) -> None:
        """See to it that `target` is there and right; `read_from(n)` gives its bytes from n on.

        A connection that is cut after some progress is taken up where it broke.

        Raises:
            AdapterCorrupt: wrong bytes, twice; for a while after that, without asking again.
            SourceUnavailable: the source is away or too slow; for a while, without asking again.
            CacheUnavailable: the disk is full or read-only.
            As `read_from`, where nothing comes at all.
        """
        if target.exists() and self.is_intact(target, expected):
            return
        self._refusals.check(target)
        if os.path.lexists(target):
            self._move_aside(target, target, f"{expected.name} was spoilt in {self._cache}")
        try:
            try:
                self._fetch_once(target, expected, read_from)
            except AdapterCorrupt:
                self._fetch_once(target, expected, read_from)
        except CacheUnavailable:
            raise
        except (AdapterCorrupt, SourceUnavailable) as exc:
            self._refusals.refused(target, exc)
            raise
        self._refusals.succeeded(target)

    @staticmethod
    def is_intact(path: Path, expected: Expected) -> bool:
        """Whether a file of the cache has the right bytes; reads all of them."""
        with opened(Path(os.path.realpath(path))) as descriptor:
            if os.fstat(descriptor).st_size != expected.size:
                return False
            algorithm, _, wanted = expected.checksum.partition(":")
            if not algorithm:
                return True
            with os.fdopen(os.dup(descriptor), "rb") as content:
                return hashlib.file_digest(content, lambda: _hash(algorithm)).hexdigest() == wanted

    def _fetch_once(
        self, target: Path, expected: Expected, read_from: Callable[[int], Iterator[bytes]]
    ) -> None:
        # The suffix is what huggingface_hub calls its own unfinished files, so its tools know them.
        beside = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.incomplete")
        try:
            with disk_errors(self._cache, beside):
                target.parent.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(target.parent).free < expected.size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                with beside.open("xb", buffering=0) as file:
                    sink = _Sink(file, expected, Pace(self._clock))
                    _fill(sink, expected, read_from)
            self._place(beside, target, sink)
        finally:
            with suppress(OSError):  # a read-only disk says so even of what is not there
                beside.unlink()

    def _place(self, beside: Path, target: Path, sink: "_Sink") -> None:
        if sink.wrong:
            self._move_aside(beside, target, sink.wrong)
            raise AdapterCorrupt(sink.wrong)
        with disk_errors(self._cache, target):
            beside.replace(target)

    def _move_aside(self, path: Path, target: Path, why: str) -> None:
        aside = target.with_name(target.name + QUARANTINE_SUFFIX)
        with disk_errors(self._cache, aside):
            path.replace(aside)
        _log.warning("%s; the wrong bytes are kept as %s", why, aside)


@contextmanager
def disk_errors(cache: str, path: Path) -> Iterator[None]:
    """Turn what the disk of a cache raises into ours; `path` is for the operator's eyes only.

    Raises:
        CacheUnavailable: the disk is full, or cannot be written.
    """
    try:
        yield
    except OSError as exc:
        _log.warning("cannot write %s: %s", path, exc)
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"no space left on the disk of {cache}; free some, then try again"
        else:
            why = f"{cache} cannot be written: {exc.strerror}"
        raise CacheUnavailable(why) from exc


class _Sink:
    """Takes a file's bytes in order: writes them, hashes them, judges their pace."""

    def __init__(self, file: FileIO, expected: Expected, pace: Pace) -> None:
        self._file = file
        self._expected = expected
        self._pace = pace
        self._hash = _hash(expected.checksum.partition(":")[0] or "sha256")
        self.size = 0

    @property
    def wrong(self) -> str:
        """What is wrong with the bytes; "" = nothing."""
        name = self._expected.name
        if self.size != self._expected.size:
            return f"{name} has {self.size} bytes where its source names {self._expected.size}"
        wanted = self._expected.checksum.partition(":")[2]
        if wanted and self._hash.hexdigest() != wanted:
            return f"{name} does not have the checksum that its source names"
        return ""

    def add(self, chunk: bytes) -> None:
        """Raises `SourceUnavailable` when too slow, `OSError` from the disk."""
        try:
            self._pace.add(len(chunk))
        except TimeoutError as exc:
            raise _TooSlow(f"{self._expected.name} comes too slowly: {exc}") from exc
        view = memoryview(chunk)
        while view:
            view = view[self._file.write(view) or 0 :]
        self._hash.update(chunk)
        self.size += len(chunk)


class _TooSlow(SourceUnavailable):
    """Bytes come, but not as many as a download needs to end."""


def _hash(algorithm: str) -> "hashlib._Hash":
    """MD5 is S3's own and guards against accidents alone."""
    return hashlib.new(algorithm, usedforsecurity=False)


def _fill(sink: _Sink, expected: Expected, read_from: Callable[[int], Iterator[bytes]]) -> None:
    """Read until the source ends, or has sent more than it named."""
    while sink.size < expected.size:
        before = sink.size
        try:
            for chunk in read_from(sink.size):
                sink.add(chunk)
                if sink.size > expected.size:
                    return
        except _TooSlow:
            raise
        except SourceUnavailable:
            if sink.size == before:
                raise
        else:
            return

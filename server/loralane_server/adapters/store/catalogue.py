"""The books of the adapters that a shard knows: bounded in number, without a file or a network.

Two bounds. An answer ("this reference led this caller to that digest") is forgotten when
`MAX_ANSWERS` younger ones are known. An entry is loose when no answer and no merge refers to it: it
was unloaded, its file was replaced, or it is a merge. It is forgotten when `MAX_LOOSE` loose ones
were used since and nothing of it is held. Until then it can be loaded, so that a request which was
resolved just before an unload finds its adapter.
"""

import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from loralane_server.adapters.store.entries import AdapterSummary, Derived, Entry
from loralane_server.errors import AdapterNotFound

MAX_ANSWERS: Final = 20_000
MAX_LOOSE: Final = 4096
#: How many loose entries are looked at, at most, when there is one too many.
_LOOKS: Final = 8

#: What was asked, and by whom: a reference and a hash of the token; the reference alone where
#: everybody gets the same answer.
Asker = str | tuple[str, bytes]


@dataclass(slots=True, eq=False)
class _Record:
    entry: Entry
    #: How many answers lead here.
    answers: int = 0
    #: How many merges have it as a member.
    merges: int = 0
    #: Whether it is shown to who asks for all.
    listed: bool = False

    @property
    def is_loose(self) -> bool:
        return self.answers == 0 and self.merges == 0


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    digest: str
    at: float


class Catalogue:
    """Entries by digest and by who asked; one lock, any thread.

    `is_held` says whether anything of an adapter is in memory or on its way there: then it is not
    forgotten. It is asked under the lock and must not call back.
    """

    def __init__(
        self,
        is_held: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
        *,
        max_answers: int = MAX_ANSWERS,
        max_loose: int = MAX_LOOSE,
    ) -> None:
        self._is_held = is_held
        self._clock = clock
        self._max_answers = max_answers
        self._max_loose = max_loose
        self._lock = threading.Lock()
        # All below are guarded by the lock.
        self._records: dict[str, _Record] = {}
        #: Oldest first. No OrderedDict: that takes half as much again for each of so many.
        self._answers: dict[Asker, _Answer] = {}
        #: Digests of the loose records, least recently used first.
        self._loose: OrderedDict[str, None] = OrderedDict()
        #: Digests of the listed records, sorted.
        self._listed: list[str] = []
        #: One object for all adapters that change the same modules.
        self._modules: dict[tuple[str, ...], tuple[str, ...]] = {}

    def get(self, digest: str) -> Entry:
        """Return an entry, listed or not; raises `AdapterNotFound` if it is not known."""
        with self._lock:
            return self._get(digest).entry

    def find(self, digest: str) -> Entry | None:
        """Return an entry, listed or not, or None if it is not known."""
        with self._lock:
            record = self._records.get(digest)
            return record.entry if record else None

    def answer(self, asker: Asker) -> tuple[Entry, float] | None:
        """Return what this caller was led to, and how many seconds ago; None = not known."""
        with self._lock:
            answer = self._answers.get(asker)
            if answer is None:
                return None
            return self._records[answer.digest].entry, self._clock() - answer.at

    def remember(self, asker: Asker, entry: Entry) -> AdapterSummary:
        """Note what this caller was led to; the first summary of a digest stays."""
        digest = entry.summary.digest
        with self._lock:
            record = self._keep(entry)
            record.answers += 1
            self._loose.pop(digest, None)
            before = self._answers.pop(asker, None)
            self._answers[asker] = _Answer(digest, self._clock())
            if before is not None:
                self._let_go(before.digest)
            if len(self._answers) > self._max_answers:
                self._let_go(self._answers.pop(next(iter(self._answers))).digest)
            self._trim()
            return record.entry.summary

    def add(self, entry: Entry) -> AdapterSummary:
        """Know an entry that no answer leads to.

        Raises:
            AdapterNotFound: it is a merge, and a member is not known.
        """
        with self._lock:
            summary = self._keep(entry).entry.summary
            self._trim()
            return summary

    def show(self, digest: str) -> Entry:
        """List an entry, since somebody uses it; raises as `get`."""
        with self._lock:
            record = self._get(digest)
            self._list(record)
            return record.entry

    def hide(self, *digests: str) -> None:
        """List adapters no more and forget how they were found; for a while they can be loaded.

        The answers are gone through once, however many adapters go.
        """
        with self._lock:
            hidden = {
                digest: self._records[digest] for digest in digests if digest in self._records
            }
            for record in hidden.values():
                self._unlist(record)
            if not any(record.answers for record in hidden.values()):
                return
            for asker in [a for a, known in self._answers.items() if known.digest in hidden]:
                self._let_go(self._answers.pop(asker).digest)
                self._trim()

    def is_listed(self, digest: str) -> bool:
        """Whether the adapter is known and was not unloaded since."""
        with self._lock:
            record = self._records.get(digest)
            return record is not None and record.listed

    def page(self, limit: int, after: str) -> tuple[tuple[AdapterSummary, ...], int]:
        """Return up to `limit` of the listed (0 = all) behind a digest, and how many there are."""
        with self._lock:
            begin = bisect_right(self._listed, after)
            end = begin + limit if limit else len(self._listed)
            found = tuple(self._records[d].entry.summary for d in self._listed[begin:end])
            return found, len(self._listed)

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            records = self._records
            led_to = [answer.digest for answer in self._answers.values()]
            merged = [member for r in records.values() for member in _members(r.entry)]
            for digest, record in records.items():
                assert record.entry.summary.digest == digest
                assert record.is_loose == (digest in self._loose)
            assert records.keys() >= {*led_to, *merged, *self._loose}
            assert sum(record.answers for record in records.values()) == len(led_to)
            assert sum(record.merges for record in records.values()) == len(merged)
            assert self._listed == sorted(d for d, record in records.items() if record.listed)
            assert len(self._answers) <= self._max_answers

    def _get(self, digest: str) -> _Record:
        record = self._records.get(digest)
        if record is None:
            raise AdapterNotFound(f"adapter {digest[:16]} is not known here; resolve it first")
        if record.is_loose:
            self._loose.move_to_end(digest)
        return record

    def _keep(self, entry: Entry) -> _Record:
        """Return the listed record of this digest; the latest way to the bytes is used."""
        digest = entry.summary.digest
        record = self._records.get(digest)
        if record is None:
            record = self._new(entry)
        elif not isinstance(entry.origin, Derived) and record.entry is not entry:
            record.entry = Entry(record.entry.summary, entry.origin)
        self._list(record)
        return record

    def _new(self, entry: Entry) -> _Record:
        digest = entry.summary.digest
        members = [self._get(member) for member in _members(entry)]
        modules = self._modules.setdefault(entry.summary.modules, entry.summary.modules)
        record = _Record(Entry(replace(entry.summary, modules=modules), entry.origin))
        self._records[digest] = record
        self._loose[digest] = None
        for member in members:
            member.merges += 1
            self._loose.pop(member.entry.summary.digest, None)
        return record

    def _let_go(self, digest: str) -> None:
        """Note that one answer less leads to this digest."""
        record = self._records[digest]
        record.answers -= 1
        if record.is_loose:
            self._loose[digest] = None

    def _trim(self) -> None:
        """Forget the oldest loose entries beyond the bound of which nothing is held."""
        excess = max(0, len(self._loose) - self._max_loose)
        for digest in list(islice(self._loose, min(excess, _LOOKS))):
            if self._is_held(digest):
                self._loose.move_to_end(digest)
            else:
                self._drop(digest)

    def _drop(self, digest: str) -> None:
        record = self._records.pop(digest)
        del self._loose[digest]
        self._unlist(record)
        for name in _members(record.entry):
            member = self._records[name]
            member.merges -= 1
            if member.is_loose:
                self._loose[name] = None

    def _list(self, record: _Record) -> None:
        if not record.listed:
            insort(self._listed, record.entry.summary.digest)
            record.listed = True

    def _unlist(self, record: _Record) -> None:
        if record.listed:
            del self._listed[bisect_left(self._listed, record.entry.summary.digest)]
            record.listed = False


def _members(entry: Entry) -> frozenset[str]:
    return frozenset(entry.origin.members if isinstance(entry.origin, Derived) else ())

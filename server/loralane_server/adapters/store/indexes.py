"""Full indexes of the adapters that were used last; others are made again from their headers."""

import threading
from collections import OrderedDict
from typing import Final

from loralane_server.adapters.formats.base_shape import BaseShape
from loralane_server.adapters.formats.fields import CONFIG_FILE, MAX_CONFIG_BYTES
from loralane_server.adapters.formats.index import AdapterIndex, build_index
from loralane_server.adapters.formats.spec import parse_spec
from loralane_server.adapters.sources.files import Reads, read_header, read_whole
from loralane_server.adapters.sources.located import Located
from loralane_server.adapters.store.entries import (
    AdapterFiles,
    AdapterSummary,
    Derived,
    Entry,
    FromFiles,
)
from loralane_server.errors import AdapterCorrupt, AdapterIncompatible

#: Targets of all the indexes that are kept, a kilobyte each.
MAX_TARGETS: Final = 2048


class Indexes:
    """Indexes by digest, least recently used first to go; any thread.

    Bounded by their targets, since that is what fills memory; the latest is always kept.
    """

    def __init__(
        self, base: BaseShape, max_rank: int, reads: Reads, *, max_targets: int = MAX_TARGETS
    ) -> None:
        self.max_rank: Final = max_rank
        self._base = base
        self._reads = reads
        self._max_targets = max_targets
        self._lock = threading.Lock()
        #: Guarded by the lock; least recently used first.
        self._kept: OrderedDict[str, AdapterIndex] = OrderedDict()
        #: Guarded by the lock; targets of all that are kept.
        self._targets = 0

    def build(self, located: Located) -> AdapterIndex:
        """Understand an adapter that was found; raises as `parse_spec` and `build_index`."""
        return build_index(parse_spec(located.config), located, self._base, self.max_rank)

    def keep(self, index: AdapterIndex) -> None:
        """Keep an index for the load that is likely to follow."""
        with self._lock:
            before = self._kept.pop(index.digest, None)
            self._targets += len(index.targets) - (len(before.targets) if before else 0)
            self._kept[index.digest] = index
            while self._targets > self._max_targets and len(self._kept) > 1:
                self._targets -= len(self._kept.popitem(last=False)[1].targets)

    def files_of(self, entry: Entry) -> AdapterFiles:
        """Return the index of an adapter that was resolved, and the way to its bytes.

        Reads config and headers if needed, and may be slow: on the hub it downloads.

        Raises:
            AdapterCorrupt: the files are no longer those which were resolved.
            AdapterIncompatible: it is a merge, which has no files.
            AdapterNotFound, SourceUnavailable: as `open_file` and the disk.
        """
        if isinstance(entry.origin, Derived):
            raise AdapterIncompatible(
                f"{entry.summary.reference} is a merge, and merges cannot be merged"
            )
        return AdapterFiles(self._of(entry.summary, entry.origin), entry.origin.open_file)

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            assert self._targets == sum(len(index.targets) for index in self._kept.values())
            assert self._targets <= self._max_targets or len(self._kept) == 1
            assert all(digest == index.digest for digest, index in self._kept.items())

    def _of(self, summary: AdapterSummary, origin: FromFiles) -> AdapterIndex:
        with self._lock:
            index = self._kept.get(summary.digest)
            if index is not None:
                self._kept.move_to_end(summary.digest)
                return index
        index = self.build(self._located(summary.reference, origin))
        if index.digest != summary.digest:
            raise AdapterCorrupt("the adapter has changed since it was resolved; request it again")
        self.keep(index)
        return index

    def _located(self, reference: str, origin: FromFiles) -> Located:
        """Find it again where it was found."""
        open_file = origin.open_file
        config, _ = read_whole(open_file(CONFIG_FILE), MAX_CONFIG_BYTES)
        headers = (read_header(open_file(name), name, self._reads)[0] for name in origin.weights)
        return Located(
            reference=reference,
            kind=origin.kind,
            config=config,
            headers=tuple(headers),
            identity=origin.identity,
            open_file=open_file,
            is_on_disk=origin.is_on_disk,
        )

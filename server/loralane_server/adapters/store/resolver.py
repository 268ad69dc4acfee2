"""From what a caller names to an adapter that is known: found, understood, remembered.

Config and headers only, never a tensor byte.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

from loralane_server.adapters.formats.hints import oddities
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.reader import Reader
from loralane_server.adapters.sources.local_source import LocalPlace
from loralane_server.adapters.sources.sources import Place, Sources
from loralane_server.adapters.store.catalogue import Asker, Catalogue
from loralane_server.adapters.store.entries import (
    AdapterSummary,
    Derived,
    Entry,
    entry_of,
    is_on_disk,
    summary_of,
)
from loralane_server.adapters.store.flights import Flights, failed, landed
from loralane_server.adapters.store.indexes import Indexes
from loralane_server.adapters.store.workers import Workers
from loralane_server.errors import (
    AdapterError,
    AdapterIncompatible,
    AdapterNotFound,
    ShardError,
    SourceUnavailable,
)

_log = logging.getLogger(__name__)

#: How long a hub's answer to one caller is believed without asking again.
HUB_TTL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Validation:
    """What a dry run found: an adapter that can be served."""

    summary: AdapterSummary
    #: Oddities that do not change how it is served, a sentence each.
    notes: tuple[str, ...]


class Resolver:
    """Asks the sources, each question once at a time, and keeps the catalogue.

    `base_name` is what the base is called, to tell adapters of another. `layers` are what a load
    reads. `is_on_host` says whether all of an adapter is in memory.
    """

    def __init__(
        self,
        sources: Sources,
        catalogue: Catalogue,
        indexes: Indexes,
        workers: Workers,
        reader: Reader,
        *,
        base_name: str,
        layers: Sequence[int],
        is_on_host: Callable[[str], bool],
    ) -> None:
        self._sources = sources
        self._catalogue = catalogue
        self._indexes = indexes
        self._workers = workers
        self._reader = reader
        self._base_name = base_name
        self._layers = layers
        self._is_on_host = is_on_host
        self._resolving: Flights[AdapterSummary] = Flights()
        self._validating: Flights[Validation] = Flights()
        #: Makes token hashes meaningless outside this process.
        self._salt = os.urandom(16)

    def resolve(self, reference: str, token: str | None = None) -> "Future[AdapterSummary]":
        """Find an adapter for this caller: config and headers only, never a tensor byte.

        Local files are looked at every time; the hub's answer to this token holds for a few
        seconds, and while the hub cannot be reached. The digest can be loaded for a while from now
        on, also when it is unloaded meanwhile. The future's errors are `ShardError`s.
        """
        try:
            place = self._place(reference)
        except ShardError as exc:
            return failed(exc)
        # Folders are open to everybody.
        is_local = isinstance(place.at, LocalPlace)
        asker = reference if is_local else (reference, self._hash(token))
        known = self._catalogue.answer(asker)
        if known is not None and not is_local and known[1] < HUB_TTL_S:
            return landed(known[0].summary)
        is_stat = is_local and known is not None
        return self._resolving.join(
            asker,
            self._workers.known if is_stat else self._for_looks(place),
            lambda: self._resolve(reference, place, token, asker),
        )

    def validate(
        self, reference: str, token: str | None = None, *, tensors: bool = False
    ) -> "Future[Validation]":
        """Look at an adapter as `resolve` would, always anew, and do not make it known.

        `tensors`: also read every layer as a load would, one at a time, and drop it. The future's
        errors are those of `resolve` and `load`.
        """
        try:
            place = self._place(reference)
        except ShardError as exc:
            return failed(exc)
        is_download = tensors and not isinstance(place.at, LocalPlace)
        return self._validating.join(
            (reference, self._hash(token), tensors),
            self._workers.downloads if is_download else self._for_looks(place),
            lambda: self._validate(reference, place, token, tensors),
        )

    def _place(self, reference: str) -> Place:
        if not self._indexes.max_rank:
            raise AdapterIncompatible(
                "LoRA is off: this shard has no lanes for adapters; start it with more --lanes"
            )
        return self._sources.place(reference)

    def _for_looks(self, place: Place) -> Executor:
        return self._workers.disk if isinstance(place.at, LocalPlace) else self._workers.remote

    def _resolve(
        self, reference: str, place: Place, token: str | None, asker: Asker
    ) -> AdapterSummary:
        known = self._catalogue.answer(asker)
        if known is not None and self._holds(place, *known):
            return known[0].summary
        try:
            located = self._sources.locate(reference, place, token)
        except SourceUnavailable:
            if known is None:
                raise
            return self._catalogue.remember(asker, known[0])
        try:
            index = self._indexes.build(located)
        except AdapterError as exc:
            self._sources.refuse(reference, place, token, exc)
            raise
        self._sources.accept(reference, place, token)
        before = self._catalogue.find(index.digest)
        if before is None:
            for sentence in oddities(located.config, index, self._base_name):
                _log.warning("adapter %a %s", index.reference, sentence)
        self._indexes.keep(index)
        downloaded = before is not None and before.summary.kind != "local" and is_on_disk(before)
        entry = before if before is not None and downloaded else entry_of(index, located)
        return self._catalogue.remember(asker, entry)

    def _validate(
        self, reference: str, place: Place, token: str | None, tensors: bool
    ) -> Validation:
        located = self._sources.locate(reference, place, token)
        index = self._indexes.build(located)
        files = LoadFiles(located.open_file)
        for layer in self._layers if tensors else ():
            self._reader.read_layer(index, files, layer)
        notes = oddities(located.config, index, self._base_name)
        return Validation(summary_of(index, located.kind), tuple(notes))

    def _holds(self, place: Place, entry: Entry, age_s: float) -> bool:
        """Whether what a caller was told so long ago still holds."""
        if not isinstance(place.at, LocalPlace) or isinstance(entry.origin, Derived):
            return age_s < HUB_TTL_S
        try:
            return self._sources.local.is_current(place.at, entry.origin.identity)
        except AdapterNotFound:  # the folder is gone, but all of it may be in memory
            return self._is_on_host(entry.summary.digest)

    def _hash(self, token: str | None) -> bytes:
        return hashlib.blake2b((token or "").encode("utf-8", "replace"), key=self._salt).digest()

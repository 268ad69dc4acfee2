"""All adapters that a shard knows: resolved once, read once, however many ask at the same time.

The facade that the engine and the gRPC service use. Slow sources work on their own threads, so a
load waits for its own adapter only: local folders and cached files never queue behind the hub.
"""

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import torch

from loralane_server.adapters.files import Reads
from loralane_server.adapters.flights import Flights
from loralane_server.adapters.hints import oddities
from loralane_server.adapters.host_cache import HostCache
from loralane_server.adapters.hub_source import HubSettings
from loralane_server.adapters.index import AdapterIndex, build_index
from loralane_server.adapters.local_source import LocalPlace
from loralane_server.adapters.located import Located
from loralane_server.adapters.reader import LayerTensors, Reader
from loralane_server.adapters.sources import Place, Sources
from loralane_server.adapters.spec import MAX_RANK, BaseShape, parse_spec
from loralane_server.device.seam import ENDS
from loralane_server.device.threads import use_threads
from loralane_server.errors import (
    AdapterIncompatible,
    AdapterNotFound,
    ShardError,
    SourceUnavailable,
)

Tier = Literal["remote", "disk", "host"]

_log = logging.getLogger(__name__)

#: How long a hub's answer to one caller is believed without asking again.
HUB_TTL_S: Final = 5.0
_MAX_ANSWERS: Final = 4096
_DISK_THREADS: Final = 4
_HUB_THREADS: Final = 32


@dataclass(frozen=True, slots=True)
class _Entry:
    index: AdapterIndex
    #: Without config and headers: the index says all that they say.
    located: Located


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a reference led to for one caller, and when that was asked."""

    digest: str
    at: float


class AdapterStore:
    """Adapters by digest. Every method may be called from any thread and none of them waits.

    `dtype` is what layers are handed out in; `max_rank` the largest rank that fits the shard's
    lanes (0 = none does); `base_name` what the base is called, to tell adapters of another;
    `aliases` and `roots` are the operator's (see `Sources`).
    """

    def __init__(
        self,
        base: BaseShape,
        *,
        dtype: torch.dtype,
        host_cache_bytes: int,
        aliases: Mapping[str, str] = MappingProxyType({}),
        roots: Sequence[Path] = (),
        max_rank: int = MAX_RANK,
        base_name: str = "",
        hub: HubSettings = HubSettings(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base = base
        self._reads = Reads()
        self._sources = Sources(self._reads, aliases=aliases, roots=roots, hub=hub)
        self._max_rank = max_rank
        self._base_name = base_name
        self._clock = clock
        self._cache = HostCache(host_cache_bytes)
        self._reader = Reader(dtype, self._reads)
        self._disk = ThreadPoolExecutor(_DISK_THREADS, "adapters-disk", use_threads, (1,))
        self._hub = ThreadPoolExecutor(_HUB_THREADS, "adapters-hub", use_threads, (1,))
        self._resolving: Flights[AdapterIndex] = Flights()
        self._loading: Flights[None] = Flights()
        #: Makes token hashes meaningless outside this process.
        self._salt = os.urandom(16)
        self._lock = threading.Lock()
        #: Guarded by the lock.
        self._entries: dict[str, _Entry] = {}
        #: Guarded by the lock; by (reference, hash of the token), oldest first.
        self._answers: OrderedDict[tuple[str, bytes], _Answer] = OrderedDict()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read since the start."""
        return self._reads.tensor_bytes

    @property
    def header_bytes_read(self) -> int:
        """Bytes of safetensors headers that were read since the start."""
        return self._reads.header_bytes

    @property
    def cache(self) -> HostCache:
        """The host tier."""
        return self._cache

    def resolve(self, reference: str, token: str | None = None) -> "Future[AdapterIndex]":
        """Find an adapter for this caller: config and headers only, never a tensor byte.

        Local files are looked at every time; the hub's answer to this token holds for a few
        seconds, and while the hub cannot be reached. The future's errors are `ShardError`s.
        """
        try:
            if not self._max_rank:
                raise AdapterIncompatible(
                    "LoRA is off: this shard has no lanes for adapters; start it with more --lanes"
                )
            place = self._sources.place(reference)
        except ShardError as exc:
            refused: Future[AdapterIndex] = Future()
            refused.set_exception(exc)
            return refused
        executor = self._disk if isinstance(place.at, LocalPlace) else self._hub
        key = (reference, self._hash(token))
        return self._resolving.join(
            key, executor, lambda: self._resolve(reference, place, token, key)
        )

    def index(self, digest: str) -> AdapterIndex:
        """An adapter that was resolved; raises `AdapterNotFound` if it was not, or was unloaded."""
        return self._entry(digest).index

    def all(self) -> list[AdapterIndex]:
        """Every adapter that was resolved and not unloaded since."""
        with self._lock:
            return [entry.index for entry in self._entries.values()]

    def load(self, digest: str, on_layer: Callable[[LayerTensors], None]) -> "Future[None]":
        """Hand every layer of the base to `on_layer`, ascending, from a worker thread.

        The `ENDS` come first. Layers without targets come too, empty. Who asks while a load of
        this adapter is under way gets that load's future, and its own `on_layer` is not called.

        Raises:
            AdapterNotFound: the digest was never resolved.
        """
        entry = self._entry(digest)
        executor = self._hub if self.tier(digest) == "remote" else self._disk
        return self._loading.join(digest, executor, lambda: self._load(entry, on_layer))

    def unload(self, digest: str) -> int:
        """Forget an adapter until it is resolved again; returns the host bytes freed."""
        with self._lock:
            self._entries.pop(digest, None)
            for key in [key for key, known in self._answers.items() if known.digest == digest]:
                del self._answers[key]
        self._cache.pin(digest, False)
        return self._cache.drop(digest)

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep an adapter's host copy from eviction, or no longer."""
        self._cache.pin(digest, pinned)

    def host_bytes(self, digest: str) -> int:
        """Bytes of the adapter in the host cache."""
        return self._cache.bytes_of(digest)

    def tier(self, digest: str) -> Tier:
        """Where all of the adapter is, fastest first; raises `AdapterNotFound` as `index`."""
        entry = self._entry(digest)
        if self._cache.layers_of(digest) == self._base.layers + 1:
            return "host"
        return "disk" if entry.located.is_on_disk() else "remote"

    def close(self) -> None:
        """Stop taking work; loads that were begun end by themselves."""
        self._disk.shutdown(wait=False, cancel_futures=True)
        self._hub.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._cache.check()
        with self._lock:
            assert all(digest == entry.index.digest for digest, entry in self._entries.items())
            assert all(known.digest in self._entries for known in self._answers.values())

    def _resolve(
        self, reference: str, place: Place, token: str | None, key: tuple[str, bytes]
    ) -> AdapterIndex:
        known = self._known(key)
        if known is not None and self._holds(place, known[0], known[1]):
            return known[0].index
        try:
            located = self._sources.locate(reference, place, token)
        except SourceUnavailable:
            if known is None:
                raise
            return self._remember(key, known[0])
        index = build_index(parse_spec(located.config), located, self._base, self._max_rank)
        self._tell_oddities(index, located.config)
        return self._remember(key, _Entry(index, replace(located, config=b"", headers=())))

    def _tell_oddities(self, index: AdapterIndex, config: bytes) -> None:
        with self._lock:
            if index.digest in self._entries:
                return
        for sentence in oddities(config, index, self._base_name):
            _log.warning("adapter %a %s", index.reference, sentence)

    def _holds(self, place: Place, entry: _Entry, age_s: float) -> bool:
        if not isinstance(place.at, LocalPlace):
            return age_s < HUB_TTL_S
        try:
            return self._sources.local.is_current(place.at, entry.located)
        except AdapterNotFound:  # the folder is gone, but all of it may be in memory
            return self.tier(entry.index.digest) == "host"

    def _known(self, key: tuple[str, bytes]) -> tuple[_Entry, float] | None:
        with self._lock:
            answer = self._answers.get(key)
            if answer is None:
                return None
            return self._entries[answer.digest], self._clock() - answer.at

    def _remember(self, key: tuple[str, bytes], entry: _Entry) -> AdapterIndex:
        digest = entry.index.digest
        with self._lock:
            known = self._entries.get(digest)
            if known is not None:  # the first name stays, the latest way to the bytes is used
                downloaded = known.located.kind == "hub" and known.located.is_on_disk()
                entry = known if downloaded else _Entry(known.index, entry.located)
            self._entries[digest] = entry
            self._answers[key] = _Answer(digest, self._clock())
            self._answers.move_to_end(key)
            if len(self._answers) > _MAX_ANSWERS:
                self._answers.popitem(last=False)
        return entry.index

    def _entry(self, digest: str) -> _Entry:
        with self._lock:
            entry = self._entries.get(digest)
        if entry is None:
            raise AdapterNotFound(f"adapter {digest[:16]} is not known here; resolve it first")
        return entry

    def _load(self, entry: _Entry, on_layer: Callable[[LayerTensors], None]) -> None:
        for layer in (ENDS, *range(self._base.layers)):
            tensors = self._cache.get(entry.index.digest, layer)
            if tensors is None:
                tensors = self._reader.read_layer(entry.index, entry.located.open_file, layer)
                self._cache.put(entry.index.digest, tensors)
            on_layer(tensors)

    def _hash(self, token: str | None) -> bytes:
        return hashlib.blake2b((token or "").encode("utf-8", "replace"), key=self._salt).digest()

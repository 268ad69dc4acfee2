"""All adapters that a shard knows: resolved once, read once, however many ask at the same time.

The facade that the engine and the gRPC service use.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

import torch

from loralane_server.adapters.formats.base_shape import BaseShape
from loralane_server.adapters.formats.spec import MAX_RANK
from loralane_server.adapters.merging.derived import Merge
from loralane_server.adapters.merging.merger import Merger
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.reader import Reader
from loralane_server.adapters.sources.files import Reads
from loralane_server.adapters.sources.hub_source import HubSettings
from loralane_server.adapters.sources.references import AdapterRoot
from loralane_server.adapters.sources.s3_source import S3Settings
from loralane_server.adapters.sources.sources import Sources
from loralane_server.adapters.store.broadcast import OnLayer
from loralane_server.adapters.store.catalogue import Catalogue
from loralane_server.adapters.store.entries import (
    AdapterFiles,
    AdapterSummary,
    Derived,
    Entry,
    FromFiles,
    ReadLayer,
    is_on_disk,
)
from loralane_server.adapters.store.host_cache import HostCache
from loralane_server.adapters.store.host_moves import HostMoves
from loralane_server.adapters.store.indexes import Indexes
from loralane_server.adapters.store.loads import Loads
from loralane_server.adapters.store.resolver import Resolver, Validation
from loralane_server.adapters.store.workers import Workers
from loralane_server.device.seam import ENDS
from loralane_server.model.base_weights import BaseWeights

Tier = Literal["remote", "disk", "host"]

#: Seconds after a load before memory for the next is made ready. Whoever waited for it computes
#: first: clearing memory takes a core from the step, for as long as casting all that was read.
_REST_S: Final = 0.2

_SLOWEST_FIRST: Final[tuple[Tier, ...]] = ("remote", "disk", "host")


class AdapterStore:
    """Adapters by digest. Every method may be called from any thread; only `files_of` waits.

    `dtype` is what layers are handed out in; `max_rank` the largest rank that fits the shard's
    lanes (0 = none does); `base_name` what the base is called, to tell adapters of another;
    `aliases` and `roots` are the operator's (see `Sources`). Without `base_weights`, adapters that
    are relative to the base's weights (DoRA, biases) are refused when they are loaded.
    """

    def __init__(
        self,
        base: BaseShape,
        *,
        dtype: torch.dtype,
        host_cache_bytes: int,
        aliases: Mapping[str, str] = MappingProxyType({}),
        roots: Sequence[AdapterRoot] = (),
        max_rank: int = MAX_RANK,
        base_name: str = "",
        hub: HubSettings = HubSettings(),  # noqa: B008 - frozen
        s3: S3Settings | None = None,
        base_weights: BaseWeights | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reads = Reads()
        #: What a load reads, in order.
        self._layers = (ENDS, *range(base.layers))
        self._host_moves = HostMoves(len(self._layers))
        self._cache = HostCache(host_cache_bytes, self._host_moves.note)
        self._reader = Reader(dtype, self._reads, base_weights, base.abilities)
        self._indexes = Indexes(base, max_rank, self._reads)
        self._workers = Workers()
        self._loads = Loads(self._cache, self._workers, self._layers)
        self._catalogue = Catalogue(self._is_held, clock)
        self._sources = Sources(
            self._reads, aliases=aliases, roots=roots, hub=hub, s3=s3, clock=clock
        )
        self._resolver = Resolver(
            self._sources,
            self._catalogue,
            self._indexes,
            self._workers,
            self._reader,
            base_name=base_name,
            layers=self._layers,
            is_on_host=self.is_on_host,
        )
        self._merger = Merger(self._reader, self._catalogue, self._workers, self.files_of, max_rank)
        #: Held from a load's end until memory for the next is made ready.
        self._preparing = threading.Lock()
        self._closed = threading.Event()
        #: Makes pinning and unloading one act each.
        self._pinning = threading.Lock()

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

    def resolve(self, reference: str, token: str | None = None) -> "Future[AdapterSummary]":
        """Find an adapter for this caller, as `Resolver.resolve`."""
        return self._resolver.resolve(reference, token)

    def validate(
        self, reference: str, token: str | None = None, *, tensors: bool = False
    ) -> "Future[Validation]":
        """Look at an adapter and remember nothing, as `Resolver.validate`."""
        return self._resolver.validate(reference, token, tensors=tensors)

    def merge(self, asked: Merge) -> "Future[AdapterSummary]":
        """Make several adapters into one, as `Merger.merge`."""
        return self._merger.merge(asked)

    def files_of(self, digest: str) -> AdapterFiles:
        """Return the full index of an adapter and the way to its bytes. Waits: for workers only.

        Raises:
            AdapterNotFound: not known, or a file is gone.
            AdapterCorrupt: its files are no longer those which were resolved.
            AdapterIncompatible: it is a merge, which has no files.
            SourceUnavailable: the hub or the disk does not answer.
        """
        return self._indexes.files_of(self._catalogue.get(digest))

    def summary(self, digest: str) -> AdapterSummary:
        """What is known of an adapter; raises `AdapterNotFound` if it was never resolved.

        An adapter that was unloaded stays known for a while, though it is not listed.
        """
        return self._catalogue.get(digest).summary

    def is_listed(self, digest: str) -> bool:
        """Whether the adapter is known and was not unloaded since."""
        return self._catalogue.is_listed(digest)

    def load(self, digest: str, on_layer: OnLayer) -> "Future[None]":
        """Hand every layer of the base to `on_layer`, ascending, from a worker thread.

        The `ENDS` come first. Layers without targets come too, empty. Who asks while a read of
        this adapter is under way joins it, and gets what was read already before the rest: there
        is one read at a time. `on_layer` should not wait; where it raises, only the future of this
        call fails.

        Raises:
            AdapterNotFound: the digest was never resolved.
        """
        entry = self._catalogue.get(digest)
        done = self._loads.join(
            digest, on_layer, self._for_load(entry), partial(self._opened, entry)
        )
        self._catalogue.show(digest)  # now that an unload would see that it is wanted
        done.add_done_callback(lambda _: self._prepare())
        return done

    def prefetch(self, digest: str) -> None:
        """Read an adapter into the host cache, soon and behind all that somebody waits for.

        A hint: nothing happens where all of it is there, it is being read, it was unloaded, the
        cache cannot hold it, or many are read ahead already.
        """
        entry = self._catalogue.find(digest)
        if entry is None or not self._catalogue.is_listed(digest) or self.is_on_host(digest):
            return
        if self._cache.could_hold(digest, entry.summary.bytes):
            self._loads.ahead(digest, partial(self._opened, entry))

    def unload(self, *digests: str) -> int:
        """Forget adapters until they are used again; returns the host bytes freed.

        They are no longer listed, pinned or held. Whoever was given a digest before can still load
        that adapter, which lists it again.
        """
        with self._pinning:
            for digest in digests:
                self._cache.pin(digest, False)
            self._catalogue.hide(*(d for d in digests if not self._loads.is_wanted(d)))
            return sum(map(self._loads.forget, digests))

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep an adapter's host copy from eviction, until it is unpinned or unloaded.

        Raises:
            AdapterNotFound: it is to be pinned, and was never resolved.
        """
        with self._pinning:
            if pinned:
                self._catalogue.show(digest)
            self._cache.pin(digest, pinned)

    def host_bytes(self, digest: str) -> int:
        """Bytes of the adapter in the host cache."""
        return self._cache.bytes_of(digest)

    def tier(self, digest: str) -> Tier:
        """Where all of the adapter is, fastest first; of a merge: what it is made of.

        Raises `AdapterNotFound` as `summary`.
        """
        return self._tier(self._catalogue.get(digest))

    def is_on_host(self, digest: str) -> bool:
        """Whether all of an adapter is in the host cache."""
        return self._cache.layers_of(digest) == len(self._layers)

    def watch_host(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when adapters enter or leave the host cache; see `HostMoves`."""
        self._host_moves.watch(wake)

    def take_host_moves(self) -> tuple[str, ...]:
        """Return the digests that entered or left the host cache since the last call."""
        return self._host_moves.take()

    def close(self) -> None:
        """Stop taking work; loads that were begun end by themselves."""
        self._workers.close()
        self._closed.set()
        self._sources.close()

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._cache.check()
        self._sources.check()
        self._catalogue.check()
        self._indexes.check()
        self._loads.check()
        for digest in self._cache.digests | self._cache.pinned | self._loads.digests:
            assert self._catalogue.find(digest) is not None, digest
        for digest in self._cache.pinned:
            assert self._catalogue.is_listed(digest), digest

    def list(self, limit: int = 0, after: str = "") -> tuple[tuple[AdapterSummary, ...], int]:
        """Return a page of the adapters that are known, by digest, and how many there are.

        Up to `limit` (0 = all) of those behind the digest `after`.
        """
        return self._catalogue.page(limit, after)

    def _for_load(self, entry: Entry) -> Executor:
        if self.is_on_host(entry.summary.digest):
            return self._workers.memory
        return self._workers.downloads if self._tier(entry) == "remote" else self._workers.disk

    def _opened(self, entry: Entry) -> ReadLayer:
        if isinstance(entry.origin, Derived):
            return entry.origin.opened()
        files = self._indexes.files_of(entry)
        return partial(self._reader.read_layer, files.index, LoadFiles(files.open_file))

    def _prepare(self) -> None:
        """Make memory ready for the next load, once nobody waits for this one any more."""
        if self._preparing.acquire(blocking=False):
            with suppress(RuntimeError):  # the workers were closed meanwhile
                self._workers.rest.submit(self._prepare_later)

    def _prepare_later(self) -> None:
        self._closed.wait(_REST_S)
        self._preparing.release()
        self._reader.prepare()

    def _tier(self, entry: Entry) -> Tier:
        if self.is_on_host(entry.summary.digest):
            return "host"
        if isinstance(entry.origin, FromFiles):
            return "disk" if is_on_disk(entry) else "remote"
        return min(map(self.tier, entry.origin.members), key=_SLOWEST_FIRST.index)

    def _is_held(self, digest: str) -> bool:
        return self._cache.is_held(digest) or self._loads.is_reading(digest)

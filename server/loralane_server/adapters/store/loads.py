"""Reads of adapters under way: one at a time for each adapter, for all who want its layers."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Final

from loralane_server.adapters.reading.reader import LayerTensors, ReadTimes
from loralane_server.adapters.store.broadcast import Broadcast, OnLayer, stopping
from loralane_server.adapters.store.entries import ReadLayer
from loralane_server.adapters.store.host_cache import HostCache
from loralane_server.adapters.store.workers import Workers

_log = logging.getLogger(__name__)

#: How many reads ahead wait, at most; more are not begun.
MAX_AHEAD: Final = 64


class Loads:
    """Single flight: joins whoever wants an adapter to the read of it that is under way.

    `layers` are the numbers in the order of reading. What is read enters the host cache.
    """

    def __init__(self, cache: HostCache, workers: Workers, layers: Sequence[int]) -> None:
        self._cache = cache
        self._workers = workers
        self._layers = tuple(layers)
        self._lock = threading.Lock()
        #: Guarded by the lock; by digest.
        self._flying: dict[str, Broadcast] = {}

    def join(
        self, digest: str, on_layer: OnLayer, executor: Executor, opened: Callable[[], ReadLayer]
    ) -> "Future[None]":
        """Hand every layer to `on_layer`; reads on `executor` unless a read is under way.

        `opened` is called on the worker, and only if not all of the adapter is in the host cache.
        """
        with self._lock:
            flight = self._flying.get(digest)
            if flight is None:
                flight = self._flying[digest] = Broadcast(self._workers.memory)
            first = not flight.is_wanted
            done = flight.listen(on_layer)
        if first:  # also where a read ahead still waits for its turn: this one does not
            self._start(digest, flight, executor, opened)
        return done

    def ahead(self, digest: str, opened: Callable[[], ReadLayer]) -> None:
        """Read into the host cache for later, unless a read is under way or many such wait."""
        with self._lock:
            waiting = sum(not flight.is_wanted for flight in self._flying.values())
            if digest in self._flying or waiting >= MAX_AHEAD:
                return
            flight = self._flying[digest] = Broadcast(self._workers.memory)
        self._start(digest, flight, self._workers.ahead, opened)

    def forget(self, digest: str) -> int:
        """Drop the host copy; return its bytes. A read ahead that is under way leaves none."""
        with self._lock:
            flight = self._flying.get(digest)
            if flight is not None and not flight.is_wanted:
                del self._flying[digest]
            return self._cache.drop(digest)

    def is_wanted(self, digest: str) -> bool:
        """Whether a read is under way that somebody waits for."""
        with self._lock:
            flight = self._flying.get(digest)
            return flight is not None and flight.is_wanted

    def is_reading(self, digest: str) -> bool:
        """Whether a read is under way, wanted or ahead."""
        with self._lock:
            return digest in self._flying

    @property
    def digests(self) -> frozenset[str]:
        """The adapters that are being read."""
        with self._lock:
            return frozenset(self._flying)

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            flights = list(self._flying.values())
        for flight in flights:
            flight.check()

    def _start(
        self, digest: str, flight: Broadcast, executor: Executor, opened: Callable[[], ReadLayer]
    ) -> None:
        def ended(work: "Future[None]") -> None:
            if work.cancelled() and flight.begin():
                self._land(digest, flight, stopping())

        try:
            work = executor.submit(self._read, digest, flight, opened)
        except RuntimeError:
            if flight.begin():
                self._land(digest, flight, stopping())
            return
        work.add_done_callback(ended)

    def _read(self, digest: str, flight: Broadcast, opened: Callable[[], ReadLayer]) -> None:
        if not flight.begin():
            return
        error: BaseException | None = None
        try:
            self._hand_out(digest, flight, opened)
        except BaseException as exc:  # whatever it is, it belongs to those who wait
            error = exc
        self._land(digest, flight, error)

    def _hand_out(self, digest: str, flight: Broadcast, opened: Callable[[], ReadLayer]) -> None:
        read_layer: ReadLayer | None = None
        for layer in self._layers:
            tensors = self._cache.get(digest, layer)
            if tensors is None:
                read_layer = read_layer or opened()
                tensors = read_layer(layer)
                if not self._hold(digest, flight, tensors):
                    return
            flight.hand_out(tensors)

    def _hold(self, digest: str, flight: Broadcast, tensors: LayerTensors) -> bool:
        """Offer a layer to the host cache; False = the read was forgotten, and nobody listens."""
        with self._lock:
            if self._flying.get(digest) is not flight:
                return False
            self._cache.put(digest, replace(tensors, times=ReadTimes()))
            return True

    def _land(self, digest: str, flight: Broadcast, error: BaseException | None) -> None:
        with self._lock:
            if self._flying.get(digest) is flight:
                del self._flying[digest]
        if error is not None and not flight.is_wanted:
            _log.debug("adapter %s could not be read ahead: %s", digest[:16], error)
        flight.end(error)

"""Single flight: any number of callers, one call."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

from loralane_server.errors import SourceUnavailable

_T = TypeVar("_T")


class Flights(Generic[_T]):
    """Calls under way, by key; who asks for a key again gets the same future.

    No caller can cancel it for the others, and it always ends: also when the executor is shut down
    before the call began.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Guarded by the lock.
        self._flying: dict[Hashable, Future[_T]] = {}

    def join(self, key: Hashable, executor: Executor, call: Callable[[], _T]) -> "Future[_T]":
        """The future of the call under way, or of this one, started now."""
        with self._lock:
            flying = self._flying.get(key)
            if flying is not None:
                return flying
            future: Future[_T] = Future()
            future.set_running_or_notify_cancel()
            try:
                work = executor.submit(call)
            except RuntimeError:  # the executor is closed
                future.set_exception(SourceUnavailable("the shard is stopping"))
                return future
            self._flying[key] = future
        work.add_done_callback(lambda done: self._land(key, future, done))
        return future

    def _land(self, key: Hashable, future: "Future[_T]", work: "Future[_T]") -> None:
        with self._lock:
            del self._flying[key]
        if work.cancelled():
            future.set_exception(SourceUnavailable("the shard is stopping"))
        elif (error := work.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(work.result())


def landed(result: _T) -> "Future[_T]":
    """Return a future that has ended well."""
    future: Future[_T] = Future()
    future.set_result(result)
    return future


def failed(error: Exception) -> "Future[Any]":
    """Return a future that has ended with an error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future

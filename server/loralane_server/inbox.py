"""What other threads ask of the engine: calls, carried out in order between two steps."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Inbox:
    """Calls from any thread, made on the engine's."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def put(self, call: Callable[[], None]) -> None:
        """Have `call` made, which must not raise."""
        self._calls.put(call)

    def ask(self, answer: Callable[[], T]) -> "Future[T]":
        """Have `answer` computed; the future gives what it returns or raises."""
        future: Future[T] = promise()

        def run() -> None:
            try:
                future.set_result(answer())
            except BaseException as exc:
                future.set_exception(exc)

        self.put(run)
        return future

    def carry_out(self, patience: float | None) -> None:
        """Make all calls that there are; wait so many seconds for the first, None = for ever."""
        try:
            while True:
                self._calls.get(patience != 0, patience)()
                patience = 0
        except Empty:
            pass


def promise() -> "Future[Any]":
    """Return a future that a caller who loses interest cannot cancel under the engine's hands."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future

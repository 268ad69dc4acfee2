"""Work that often ends without waiting for anything: then what watches over a wait is not set up.

A refusal waits for nothing: its body came with its head, and what it is told is known at once. A
timer for the body and a task that looks whether its client leaves would be a good part of its cost.
"""

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Begun(Generic[_T]):
    """A coroutine that has run until it ended or first had to wait; awaiting it runs the rest.

    Making one raises what the coroutine raises until then. One that `waits` must be awaited, in the
    task where it was made.
    """

    def __init__(self, work: Coroutine[Any, Any, _T]) -> None:
        self._work = work
        self._ended: tuple[_T] | None = None
        #: What it waits for, which is for the event loop to understand.
        self._waits_for = self._go_on(work.send, None)

    @property
    def waits(self) -> bool:
        """Whether it has not ended yet."""
        return self._ended is None

    def __await__(self) -> Generator[Any, Any, _T]:
        """Run the rest; return what the coroutine returns."""
        while self._ended is None:
            try:
                yield self._waits_for
            except BaseException as error:  # for the coroutine, which may catch it: a cancellation
                self._waits_for = self._go_on(self._work.throw, error)
            else:
                self._waits_for = self._go_on(self._work.send, None)
        return self._ended[0]

    def _go_on(self, how: Callable[[Any], Any], given: object) -> Any:
        try:
            return how(given)
        except StopIteration as end:
            self._ended = (end.value,)
            return None

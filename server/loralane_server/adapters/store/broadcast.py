"""One read, any number of listeners: each gets every layer, in order, once.

Who comes late gets those already read first, then the others as they come.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.errors import SourceUnavailable

OnLayer = Callable[[LayerTensors], None]


def stopping() -> SourceUnavailable:
    """The error for whoever asks of a shard that has been closed."""
    return SourceUnavailable("the shard is stopping")


@dataclass(slots=True, eq=False)
class _Listener:
    on_layer: OnLayer
    done: "Future[None]"
    #: How many layers it was handed.
    heard: int = 0
    #: Whether a thread is handing it layers; stays True once it is done with.
    busy: bool = False


class Broadcast:
    """An adapter's layers while they are read; all are held until the read has ended.

    One thread calls `hand_out` and then `end`; any thread may `listen` before the end. A listener
    is called by one thread at a time and should not wait: the others wait with it. One that raises
    fails its own future only and hears no more.
    """

    def __init__(self, replays: Executor) -> None:
        self._replays = replays
        self._lock = threading.Lock()
        # All below are guarded by the lock.
        self._layers: list[LayerTensors] = []
        self._listeners: list[_Listener] = []
        self._begun = False
        self._ended = False
        self._error: BaseException | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody ever listened."""
        with self._lock:
            return bool(self._listeners)

    def begin(self) -> bool:
        """Take on the read: True for the first who asks, who then has to end it."""
        with self._lock:
            first = not self._begun
            self._begun = True
            return first

    def listen(self, on_layer: OnLayer) -> "Future[None]":
        """Hand every layer to `on_layer`, from worker threads.

        The future ends after its last layer, with the error of the read, or of `on_layer` itself;
        nobody can cancel it.
        """
        listener = _Listener(on_layer, Future())
        listener.done.set_running_or_notify_cancel()
        with self._lock:
            assert not self._ended
            self._listeners.append(listener)
            is_late = bool(self._layers)
        if is_late:
            self._replay(listener)
        return listener.done

    def hand_out(self, tensors: LayerTensors) -> None:
        """Hand the next layer to all."""
        with self._lock:
            self._layers.append(tensors)
            listeners = list(self._listeners)
        for listener in listeners:
            self._serve(listener)

    def end(self, error: BaseException | None) -> None:
        """End with the last layer, or with what stopped the read."""
        with self._lock:
            self._ended = True
            self._error = error
            listeners = list(self._listeners)
        for listener in listeners:
            self._serve(listener)

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            numbers = [tensors.layer for tensors in self._layers]
            assert numbers == sorted(set(numbers))
            assert all(listener.heard <= len(numbers) for listener in self._listeners)

    def _replay(self, listener: _Listener) -> None:
        try:
            self._replays.submit(self._serve, listener)
        except RuntimeError:  # closed: what is under way ends by itself, and serves everybody
            return

    def _serve(self, listener: _Listener) -> None:
        """Hand over what the listener lacks, unless another thread is at it."""
        with self._lock:
            if listener.busy:
                return
            listener.busy = True
        try:
            while (tensors := self._next_for(listener)) is not None:
                listener.on_layer(tensors)
        except BaseException as exc:  # its own failure: the others go on
            listener.done.set_exception(exc)

    def _next_for(self, listener: _Listener) -> LayerTensors | None:
        """Return its next layer; None when there is none now, after settling one that is done."""
        with self._lock:
            if listener.heard < len(self._layers):
                listener.heard += 1
                return self._layers[listener.heard - 1]
            if not self._ended:
                listener.busy = False
                return None
        if self._error is None:
            listener.done.set_result(None)
        else:
            listener.done.set_exception(self._error)
        return None

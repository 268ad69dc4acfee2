import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.store.broadcast import Broadcast
from loralane_server.device.seam import ENDS
from loralane_server.errors import AdapterCorrupt

NUMBERS = [ENDS, 0, 1, 2]
LAYERS = [LayerTensors(number, {}, 0) for number in NUMBERS]


@pytest.fixture
def replays() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


class Ear:
    """Remembers the layers that it was handed; fails at one of them, if told to."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.heard: list[int] = []
        self._fails_at = fails_at

    def __call__(self, tensors: LayerTensors) -> None:
        if tensors.layer == self._fails_at:
            raise RuntimeError("no lanes")
        self.heard.append(tensors.layer)


def test_who_listens_from_the_start_hears_every_layer_in_order(
    replays: ThreadPoolExecutor,
) -> None:
    broadcast, ears = Broadcast(replays), [Ear(), Ear()]
    loads = [broadcast.listen(ear) for ear in ears]

    for tensors in LAYERS:
        broadcast.hand_out(tensors)
    assert not any(load.done() for load in loads)
    broadcast.end(None)

    assert [load.result() for load in loads] == [None, None]
    assert [ear.heard for ear in ears] == [NUMBERS, NUMBERS]
    broadcast.check()


def test_who_comes_late_hears_what_was_read_before_the_rest(replays: ThreadPoolExecutor) -> None:
    broadcast, late = Broadcast(replays), Ear()
    for tensors in LAYERS[:2]:
        broadcast.hand_out(tensors)
    caught_up = threading.Event()

    def on_layer(tensors: LayerTensors) -> None:
        late(tensors)
        if tensors.layer == 0:
            caught_up.set()

    load = broadcast.listen(on_layer)
    caught_up.wait()
    assert late.heard == [ENDS, 0]
    for tensors in LAYERS[2:]:
        broadcast.hand_out(tensors)
    broadcast.end(None)

    assert load.result() is None
    assert late.heard == NUMBERS
    broadcast.check()


def test_a_listener_that_fails_fails_alone(replays: ThreadPoolExecutor) -> None:
    broadcast, broken, sound = Broadcast(replays), Ear(fails_at=0), Ear()
    failed, load = broadcast.listen(broken), broadcast.listen(sound)

    for tensors in LAYERS:
        broadcast.hand_out(tensors)
    broadcast.end(None)

    assert isinstance(failed.exception(), RuntimeError)
    assert broken.heard == [ENDS]
    assert load.result() is None
    assert sound.heard == NUMBERS


def test_a_read_that_fails_fails_all_after_what_it_read(replays: ThreadPoolExecutor) -> None:
    broadcast, ears = Broadcast(replays), [Ear(), Ear()]
    loads = [broadcast.listen(ear) for ear in ears]
    error = AdapterCorrupt("truncated")

    broadcast.hand_out(LAYERS[0])
    broadcast.end(error)

    assert [load.exception() for load in loads] == [error, error]
    assert [ear.heard for ear in ears] == [[ENDS], [ENDS]]


def test_nobody_can_cancel_a_load(replays: ThreadPoolExecutor) -> None:
    broadcast = Broadcast(replays)

    load = broadcast.listen(Ear())

    assert not load.cancel()
    broadcast.end(None)
    assert load.result() is None


def test_the_read_is_taken_on_once(replays: ThreadPoolExecutor) -> None:
    broadcast = Broadcast(replays)

    assert [broadcast.begin() for _ in range(3)] == [True, False, False]


def test_a_late_listener_is_served_though_the_replays_are_closed() -> None:
    replays = ThreadPoolExecutor(1)
    replays.shutdown()
    broadcast, late = Broadcast(replays), Ear()
    broadcast.hand_out(LAYERS[0])

    load = broadcast.listen(late)
    broadcast.hand_out(LAYERS[1])
    broadcast.end(None)

    assert load.result() is None
    assert late.heard == NUMBERS[:2]


def test_each_hears_each_layer_once_whenever_it_joins(replays: ThreadPoolExecutor) -> None:
    for _ in range(50):
        broadcast = Broadcast(replays)
        ears = [Ear() for _ in range(8)]
        start = threading.Barrier(9)

        def join(
            ear: Ear, broadcast: Broadcast = broadcast, start: threading.Barrier = start
        ) -> Future[None]:
            start.wait()
            return broadcast.listen(ear)

        with ThreadPoolExecutor(8) as callers:
            joins = [callers.submit(join, ear) for ear in ears]
            start.wait()
            for tensors in LAYERS:
                broadcast.hand_out(tensors)
            loads = [joined.result() for joined in joins]
        broadcast.end(None)

        assert [load.result() for load in loads] == [None] * 8
        assert [ear.heard for ear in ears] == [NUMBERS] * 8
        broadcast.check()

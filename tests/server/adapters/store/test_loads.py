import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch
from loralane_server.adapters.reading.reader import LayerTensors, ReadTimes
from loralane_server.adapters.store.entries import ReadLayer
from loralane_server.adapters.store.host_cache import HostCache
from loralane_server.adapters.store.loads import MAX_AHEAD, Loads
from loralane_server.adapters.store.workers import Workers
from loralane_server.device.seam import ENDS, TargetTensors
from loralane_server.errors import AdapterCorrupt, SourceUnavailable

NUMBERS = [ENDS, 0, 1]
#: Of a layer, ends too.
LAYER_BYTES = 8


class Disk:
    """Gives layers of any adapter when its gate is open; remembers what was read."""

    def __init__(self) -> None:
        self.read: list[tuple[str, int]] = []
        self.opened: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        #: Set while a read waits at the gate.
        self.waiting = threading.Semaphore(0)
        self.fails = False

    def open(self, digest: str) -> Callable[[], ReadLayer]:
        def opened() -> ReadLayer:
            self.opened.append(digest)
            return read_layer

        def read_layer(layer: int) -> LayerTensors:
            self.waiting.release()
            self.gate.wait()
            if self.fails:
                raise AdapterCorrupt("truncated")
            self.read.append((digest, layer))
            half = torch.zeros(1)
            targets = {"q_proj": TargetTensors(half, half)}
            return LayerTensors(layer, targets, LAYER_BYTES, times=ReadTimes(read_ms=1.0))

        return opened


class Bench:
    """Loads from a `Disk` into a host cache."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.disk = Disk()
        self.cache = HostCache(capacity)
        self.workers = Workers()
        self.loads = Loads(self.cache, self.workers, NUMBERS)

    def load(self, digest: str) -> "tuple[list[LayerTensors], Future[None]]":
        heard: list[LayerTensors] = []
        opened = self.disk.open(digest)
        return heard, self.loads.join(digest, heard.append, self.workers.disk, opened)

    def ahead(self, digest: str) -> None:
        self.loads.ahead(digest, self.disk.open(digest))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.disk.gate.set()
    bench.workers.close()
    bench.loads.check()
    bench.cache.check()


def numbers(heard: list[LayerTensors]) -> list[int]:
    return [tensors.layer for tensors in heard]


def test_what_is_read_enters_the_cache_and_is_not_read_again(bench: Bench) -> None:
    first, done = bench.load("a")
    done.result()

    second, again = bench.load("a")

    assert again.result() is None
    assert numbers(first) == numbers(second) == NUMBERS
    assert bench.disk.opened == ["a"]
    assert bench.disk.read == [("a", number) for number in NUMBERS]
    assert bench.cache.bytes_of("a") == 3 * LAYER_BYTES


def test_what_comes_from_memory_took_no_time_to_read(bench: Bench) -> None:
    first, done = bench.load("a")
    done.result()

    second, again = bench.load("a")
    again.result()

    assert {tensors.times for tensors in first} == {ReadTimes(read_ms=1.0)}
    assert {tensors.times for tensors in second} == {ReadTimes()}


def test_only_the_layers_that_the_cache_lost_are_read(bench: Bench) -> None:
    _, done = bench.load("a")
    done.result()
    kept = bench.cache.get("a", 0)
    assert kept is not None
    bench.cache.drop("a")
    bench.cache.put("a", kept)
    bench.disk.read.clear()

    heard, again = bench.load("a")
    again.result()

    assert numbers(heard) == NUMBERS
    assert bench.disk.read == [("a", ENDS), ("a", 1)]


def test_who_joins_a_read_ahead_hears_all_of_it(bench: Bench) -> None:
    bench.disk.gate.clear()
    bench.ahead("a")
    bench.disk.waiting.acquire()

    heard, done = bench.load("a")
    bench.disk.gate.set()

    assert done.result() is None
    assert numbers(heard) == NUMBERS
    assert bench.disk.read == [("a", number) for number in NUMBERS]


def test_a_load_does_not_wait_behind_what_is_read_ahead(bench: Bench) -> None:
    bench.disk.gate.clear()
    hints = [f"a{n}" for n in range(10)]
    for digest in hints:
        bench.ahead(digest)
    bench.disk.waiting.acquire()
    bench.disk.waiting.acquire()
    slow = bench.disk
    bench.disk = Disk()

    heard, done = bench.load(hints[-1])

    assert done.result() is None
    assert numbers(heard) == NUMBERS
    assert slow.read == []
    slow.gate.set()


def test_hints_are_read_once_and_many_are_let_go(bench: Bench) -> None:
    bench.disk.gate.clear()
    for n in range(2 * MAX_AHEAD):
        bench.ahead(f"a{n}")
        bench.ahead(f"a{n}")

    assert bench.loads.digests == {f"a{n}" for n in range(MAX_AHEAD)}
    bench.disk.gate.set()
    for digest in bench.loads.digests:
        bench.load(digest)[1].result()
    assert len(bench.disk.read) == MAX_AHEAD * len(NUMBERS)


def test_a_read_ahead_that_is_forgotten_leaves_nothing(bench: Bench) -> None:
    bench.disk.gate.clear()
    bench.ahead("a")
    bench.disk.waiting.acquire()

    assert bench.loads.forget("a") == 0
    bench.disk.gate.set()
    bench.workers.ahead.shutdown()

    assert bench.cache.bytes_of("a") == 0
    assert bench.disk.read == [("a", ENDS)]
    assert not bench.loads.is_reading("a")


def test_a_load_goes_on_though_its_host_copy_is_dropped(bench: Bench) -> None:
    bench.disk.gate.clear()
    heard, done = bench.load("a")
    bench.disk.waiting.acquire()

    assert bench.loads.is_wanted("a")
    assert bench.loads.forget("a") == 0
    bench.disk.gate.set()

    assert done.result() is None
    assert numbers(heard) == NUMBERS


def test_an_error_reaches_who_waits_and_is_not_remembered(bench: Bench) -> None:
    bench.disk.fails = True
    _, done = bench.load("a")
    assert isinstance(done.exception(), AdapterCorrupt)
    bench.disk.fails = False

    heard, again = bench.load("a")

    assert again.result() is None
    assert numbers(heard) == NUMBERS


def test_a_hint_that_fails_is_told_to_nobody(bench: Bench) -> None:
    bench.disk.fails = True
    bench.ahead("a")
    bench.workers.ahead.shutdown()
    bench.disk.fails = False

    _, done = bench.load("a")

    assert done.result() is None


def test_who_listens_badly_fails_alone(bench: Bench) -> None:
    bench.disk.gate.clear()

    def broken(tensors: LayerTensors) -> None:
        raise RuntimeError("no lanes")

    failed = bench.loads.join("a", broken, bench.workers.disk, bench.disk.open("a"))
    heard, done = bench.load("a")
    bench.disk.gate.set()

    assert isinstance(failed.exception(), RuntimeError)
    assert done.result() is None
    assert numbers(heard) == NUMBERS


def test_what_a_full_cache_cannot_hold_is_handed_out_all_the_same() -> None:
    bench = Bench(capacity=LAYER_BYTES)

    heard, done = bench.load("a")

    assert done.result() is None
    assert numbers(heard) == NUMBERS
    bench.workers.close()
    bench.cache.check()


def test_closing_ends_what_had_not_begun_and_refuses_the_rest(bench: Bench) -> None:
    bench.disk.gate.clear()
    loads = [bench.load(f"a{n}")[1] for n in range(8)]
    bench.disk.waiting.acquire()
    for n in range(8):
        bench.ahead(f"b{n}")

    bench.workers.close()
    late = bench.load("c")[1]
    bench.ahead("d")
    bench.disk.gate.set()

    errors = [load.exception() for load in loads]
    assert None in errors
    assert isinstance(errors[-1], SourceUnavailable)
    assert isinstance(late.exception(), SourceUnavailable)
    assert not bench.loads.is_reading("d")

"""A real shard whose adapters arrive layer by layer, when the test says so."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from loralane_server.adapters.pool import AdapterPool
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.assembly import base_shape
from loralane_server.device.cpu import CpuBatch, CpuDevice
from loralane_server.device.seam import StepInput, TargetTensors
from loralane_server.engine import Engine
from loralane_server.errors import ShardError
from loralane_server.kv.pages import PAGE_TOKENS, PageTable
from loralane_server.limits import Limits
from loralane_server.model.base_weights import BaseWeights
from loralane_server.model.eager import EagerRunner
from loralane_server.model.spec import read_model_spec
from loralane_server.model.weights import load_decoder
from loralane_server.scheduling.waves import Progress

from tests.server.conftest import Listener

LENGTH = 256


class GatedStore(AdapterStore):
    """The real store; its worker thread waits with each layer until the test lets it through.

    Adapters pass freely until they are held. The end of a load is one more layer.
    """

    def __init__(self, layers: int, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._last = layers - 1
        self._changed = threading.Condition()
        #: By digest: the layer that may pass, and all below it.
        self._through: dict[str, int] = {}
        self._errors: dict[str, ShardError] = {}
        self._handed = 0

    def hold(self, digest: str, through: int = -2) -> None:
        """Let this adapter's layers pass up to `through` and no further."""
        with self._changed:
            self._through[digest] = through
            self._changed.notify_all()

    def break_off(self, digest: str, error: ShardError) -> None:
        """Let the load that is under way fail."""
        with self._changed:
            self._errors[digest] = error
            self._changed.notify_all()

    def open(self, digest: str) -> None:
        """Let all of an adapter pass from now on."""
        with self._changed:
            self._through.pop(digest, None)
            self._errors.pop(digest, None)
            self._changed.notify_all()

    def open_all(self) -> None:
        """Let everything pass, so that no worker waits for ever."""
        for digest in list(self._through):
            self.open(digest)

    def wait_for_layers(self, count: int) -> None:
        """Wait until so many layers, ends included, have been handed over since the start."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._handed >= count, timeout=60)

    def load(self, digest: str, on_layer: Callable[[LayerTensors], None]) -> "Future[None]":
        """As the real store, through the gate."""

        def gated(layer: LayerTensors) -> None:
            self._wait(digest, layer.layer)
            on_layer(layer)
            with self._changed:
                self._handed += 1
                self._changed.notify_all()
            if layer.layer == self._last:
                self._wait(digest, self._last + 1)

        return super().load(digest, gated)

    def _wait(self, digest: str, layer: int) -> None:
        def may_go_on() -> bool:
            return digest in self._errors or layer <= self._through.get(digest, layer)

        with self._changed:
            self._changed.wait_for(may_go_on)
            if digest in self._errors:
                raise self._errors[digest]


class TestDevice(CpuDevice):
    """A CPU that fails or waits when it is told to, and counts what enters between two steps."""

    __test__ = False
    broken_layer: int | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.may_step = threading.Event()
        self.may_step.set()
        self.is_waiting = threading.Event()
        #: Bytes of lanes written before each step.
        self.written = [0]

    def attend(self, layer: int, *args: Any) -> torch.Tensor:
        if layer == self.broken_layer:
            raise RuntimeError("out of order")
        return super().attend(layer, *args)

    def batch(self, step: StepInput) -> CpuBatch:
        self.written.append(0)
        if not self.may_step.is_set():
            self.is_waiting.set()
            self.may_step.wait()
        return super().batch(step)

    def write_lanes(
        self, layer: int, lane_pages: Any, targets: Mapping[str, TargetTensors], tables: Any
    ) -> None:
        self.written[-1] += sum(target.nbytes for target in targets.values())
        super().write_lanes(layer, lane_pages, targets, tables)


class GatedShard:
    """The parts of a shard that tests reach for; `shard` of a `Listener`."""

    def __init__(
        self,
        folder: Path,
        *,
        lanes: int = 256,
        rows: int = 8,
        pages: int = 128,
        adapter_ttl: float = 0.0,
        clock: Callable[[], float] = lambda: 1000.0,
    ) -> None:
        spec = read_model_spec(folder / "model")
        self.device = TestDevice(
            spec, dtype=torch.float32, pages=pages, page_tokens=PAGE_TOKENS, lanes=lanes
        )
        self.store = GatedStore(
            spec.layers,
            base_shape(spec, "float32"),
            dtype=torch.float32,
            roots=(folder / "adapters",),
            host_cache_bytes=1 << 30,
            max_rank=lanes,
            base_weights=BaseWeights(folder / "model", spec, torch.float32),
        )
        decoder = load_decoder(folder / "model", spec, self.device, torch.float32, LENGTH)
        self.engine = Engine(
            EagerRunner(decoder, self.device),
            self.device,
            self.store,
            pool=AdapterPool(lanes),
            pages=PageTable(pages),
            limits=Limits(rows, LENGTH, spec.vocab, step_tokens=96),
            threads=1,
            adapter_ttl=adapter_ttl,
            clock=clock,
        )

    def digest(self, name: str) -> str:
        """Resolve an adapter."""
        return self.store.resolve(name).result().digest

    def until(self, digest: str, happened: Callable[[Progress], bool]) -> Progress:
        """Ask for a load's progress, turn after turn, until what must come has come."""
        while True:
            for progress in self.engine.loading().result():
                if progress.digest == digest and happened(progress):
                    return progress


@contextmanager
def gated(folder: Path, **settings: Any) -> Iterator[tuple[GatedShard, Listener]]:
    """Run a shard behind a gate; at the end its books must balance."""
    shard = GatedShard(folder, **settings)
    shard.engine.start()
    try:
        yield shard, Listener(shard)  # type: ignore[arg-type]  # it has what a listener needs
        shard.engine.check()
        assert not shard.engine.stopped.done()
    finally:
        shard.device.may_step.set()
        shard.store.open_all()
        shard.engine.close()
        shard.store.close()

"""What an adapter keeps on the device beside its lanes is let go when it leaves."""

import gc
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loralane_server.adapters.pool import LANE_PAGE, AdapterPool
from loralane_server.adapters.reader import LayerTensors
from loralane_server.device.cpu import CpuDevice
from loralane_server.device.seam import ENDS, TableRows
from loralane_server.errors import AdapterCorrupt
from loralane_server.residency import ResidencyManager
from loralane_server.usage import UsageBook

from tests.server.device.test_cpu_adapters import SPEC
from tests.server.handmade import table


@dataclass
class Summary:
    rank: int = 1


class Shelf:
    """A store of adapters that replace the head and nothing else; remembers their tables weakly."""

    def __init__(self) -> None:
        self.tables: dict[str, weakref.ref[Any]] = {}

    def summary(self, digest: str) -> Summary:
        return Summary()

    def load(self, digest: str, on_layer: Callable[[LayerTensors], None]) -> "Future[None]":
        rows: TableRows = table(SPEC, None, seed=len(self.tables))
        self.tables[digest] = weakref.ref(rows.rows)
        on_layer(LayerTensors(ENDS, {}, rows.rows.nbytes, {"lm_head": rows}))
        read: Future[None] = Future()
        if digest == "broken":
            read.set_exception(AdapterCorrupt("its first layer cannot be read"))
            return read
        for layer in range(SPEC.layers):
            on_layer(LayerTensors(layer, {}, 0))
        read.set_result(None)
        return read

    def kept(self, digest: str) -> bool:
        gc.collect()
        return self.tables[digest]() is not None


class World:
    """A pool with room for one adapter, and what was posted to it."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        device = CpuDevice(SPEC, dtype=torch.float32, pages=1, page_tokens=8, lanes=LANE_PAGE)
        self._posted: list[Callable[[], None]] = []
        self.residency = ResidencyManager(
            AdapterPool(LANE_PAGE),
            self.shelf,  # type: ignore[arg-type]  # all that is asked of a store
            device,
            usage=UsageBook(0.0, time.monotonic),
            post=self._posted.append,
            fail=lambda row, error: None,
        )

    def load(self, digest: str) -> "Future[None]":
        done: Future[None] = Future()
        self.residency.load(digest, done)
        while self._posted or self.residency.has_staged:
            if self._posted:
                self._posted.pop(0)()
            self.residency.write_staged()
        return done


def test_a_resident_adapter_keeps_its_tables() -> None:
    world = World()

    world.load("a").result()

    assert world.shelf.kept("a")


def test_an_evicted_adapter_keeps_none() -> None:
    world = World()
    world.load("a").result()

    world.load("b").result()

    assert not world.shelf.kept("a")
    assert world.shelf.kept("b")


def test_an_unloaded_adapter_keeps_none() -> None:
    world = World()
    world.load("a").result()

    world.residency.unload("a")

    assert not world.shelf.kept("a")


def test_an_adapter_whose_load_fails_keeps_none() -> None:
    world = World()

    with pytest.raises(AdapterCorrupt):
        world.load("broken").result()

    assert not world.shelf.kept("broken")

"""Adapters that a shard holds before it says that it is ready."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loralane_server.config import ShardConfig
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterNotFound,
    AdapterTooLarge,
    ShardError,
)
from loralane_server.preload import preload
from safetensors.torch import load_file, save_file

from tests.server.conftest import Listener, digest_of, running

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def shard(tiny: Path, tmp_path: Path) -> Iterator[Listener]:
    """A shard with 24 lanes; adapters `r8`, `r16`, and `nan`, which holds one."""
    for name in ("r8", "r16"):
        shutil.copytree(tiny / "adapters" / name, tmp_path / name)
    shutil.copytree(tmp_path / "r8", tmp_path / "nan")
    tensors = load_file(tmp_path / "nan" / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, tmp_path / "nan" / WEIGHTS)
    config = ShardConfig(
        model=str(tiny / "model"),
        adapters=(("mine", str(tmp_path / "r8")),),
        adapter_roots=(tmp_path,),
        dtype="float32",
        max_rows=2,
        lanes=24,
    )
    with running(config) as listener:
        yield listener


def load(shard: Listener, names: tuple[str, ...], pinned: tuple[str, ...] = ()) -> None:
    asyncio.run(preload(shard.shard.engine, shard.shard.store, names, pinned))


def resident(shard: Listener) -> dict[str, bool]:
    """Whether it is pinned, for each adapter that is resident, by digest."""
    return {t.digest: t.pinned for t in shard.shard.engine.tenants().values() if t.resident}


def test_all_are_resident_and_those_to_pin_are_pinned(shard: Listener) -> None:
    load(shard, ("mine",), ("r16",))

    mine, r16 = (digest_of(shard.shard, name) for name in ("mine", "r16"))
    assert resident(shard) == {mine: False, r16: True}
    assert r16 in shard.shard.store.cache.pinned


def test_an_adapter_under_two_names_is_loaded_once(shard: Listener) -> None:
    load(shard, ("mine", "r8", "mine"), ("r8",))

    assert resident(shard) == {digest_of(shard.shard, "r8"): True}


@pytest.mark.parametrize(("name", "error"), [("nan", AdapterCorrupt), ("nope", AdapterNotFound)])
def test_what_cannot_be_had_is_named_in_the_error_of_its_kind(
    shard: Listener, name: str, error: type[ShardError]
) -> None:
    with pytest.raises(error, match=f"adapter {name} cannot be preloaded: "):
        load(shard, ("mine", name))


def test_more_than_the_lanes_hold_is_too_large_and_nothing_is_loaded(
    shard: Listener, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path / "r8", tmp_path / "another")

    with pytest.raises(AdapterTooLarge, match="take 32 lanes together and the shard has 24"):
        load(shard, ("mine", "r16", "another"))

    assert resident(shard) == {}


def test_nothing_to_load_is_nothing_done(shard: Listener) -> None:
    load(shard, ())

    assert resident(shard) == {}

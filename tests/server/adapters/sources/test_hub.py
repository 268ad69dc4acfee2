import gc
import logging
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from loralane_server.adapters.sources.files import Reads
from loralane_server.adapters.sources.hub_source import HubSettings
from loralane_server.adapters.sources.located import Located
from loralane_server.adapters.sources.sources import Sources
from loralane_server.adapters.store.resolver import HUB_TTL_S
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.device.seam import ENDS
from loralane_server.errors import (
    AdapterNotFound,
)

from tests.server.adapters.clock import Clock
from tests.server.adapters.samples import (
    adapter_files,
    header_bytes,
    load,
    lora,
    store_at,
    write,
)
from tests.server.adapters.sources.fake_hub import FakeHub, Repo

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    def switch() -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    return switch


def test_resolving_reads_config_and_header_and_no_tensor_byte(
    hub: FakeHub, hub_store: AdapterStore
) -> None:
    files = adapter_files()
    hub.repos["org/a"] = Repo(files)

    index = hub_store.resolve("org/a").result()

    assert (index.rank, index.reference) == (4, "org/a")
    assert hub.sent[WEIGHTS] == header_bytes(files[WEIGHTS]) == hub_store.header_bytes_read
    assert hub.sent[CONFIG] == len(files[CONFIG])
    assert hub_store.tier(index.digest) == "remote"
    assert hub_store.bytes_read == 0


def test_the_first_load_downloads_once_and_later_ones_not_at_all(
    hub: FakeHub, hub_store: AdapterStore
) -> None:
    files = adapter_files()
    hub.repos["org/a"] = Repo(files)
    index = hub_store.resolve("org/a").result()
    heads = hub.sent[WEIGHTS]

    first = load(hub_store, index.digest)
    hub_store.cache.drop(index.digest)
    second = load(hub_store, index.digest)

    assert hub.sent[WEIGHTS] == heads + len(files[WEIGHTS])
    assert [layer.layer for layer in first] == [ENDS, 0, 1]
    assert first[-1].targets["q_proj"].a.equal(second[-1].targets["q_proj"].a)
    assert hub_store.bytes_read == 2 * index.bytes


def test_a_cached_file_needs_no_range_request(
    hub: FakeHub, hub_store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    index = hub_store.resolve("org/a").result()
    load(hub_store, index.digest)
    assert hub_store.tier(index.digest) == "host"
    hub_store.unload(index.digest)
    gets = hub.total("GET")

    again = hub_store.resolve("org/a").result()

    assert again.digest == index.digest
    assert hub.total("GET") == gets
    assert hub_store.tier(again.digest) == "disk"


def test_an_adapter_that_is_only_known_costs_little_memory(hub: FakeHub, tmp_path: Path) -> None:
    count, times = 50, 5
    for n in range(times * count):
        hub.repos[f"org/a{n}"] = Repo(adapter_files(), commit=f"{n:040d}")
    sources = Sources(Reads(), aliases={}, roots=(), hub=HubSettings(hub.url, tmp_path))

    def known(n: int) -> Located:
        located = sources.locate(f"org/a{n}", sources.place(f"org/a{n}"), None)
        return replace(located, config=b"", headers=())  # as the store keeps it

    kept = []
    traced = []
    logging.disable(logging.INFO)  # pytest keeps what is logged about each request
    tracemalloc.start()
    for first in range(0, times * count, count):
        kept += [known(n) for n in range(first, first + count)]
        for log in (hub.requests, hub.sent, hub.given):
            log.clear()
        gc.collect()
        traced.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    logging.disable(logging.NOTSET)

    # The least of all: caches of libraries fill up, and other threads work meanwhile.
    assert min(after - before for before, after in pairwise(traced)) / count < 1536
    assert len(kept) == times * count
    sources.close()


def test_another_revision_is_another_adapter(
    hub: FakeHub, hub_store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    before = hub_store.resolve("org/a").result()
    hub.repos["org/a"] = Repo(adapter_files(lora(seed=2)), commit="d" * 40)
    clock.now += HUB_TTL_S + 1

    after = hub_store.resolve("org/a").result()

    assert after.digest != before.digest
    assert hub_store.resolve(f"org/a@{'d' * 40}").result() is after


def test_a_load_reads_what_was_resolved_not_what_the_branch_became(
    hub: FakeHub, hub_store: AdapterStore
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    index = hub_store.resolve("org/a").result()
    hub.repos["org/a"] = Repo(adapter_files(lora(seed=2)), commit="d" * 40)

    with pytest.raises(AdapterNotFound, match="revision"):
        load(hub_store, index.digest)


def test_the_hubs_answer_is_believed_for_a_few_seconds(
    hub: FakeHub, hub_store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    index = hub_store.resolve("org/a").result()
    asked = hub.total()

    assert hub_store.resolve("org/a").result() is index
    assert hub.total() == asked
    clock.now += HUB_TTL_S + 1
    assert hub_store.resolve("org/a").result() is index
    assert hub.total() > asked


def test_one_look_serves_all_who_ask_meanwhile(hub: FakeHub, hub_store: AdapterStore) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    hub.open.clear()

    futures = [hub_store.resolve("org/a") for _ in range(64)]
    hub.open.set()

    assert len({future.result().digest for future in futures}) == 1
    assert hub.requests["HEAD", "org/a", CONFIG] == 1


def test_a_slow_hub_holds_up_nobody_else(hub: FakeHub, tmp_path: Path) -> None:
    folder = write(tmp_path / "local", adapter_files())
    store = store_at(aliases={"mine": str(folder)}, hub=HubSettings(hub.url, tmp_path / "cache"))
    for n in range(40):
        hub.repos[f"org/a{n}"] = Repo(adapter_files(lora(seed=n)))
    hub.open.clear()
    waiting = [store.resolve(f"org/a{n}") for n in range(40)]

    digest = store.resolve("mine").result().digest
    assert len(load(store, digest)) == 3

    assert not any(future.done() for future in waiting)
    hub.open.set()
    assert len({future.result().digest for future in waiting}) == 40
    store.close()


def test_a_hub_without_ranges_is_read_to_the_header_only(
    hub: FakeHub, hub_store: AdapterStore
) -> None:
    hub.repos["org/a"] = Repo(adapter_files(), ignores_range=True)

    assert hub_store.resolve("org/a").result().rank == 4


def test_offline_mode_serves_what_was_loaded_and_refuses_the_rest_at_once(
    hub: FakeHub, hub_store: AdapterStore, offline: Any
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    digest = hub_store.resolve("org/a").result().digest
    load(hub_store, digest)
    hub_store.unload(digest)
    asked = hub.total()
    offline()

    assert hub_store.resolve("org/a").result().digest == digest
    assert len(load(hub_store, digest)) == 3
    with pytest.raises(AdapterNotFound, match="offline"):
        hub_store.resolve("org/miss").result()
    assert hub.total() == asked


def test_the_environment_names_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    code = """
import torch
from tests.server.adapters.samples import store_at
store = store_at()
print(store.resolve("org/a").result().rank)
store.close()
"""

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[4],
        env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": ""},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == "4"
    assert hub.requests["HEAD", "org/a", WEIGHTS] == 1

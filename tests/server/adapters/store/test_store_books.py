"""What a store keeps of adapters, and for how long."""

import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loralane_server.adapters.merging.derived import Merge
from loralane_server.adapters.merging.merging import recipe_of
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.device.seam import ENDS
from loralane_server.errors import (
    AdapterIncompatible,
)

from tests.server.adapters.samples import (
    adapter_files,
    header_bytes,
    load,
    lora,
    store_at,
    write,
    write_without_tensors,
)
from tests.server.adapters.sources.fake_hub import FakeHub, Repo

WEIGHTS = "adapter_model.safetensors"
#: Bytes that may be kept of an adapter that is known.
ENTRY_BYTES = 1500


def test_an_adapter_that_is_only_known_takes_little_memory(
    store: AdapterStore, tmp_path: Path
) -> None:
    write_without_tensors(tmp_path, 500)

    def resolve(numbers: range) -> int:
        for n in numbers:
            store.resolve(f"a{n}").result()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = resolve(range(200))  # more than full indexes are kept
        after = resolve(range(200, 500))
    finally:
        tracemalloc.stop()

    assert store.list()[1] == 500
    assert after - before < 300 * ENTRY_BYTES


def test_pages_go_through_all_adapters_by_digest(store: AdapterStore, tmp_path: Path) -> None:
    for n in range(7):
        write(tmp_path / f"a{n}", adapter_files(lora(seed=n)))
    digests = sorted(store.resolve(f"a{n}").result().digest for n in range(7))

    pages, after = [], ""
    while page := store.list(limit=3, after=after)[0]:
        pages.append([summary.digest for summary in page])
        after = page[-1].digest

    assert pages == [digests[:3], digests[3:6], digests[6:]]
    assert store.list(limit=3)[1] == 7
    assert [summary.digest for summary in store.list()[0]] == digests


def test_a_hint_brings_an_adapter_to_memory(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    summary = store.resolve("a").result()

    store.prefetch(summary.digest)
    assert [layer.layer for layer in load(store, summary.digest)] == [ENDS, 0, 1]
    store.prefetch(summary.digest)

    assert store.tier(summary.digest) == "host"
    assert store.bytes_read == summary.bytes


def test_a_hint_about_what_is_not_here_does_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    store = store_at(tmp_path, host_cache_bytes=100)
    digest = store.resolve("a").result().digest
    store.prefetch(digest)
    store.unload(digest)
    store.prefetch(digest)
    store.prefetch("0" * 64)
    store.close()

    assert store.bytes_read == 0
    store.check()


def test_a_pin_ends_with_unloading(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    digest = store.resolve("a").result().digest
    load(store, digest)
    store.pin(digest, True)
    assert store.cache.pinned == {digest}

    assert store.unload(digest) > 0

    assert store.cache.pinned == frozenset()
    store.pin(digest, False)
    store.check()
    assert store.list() == ((), 0)


def test_pinning_lists_what_was_unloaded(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    summary = store.resolve("a").result()
    store.unload(summary.digest)

    store.pin(summary.digest, True)

    assert store.list() == ((summary,), 1)


def test_a_request_that_races_with_an_unload_always_finds_its_adapter(
    store: AdapterStore, tmp_path: Path
) -> None:
    for n in range(3):
        write(tmp_path / f"a{n}", adapter_files(lora(seed=n)))
    stop = threading.Event()

    def delete() -> int:
        deleted = 0
        while not stop.is_set():
            for summary in store.list()[0]:
                store.pin(summary.digest, True)
                store.unload(summary.digest)
                deleted += 1
        return deleted

    def ask(n: int) -> list[int]:
        digest = store.resolve(f"a{n % 3}").result().digest
        assert store.summary(digest).rank == 4
        store.prefetch(digest)
        assert store.tier(digest) in ("disk", "host")
        return [layer.layer for layer in load(store, digest)]

    with ThreadPoolExecutor(10) as threads:
        deletions = [threads.submit(delete) for _ in range(2)]
        answers = list(threads.map(ask, range(400)))
        stop.set()

    assert answers == [[ENDS, 0, 1]] * 400
    assert sum(deletion.result() for deletion in deletions) > 0
    assert store.cache.pinned == frozenset()


def test_a_merge_is_as_far_away_as_its_farthest_member(store: AdapterStore, tmp_path: Path) -> None:
    for n in range(2):
        write(tmp_path / f"a{n}", adapter_files(lora(seed=n)))
    digests = tuple(store.resolve(f"a{n}").result().digest for n in range(2))
    merged = store.merge(Merge(recipe_of("linear", [0.5, 0.5], 1.0, "total"), digests)).result()
    load(store, digests[0])

    assert store.tier(merged.digest) == "disk"
    load(store, digests[1])
    assert store.tier(merged.digest) == "host"
    assert store.host_bytes(merged.digest) == 0

    assert [layer.layer for layer in load(store, merged.digest)] == [ENDS, 0, 1]
    assert store.host_bytes(merged.digest) > 0
    assert store.unload(digests[0]) > 0
    assert store.tier(merged.digest) == "host"
    with pytest.raises(AdapterIncompatible, match="is a merge"):
        store.files_of(merged.digest)


def test_what_a_late_load_hears_is_what_the_first_heard(
    store: AdapterStore, tmp_path: Path
) -> None:
    write(tmp_path / "a", adapter_files())
    digest = store.resolve("a").result().digest
    at_zero, go = threading.Event(), threading.Event()
    first: list[LayerTensors] = []
    late: list[LayerTensors] = []

    def slow(tensors: LayerTensors) -> None:
        first.append(tensors)
        if tensors.layer == 0:
            at_zero.set()
            go.wait()

    leader = store.load(digest, slow)
    at_zero.wait()
    follower = store.load(digest, late.append)
    go.set()

    assert (leader.result(), follower.result()) == (None, None)
    assert [tensors.layer for tensors in first] == [ENDS, 0, 1]
    assert all(a is b for a, b in zip(first, late, strict=True))


def test_a_hint_downloads_once_for_the_load_that_follows(
    hub: FakeHub, hub_store: AdapterStore
) -> None:
    files = adapter_files()
    hub.repos["org/a"] = Repo(files)
    digest = hub_store.resolve("org/a").result().digest

    hub_store.prefetch(digest)
    layers = [layer.layer for layer in load(hub_store, digest)]

    assert layers == [ENDS, 0, 1]
    assert hub.sent[WEIGHTS] == header_bytes(files[WEIGHTS]) + len(files[WEIGHTS])
    assert hub_store.tier(digest) == "host"

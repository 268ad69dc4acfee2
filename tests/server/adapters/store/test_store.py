import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.device.seam import ENDS
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterError,
    AdapterIncompatible,
    AdapterNotFound,
    SourceUnavailable,
)
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.server.adapters.samples import (
    adapter_files,
    header_bytes,
    load,
    lora,
    store_at,
    write,
)


def test_registering_two_hundred_adapters_reads_headers_only(
    store: AdapterStore, tmp_path: Path
) -> None:
    heads = 0
    for n in range(200):
        files = adapter_files(lora(seed=n))
        write(tmp_path / f"a{n}", files)
        heads += header_bytes(files["adapter_model.safetensors"])

    digests = {store.resolve(f"a{n}").result().digest for n in range(200)}

    assert len(digests) == store.list()[1] == 200
    assert store.header_bytes_read == heads
    assert store.bytes_read == 0


def test_the_first_load_reads_each_byte_once_layer_by_layer(
    store: AdapterStore, tmp_path: Path
) -> None:
    write(tmp_path / "a", adapter_files(lora(["q_proj"], [0]) | lora(["v_proj", "o_proj"], [1])))
    index = store.resolve("a").result()
    read_so_far: list[int] = []

    store.load(index.digest, lambda _: read_so_far.append(store.bytes_read)).result()

    first = sum(read_so_far[1:2])
    assert first == (4 * 64 + 64 * 4) * 4
    assert read_so_far == [0, first, index.bytes]


def test_a_second_load_comes_from_memory(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    index = store.resolve("a").result()
    first = load(store, index.digest)

    second = load(store, index.digest)

    assert [layer.layer for layer in second] == [ENDS, 0, 1]
    assert all(a.targets is b.targets for a, b in zip(first, second, strict=True))
    assert store.bytes_read == index.bytes
    assert store.host_bytes(index.digest) == sum(layer.nbytes for layer in first)


def test_every_layer_of_the_base_is_handed_out(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files(lora(["q_proj"], [1])))

    layers = load(store, store.resolve("a").result().digest)

    found = [(layer.layer, list(layer.targets)) for layer in layers]
    assert found == [(ENDS, []), (0, []), (1, ["q_proj"])]


def test_sixty_four_first_loads_at_once_are_one_read(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    digest = store.resolve("a").result().digest
    go = threading.Event()
    heard: list[list[int]] = [[] for _ in range(64)]

    def listen(n: int) -> Future[None]:
        def on_layer(tensors: LayerTensors) -> None:
            go.wait()
            heard[n].append(tensors.layer)

        return store.load(digest, on_layer)

    with ThreadPoolExecutor(8) as callers:
        loads = list(callers.map(listen, range(64)))
    assert not any(load.done() or load.cancel() for load in loads)
    go.set()

    assert [load.result() for load in loads] == [None] * 64
    assert heard == [[ENDS, 0, 1]] * 64
    assert store.bytes_read == store.summary(digest).bytes


def test_resolving_the_same_name_at_once_is_one_look(store: AdapterStore, tmp_path: Path) -> None:
    files = adapter_files()
    write(tmp_path / "a", files)

    with ThreadPoolExecutor(16) as callers:
        found = list(callers.map(lambda _: store.resolve("a").result(), range(64)))

    assert all(index is found[0] for index in found)


def test_a_shard_without_lanes_says_that_it_serves_no_adapters(tmp_path: Path) -> None:
    store = store_at(tmp_path, max_rank=0)

    with pytest.raises(AdapterIncompatible, match="LoRA is off"):
        store.resolve("org/a").result()

    store.close()


def test_an_unchanged_folder_is_not_read_again(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    index = store.resolve("a").result()
    read = store.header_bytes_read

    again = store.resolve("a").result()

    assert again is index
    assert store.header_bytes_read == read


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_that_changed_is_another_adapter(
    name: str, store: AdapterStore, tmp_path: Path
) -> None:
    write(tmp_path / "a", adapter_files())
    before = store.resolve("a").result()
    write(tmp_path / "a", {name: adapter_files(lora(seed=2), lora_alpha=9)[name]})
    os.utime(tmp_path / "a" / name, (1, 1))  # so that the test does not wait for a clock to tick

    after = store.resolve("a").result()

    assert after.digest != before.digest
    assert store.summary(before.digest) is before


def test_files_rewritten_in_place_with_the_times_they_had_are_another_adapter(
    store: AdapterStore, tmp_path: Path
) -> None:
    """As `cp -p` does it: sizes, mtimes and inodes are those of before."""
    weights = write(tmp_path / "a", adapter_files()) / "adapter_model.safetensors"
    resolved = store.resolve("a").result().digest
    before = weights.stat()

    with weights.open("r+b") as file:
        file.write(adapter_files(lora(seed=2))[weights.name])
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    while weights.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of files ticks slowly
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))

    after = weights.stat()
    same = (before.st_size, before.st_mtime_ns, before.st_ino)
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == same
    assert store.resolve("a").result().digest != resolved


def test_a_folder_deleted_after_its_load_still_answers_from_memory(
    store: AdapterStore, tmp_path: Path
) -> None:
    folder = write(tmp_path / "a", adapter_files())
    index = store.resolve(str(folder)).result()
    first = load(store, index.digest)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()

    assert store.resolve(str(folder)).result() is index
    again = load(store, index.digest)
    assert all(a.targets is b.targets for a, b in zip(first, again, strict=True))

    store.unload(index.digest)
    with pytest.raises(AdapterNotFound, match="folder"):
        store.resolve(str(folder)).result()


def test_a_folder_that_moved_is_read_at_its_new_place(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    before = store.resolve("a").result()
    (tmp_path / "a").rename(tmp_path / "b")

    after = store.resolve("b").result()

    assert after is before
    assert [layer.layer for layer in load(store, after.digest)] == [ENDS, 0, 1]


def test_unloading_frees_an_adapter_and_lists_it_no_more(
    store: AdapterStore, tmp_path: Path
) -> None:
    write(tmp_path / "a", adapter_files())
    summary = store.resolve("a").result()
    held = sum(layer.nbytes for layer in load(store, summary.digest))
    store.pin(summary.digest, True)

    assert store.unload(summary.digest) == held
    assert store.unload(summary.digest) == 0

    assert store.list() == ((), 0)
    assert not store.is_listed(summary.digest)
    assert store.host_bytes(summary.digest) == 0
    assert store.cache.pinned == frozenset()
    assert store.resolve("a").result() is summary
    assert store.list() == ((summary,), 1)
    load(store, summary.digest)
    assert store.bytes_read == 2 * summary.bytes


def test_who_was_resolved_before_an_unload_can_still_load(
    store: AdapterStore, tmp_path: Path
) -> None:
    write(tmp_path / "a", adapter_files())
    summary = store.resolve("a").result()

    store.unload(summary.digest)

    assert store.summary(summary.digest) is summary
    assert store.tier(summary.digest) == "disk"
    assert len(load(store, summary.digest)) == 3
    assert store.list() == ((summary,), 1)


@pytest.mark.parametrize("ask", ["summary", "tier", "files_of"])
def test_what_was_never_resolved_is_not_known(ask: str, store: AdapterStore) -> None:
    with pytest.raises(AdapterNotFound, match="resolve it first"):
        getattr(store, ask)("0" * 64)
    with pytest.raises(AdapterNotFound, match="resolve it first"):
        store.load("0" * 64, print)
    with pytest.raises(AdapterNotFound, match="resolve it first"):
        store.pin("0" * 64, True)
    assert store.unload("0" * 64) == 0


def test_tiers_follow_the_adapter(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    digest = store.resolve("a").result().digest

    assert store.tier(digest) == "disk"
    load(store, digest)
    assert store.tier(digest) == "host"
    store.cache.drop(digest)
    assert store.tier(digest) == "disk"


def test_an_adapter_that_memory_cannot_hold_is_read_every_time(tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    store = store_at(tmp_path, host_cache_bytes=0)
    index = store.resolve("a").result()

    assert len(load(store, index.digest)) == len(load(store, index.digest)) == 3

    assert store.bytes_read == 2 * index.bytes
    store.check()
    store.close()


def test_a_pinned_adapter_keeps_its_host_copy(tmp_path: Path) -> None:
    for n in (0, 1):
        write(tmp_path / f"a{n}", adapter_files(lora(seed=n)))
    store = store_at(tmp_path, host_cache_bytes=8000)
    first, second = (store.resolve(f"a{n}").result().digest for n in (0, 1))
    load(store, first)
    store.pin(first, True)

    load(store, second)

    assert store.tier(first) == "host"
    assert store.tier(second) == "disk"
    store.check()
    store.close()


def test_a_broken_adapter_fails_alone(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "good", adapter_files())
    files = adapter_files(lora(seed=2))
    nan = b"\xff" * 4
    write(
        tmp_path / "bad",
        files | {"adapter_model.safetensors": files["adapter_model.safetensors"][:-4] + nan},
    )
    good, bad = (store.resolve(name).result().digest for name in ("good", "bad"))
    layers: list[int] = []

    with pytest.raises(AdapterCorrupt, match="not finite"):
        store.load(bad, lambda layer: layers.append(layer.layer)).result()

    assert layers == [ENDS, 0]
    assert len(load(store, good)) == 3


def test_an_error_is_not_remembered(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", {"adapter_config.json": b"{"})
    with pytest.raises(AdapterError):
        store.resolve("a").result()
    write(tmp_path / "a", adapter_files())

    assert store.resolve("a").result().rank == 4


def test_a_name_that_is_refused_is_an_error_of_the_future(store: AdapterStore) -> None:
    assert isinstance(store.resolve("../x").exception(), AdapterNotFound)


def test_a_callback_that_fails_fails_its_load_only(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    digest = store.resolve("a").result().digest

    def broken(layer: LayerTensors) -> None:
        raise RuntimeError("no lanes")

    assert isinstance(store.load(digest, broken).exception(), RuntimeError)
    assert len(load(store, digest)) == 3


def test_an_adapter_that_is_known_is_found_while_loads_wait_for_the_disk(
    store: AdapterStore, tmp_path: Path
) -> None:
    for n in range(9):
        write(tmp_path / f"a{n}", adapter_files(lora(seed=n)))
    digests = [store.resolve(f"a{n}").result().digest for n in range(9)]
    may_end = threading.Event()

    def hold(layer: LayerTensors) -> None:
        may_end.wait()

    loads = [store.load(digest, hold) for digest in digests[1:]]
    try:
        found = store.resolve("a0").result(60)
    finally:
        may_end.set()

    assert found.digest == digests[0]
    assert [load.result(60) for load in loads] == [None] * 8


def test_closing_ends_what_had_not_begun(tmp_path: Path) -> None:
    for n in range(8):
        write(tmp_path / f"a{n}", adapter_files(lora(seed=n)))
    store = store_at(tmp_path)
    digests = [store.resolve(f"a{n}").result().digest for n in range(8)]
    began, go = threading.Event(), threading.Event()

    def hold(layer: LayerTensors) -> None:
        began.set()
        go.wait()

    loads = [store.load(digest, hold) for digest in digests]
    began.wait()
    store.close()
    go.set()

    errors = [future.exception() for future in loads]
    assert None in errors
    assert isinstance(errors[-1], SourceUnavailable)


def test_many_threads_keep_the_books_balanced(tmp_path: Path) -> None:
    for n in range(6):
        write(tmp_path / f"a{n}", adapter_files(lora(seed=n)))
    store = store_at(tmp_path, host_cache_bytes=20_000)

    def work(n: int) -> int:
        index = store.resolve(f"a{n % 6}").result()
        try:
            layers = load(store, index.digest)
        except AdapterNotFound:  # another thread unloaded it
            return 0
        if n % 5 == 0:
            store.unload(index.digest)
        return len(layers)

    with ThreadPoolExecutor(8) as workers:
        list(workers.map(work, range(120)))

    store.check()
    store.close()


def test_a_real_peft_adapter_is_served(store: AdapterStore, tmp_path: Path) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    lora_config = LoraConfig(r=4, target_modules="all-linear", use_rslora=True)
    get_peft_model(model, lora_config).save_pretrained(str(tmp_path / "a"))

    index = store.resolve("a").result()

    assert index.targets == 14
    targets = store.files_of(index.digest).index.targets
    assert {target.scale for target in targets.values()} == {8 / 2}
    assert len(load(store, index.digest)[1].targets) == 7

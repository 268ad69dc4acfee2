from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download, scan_cache_dir
from loralane_server.adapters.sources.hub_source import HubSettings
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.errors import (
    AdapterCorrupt,
    SourceUnavailable,
)

from tests.server.adapters.clock import Clock
from tests.server.adapters.samples import (
    adapter_files,
    load,
    lora,
    store_at,
)
from tests.server.adapters.sources.fake_hub import FakeHub, Fault, Repo

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def test_wrong_weights_are_kept_aside_fetched_once_more_and_then_refused_for_a_while(
    hub: FakeHub, hub_store: AdapterStore, clock: Clock, tmp_path: Path
) -> None:
    files = adapter_files()
    wrong = files[WEIGHTS][:-1] + b"\xff"
    hub.repos["org/a"] = Repo(files)
    digest = hub_store.resolve("org/a").result().digest
    hub.repos["org/a"].faults[WEIGHTS] = Fault(body=wrong)
    gets = hub.requests["GET", "org/a", WEIGHTS]

    for _ in range(3):
        with pytest.raises(AdapterCorrupt, match="checksum"):
            load(hub_store, digest)

    assert hub.requests["GET", "org/a", WEIGHTS] == gets + 2
    [aside] = (tmp_path / "cache").rglob("*.quarantined")
    assert aside.read_bytes() == wrong
    hub.repos["org/a"].faults.clear()
    clock.now += 11
    assert len(load(hub_store, digest)) == 3


def test_huggingface_hub_finds_our_downloads_and_nothing_else(
    hub: FakeHub, hub_store: AdapterStore, tmp_path: Path
) -> None:
    files = adapter_files()
    hub.repos["org/a"] = Repo(files, faults={WEIGHTS: Fault(body=files[WEIGHTS][:-1] + b"\xff")})
    digest = hub_store.resolve("org/a").result().digest
    with pytest.raises(AdapterCorrupt):
        load(hub_store, digest)
    hub.repos["org/b"] = Repo(files)
    load(hub_store, hub_store.resolve("org/b").result().digest)
    asked = hub.total()

    found = scan_cache_dir(tmp_path / "cache")
    path = hf_hub_download(
        "org/b", WEIGHTS, cache_dir=tmp_path / "cache", endpoint=hub.url, local_files_only=True
    )

    assert not found.warnings
    kept = {repo.repo_id: repo for repo in found.repos}
    assert set(kept["org/b"].refs) == {"main"}
    [revision] = kept["org/b"].revisions
    assert {file.file_name for file in revision.files} == {CONFIG, WEIGHTS}
    assert [file.file_name for one in kept["org/a"].revisions for file in one.files] == [CONFIG]
    assert Path(path).read_bytes() == files[WEIGHTS]
    assert hub.total() == asked


def test_what_huggingface_hub_downloaded_is_not_downloaded_again(
    hub: FakeHub, hub_store: AdapterStore, tmp_path: Path
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    for name in (CONFIG, WEIGHTS):
        hf_hub_download("org/a", name, cache_dir=tmp_path / "cache", endpoint=hub.url)
    gets = hub.total("GET")

    found = hub_store.resolve("org/a").result()

    assert hub_store.tier(found.digest) == "disk"
    assert len(load(hub_store, found.digest)) == 3
    assert hub.total("GET") == gets


def test_sixty_four_downloads_that_hang_hold_up_no_other(hub: FakeHub, tmp_path: Path) -> None:
    names = [f"org/hangs{n}" for n in range(64)]
    for n, name in enumerate(names):
        hub.repos[name] = Repo(adapter_files(lora(seed=n + 1)))
    hub.repos["org/well"] = Repo(adapter_files(lora(seed=99)))
    store = store_at(hub=HubSettings(hub.url, tmp_path / "cache", timeout_s=30.0))
    digests = [store.resolve(name).result().digest for name in (*names, "org/well")]
    for name in names:
        hub.repos[name].faults[WEIGHTS] = Fault(hang=True)
    waiting = [store.load(digest, lambda layer: None) for digest in digests[:-1]]

    layers = load(store, digests[-1])

    assert len(layers) == 3
    assert not any(future.done() for future in waiting)
    hub.closed.set()
    for future in waiting:
        assert isinstance(future.exception(), SourceUnavailable)
    store.close()


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_cached_file_whose_beginning_is_spoilt_is_found_and_fetched_again(
    name: str, hub: FakeHub, hub_store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    digest = hub_store.resolve("org/a").result().digest
    load(hub_store, digest)
    hub_store.unload(digest)
    opener: Any = hub_store.files_of(digest).open_file
    cached = opener(name).resolve()
    cached.write_bytes(bytes(64) + cached.read_bytes()[64:])
    clock.now += 6

    assert hub_store.resolve("org/a").result().digest == digest
    assert len(load(hub_store, digest)) == 3

    assert cached.read_bytes() == adapter_files()[name]


def test_a_spoilt_file_in_the_cache_is_fetched_again(hub: FakeHub, hub_store: AdapterStore) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    index = hub_store.resolve("org/a").result()
    load(hub_store, index.digest)
    hub_store.cache.drop(index.digest)
    opener: Any = hub_store.files_of(index.digest).open_file
    cached = opener(WEIGHTS).resolve()
    cached.write_bytes(cached.read_bytes()[:-4])

    assert len(load(hub_store, index.digest)) == 3

    assert cached.stat().st_size == len(adapter_files()[WEIGHTS])

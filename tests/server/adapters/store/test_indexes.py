import os
from pathlib import Path

import pytest
from loralane_server.adapters.formats.fields import CONFIG_FILE
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.device.seam import ENDS
from loralane_server.errors import AdapterCorrupt

from tests.server.adapters.samples import (
    BASE,
    adapter_files,
    load,
    lora,
    write_without_tensors,
)
from tests.server.adapters.sources.fake_hub import FakeHub, Repo

WEIGHTS = "adapter_model.safetensors"


def test_an_index_that_was_dropped_is_made_again_from_the_headers(
    store: AdapterStore, tmp_path: Path
) -> None:
    write_without_tensors(tmp_path, 300)
    digests = [store.resolve(f"a{n}").result().digest for n in range(300)]
    read = store.header_bytes_read

    indexes = [store.files_of(digest).index for digest in (digests[0], digests[-1])]

    assert [index.digest for index in indexes] == [digests[0], digests[-1]]
    assert len(indexes[0].targets) == 14
    assert store.header_bytes_read == read + read // 300
    assert store.files_of(digests[0]).index is indexes[0]


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS])
def test_an_index_is_not_made_of_files_that_changed(
    name: str, store: AdapterStore, tmp_path: Path
) -> None:
    write_without_tensors(tmp_path, 300)
    digests = [store.resolve(f"a{n}").result().digest for n in range(300)]
    file = tmp_path / "a0" / name
    file.write_bytes(file.read_bytes())
    os.utime(file, (1, 1))

    with pytest.raises(AdapterCorrupt, match="has changed since it was resolved"):
        store.load(digests[0], print).result()

    assert store.resolve("a0").result().digest != digests[0]


def test_an_index_of_the_hub_is_made_again_from_the_files_in_the_cache(
    hub: FakeHub, hub_store: AdapterStore, tmp_path: Path
) -> None:
    modules = [name for name, _, _ in BASE.modules]
    for n in range(200):
        files = adapter_files(lora(modules, seed=n), target_modules=modules)
        hub.repos[f"org/a{n}"] = Repo(files, commit=f"{n:040x}")
    digests = [hub_store.resolve(f"org/a{n}").result().digest for n in range(200)]

    layers = [layer.layer for layer in load(hub_store, digests[0])]
    index = hub_store.files_of(digests[0]).index

    assert layers == [ENDS, 0, 1]
    assert (index.digest, len(index.targets)) == (digests[0], 14)

"""Dry runs; what resolving remembers is in test_store.py and the tests of the sources."""

import json
from pathlib import Path

import pytest
from loralane_server.adapters.formats.fields import CONFIG_FILE
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterError,
    AdapterIncompatible,
    AdapterNotFound,
)

from tests.server.adapters.samples import (
    CONFIG,
    adapter_files,
    header_bytes,
    lora,
    write,
)
from tests.server.adapters.sources.fake_hub import FakeHub, Repo

WEIGHTS = "adapter_model.safetensors"


def test_a_dry_run_describes_an_adapter_and_remembers_nothing(
    store: AdapterStore, tmp_path: Path
) -> None:
    files = adapter_files(lora(["q_proj", "k_proj", "v_proj"]))
    write(tmp_path / "a", files)

    found = store.validate("a").result()

    assert (found.summary.reference, found.summary.rank, found.summary.targets) == ("a", 4, 6)
    assert found.notes == (
        "has tensors for k_proj, which target_modules does not name; they are used",
    )
    assert store.bytes_read == 0
    assert store.list() == ((), 0)
    with pytest.raises(AdapterNotFound):
        store.summary(found.summary.digest)
    assert store.resolve("a").result().digest == found.summary.digest


def test_a_dry_run_of_the_tensors_reads_them_and_keeps_none(
    store: AdapterStore, tmp_path: Path
) -> None:
    write(tmp_path / "a", adapter_files())

    found = store.validate("a", tensors=True).result()

    assert store.bytes_read == found.summary.bytes
    assert store.cache.bytes == 0
    assert store.list() == ((), 0)


def test_a_dry_run_of_the_tensors_finds_what_is_not_finite(
    store: AdapterStore, tmp_path: Path
) -> None:
    files = adapter_files()
    write(tmp_path / "a", files | {WEIGHTS: files[WEIGHTS][:-4] + b"\xff" * 4})

    assert store.validate("a").result().notes == ()
    with pytest.raises(AdapterCorrupt, match="not finite"):
        store.validate("a", tensors=True).result()


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({CONFIG_FILE: b"{"}, AdapterCorrupt),
        ({CONFIG_FILE: json.dumps(CONFIG | {"r": 8}).encode()}, AdapterIncompatible),
        ({WEIGHTS: b"short"}, AdapterCorrupt),
    ],
)
def test_a_dry_run_refuses_what_a_request_would_be_refused(
    files: dict[str, bytes], error: type[AdapterError], store: AdapterStore, tmp_path: Path
) -> None:
    write(tmp_path / "a", adapter_files() | files)

    with pytest.raises(error) as dry:
        store.validate("a").result()
    with pytest.raises(error) as real:
        store.resolve("a").result()

    assert str(dry.value) == str(real.value)
    assert isinstance(store.validate("../a").exception(), AdapterNotFound)


def test_a_dry_run_sees_a_file_that_was_replaced(store: AdapterStore, tmp_path: Path) -> None:
    write(tmp_path / "a", adapter_files())
    before = store.resolve("a").result()
    write(tmp_path / "a", adapter_files(lora(rank=2), r=2))

    found = store.validate("a").result()

    assert (found.summary.rank, before.rank) == (2, 4)
    assert store.list() == ((before,), 1)


def test_a_dry_run_asks_the_hub_with_the_callers_token(
    hub: FakeHub, hub_store: AdapterStore
) -> None:
    files = adapter_files()
    hub.repos["org/priv"] = Repo(files, needs_token="TOKEN_A")

    found = hub_store.validate("org/priv", "TOKEN_A").result()
    with pytest.raises(AdapterNotFound, match="may not see it"):
        hub_store.validate("org/priv", "TOKEN_B").result()

    assert (found.summary.kind, found.summary.rank) == ("hub", 4)
    assert hub.sent[WEIGHTS] == header_bytes(files[WEIGHTS])
    assert hub_store.list() == ((), 0)

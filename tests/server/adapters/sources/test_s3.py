import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from loralane_server.adapters.sources.references import S3Root
from loralane_server.adapters.sources.s3_source import S3Settings
from loralane_server.adapters.store.resolver import HUB_TTL_S
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.assembly import DEMO
from loralane_server.errors import (
    AdapterCorrupt,
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
from tests.server.adapters.sources.fake_s3 import FakeS3, S3Fault, Stored

WEIGHTS = "adapter_model.safetensors"
FOLDER = "bucket/team/adapters"
A = f"s3://{FOLDER}/a"


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_resolving_reads_config_and_header_and_no_tensor_byte(
    s3: FakeS3, s3_store: AdapterStore
) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)

    found = s3_store.resolve(A).result()

    assert (found.rank, found.reference, found.kind) == (4, A, "s3")
    assert s3.sent[f"{FOLDER}/a/{WEIGHTS}"] == header_bytes(files[WEIGHTS])
    assert s3_store.header_bytes_read == header_bytes(files[WEIGHTS])
    assert s3_store.tier(found.digest) == "remote"
    assert s3_store.bytes_read == 0


def test_the_first_load_downloads_once_and_later_ones_not_at_all(
    s3: FakeS3, s3_store: AdapterStore, tmp_path: Path
) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)
    found = s3_store.resolve(A).result()
    head = s3.sent[f"{FOLDER}/a/{WEIGHTS}"]

    first = load(s3_store, found.digest)
    s3_store.cache.drop(found.digest)
    second = load(s3_store, found.digest)

    assert s3.sent[f"{FOLDER}/a/{WEIGHTS}"] == head + len(files[WEIGHTS])
    assert [layer.layer for layer in first] == [-1, 0, 1]
    assert first[1].targets["q_proj"].a.equal(second[1].targets["q_proj"].a)
    kept = {hashlib.sha256(path.read_bytes()).digest() for path in files_in(tmp_path / "cache")}
    assert kept == {hashlib.sha256(content).digest() for content in files.values()}


def test_the_same_bytes_mean_the_same_as_from_a_folder(
    s3: FakeS3, s3_store: AdapterStore, tmp_path: Path
) -> None:
    s3.put_all(f"{FOLDER}/a", adapter_files())
    write(tmp_path / "folders" / "b", adapter_files())

    there = load(s3_store, s3_store.resolve(A).result().digest)
    here = load(s3_store, s3_store.resolve("b").result().digest)

    assert all(
        there[layer].targets[module].b.equal(here[layer].targets[module].b)
        for layer in (1, 2)
        for module in ("q_proj", "v_proj")
    )


def test_another_shard_finds_the_downloads_of_the_first(
    s3: FakeS3, s3_store: AdapterStore, tmp_path: Path
) -> None:
    s3.put_all(f"{FOLDER}/a", adapter_files())
    load(s3_store, s3_store.resolve(A).result().digest)
    gets = s3.total("GET")
    again = store_at(S3Root("bucket", "team"), s3=S3Settings(tmp_path / "cache"))

    found = again.resolve(A).result()

    assert again.tier(found.digest) == "disk"
    assert len(load(again, found.digest)) == 3
    assert s3.total("GET") == gets
    again.close()


def test_a_replaced_object_is_another_adapter(
    s3: FakeS3, s3_store: AdapterStore, clock: Clock
) -> None:
    s3.put_all(f"{FOLDER}/a", adapter_files())
    before = s3_store.resolve(A).result()
    s3.put_all(f"{FOLDER}/a", adapter_files(lora(seed=2)))
    clock.now += HUB_TTL_S + 1

    after = s3_store.resolve(A).result()

    assert after.digest != before.digest
    with pytest.raises(AdapterCorrupt, match="has changed since it was resolved"):
        load(s3_store, before.digest)
    assert len(load(s3_store, after.digest)) == 3


def test_an_object_that_is_put_again_unchanged_is_the_same_adapter(
    s3: FakeS3, s3_store: AdapterStore, clock: Clock
) -> None:
    s3.put_all(f"{FOLDER}/a", adapter_files())
    before = s3_store.resolve(A).result()
    s3.put_all(f"{FOLDER}/a", adapter_files())
    clock.now += HUB_TTL_S + 1

    assert s3_store.resolve(A).result().digest == before.digest


def test_in_a_versioned_bucket_a_load_reads_the_version_that_was_resolved(
    s3: FakeS3, s3_store: AdapterStore, clock: Clock
) -> None:
    for version, seed in (("v1", 1), ("v2", 2)):
        for name, content in adapter_files(lora(seed=seed)).items():
            s3.put(f"{FOLDER}/a/{name}", Stored(content, version))
        if version == "v1":
            old = s3_store.resolve(A).result()
    clock.now += HUB_TTL_S + 1
    new = s3_store.resolve(A).result()

    first, second = load(s3_store, old.digest), load(s3_store, new.digest)

    assert not first[1].targets["q_proj"].a.equal(second[1].targets["q_proj"].a)
    s3.put_all(f"{FOLDER}/b", adapter_files(lora(seed=1)))
    expected = load(s3_store, s3_store.resolve(f"s3://{FOLDER}/b").result().digest)
    assert first[1].targets["q_proj"].a.equal(expected[1].targets["q_proj"].a)


def test_an_object_that_is_replaced_during_the_look_is_looked_at_again(
    s3: FakeS3, s3_store: AdapterStore
) -> None:
    s3.put_all(f"{FOLDER}/a", adapter_files())
    s3.faults[f"{FOLDER}/a/{WEIGHTS}"] = S3Fault(412, "PreconditionFailed", times=1)

    assert s3_store.resolve(A).result().rank == 4


def test_the_command_line_names_prefixes_and_a_cache(s3: FakeS3, tmp_path: Path) -> None:
    folder = next(path for path in sorted((DEMO / "adapters").iterdir()) if path.is_dir())
    for path in folder.iterdir():
        s3.put(f"bucket/mine/{path.name}", Stored(path.read_bytes()))
    flags = ["--adapter-root=s3://bucket", f"--adapter-cache={tmp_path}"]

    command = [sys.executable, "-m", "loralane_server", "check", "s3://bucket/mine", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reference"] == "s3://bucket/mine"
    assert s3.requests["HEAD", "bucket/mine/adapter_config.json"] == 1

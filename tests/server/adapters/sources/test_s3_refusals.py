from pathlib import Path

import pytest
from loralane_server.adapters.sources.references import S3Root
from loralane_server.adapters.sources.s3_source import S3Settings
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterForbidden,
    AdapterIncompatible,
    AdapterNotFound,
    ShardError,
    SourceUnavailable,
)

from tests.server.adapters.clock import Clock
from tests.server.adapters.samples import (
    adapter_files,
    load,
    lora,
    safetensors,
    store_at,
)
from tests.server.adapters.sources.fake_s3 import FakeS3, S3Fault, Stored, sha256_header

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
FOLDER = "bucket/team/adapters"
A = f"s3://{FOLDER}/a"


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


CHECKSUMS = {
    "the MD5 in the ETag": {},
    "a SHA-256 of the object": sha256_header(adapter_files()[WEIGHTS]),
}


@pytest.mark.parametrize("case", CHECKSUMS)
def test_wrong_bytes_are_fetched_once_more_and_then_refused_for_a_while(
    case: str, s3: FakeS3, s3_store: AdapterStore, tmp_path: Path, clock: Clock
) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)
    key = f"{FOLDER}/a/{WEIGHTS}"
    etag = "" if not CHECKSUMS[case] else "0" * 32
    s3.put(key, Stored(files[WEIGHTS], headers=dict(CHECKSUMS[case]), etag=etag))
    digest = s3_store.resolve(A).result().digest
    gets = s3.requests["GET", key]
    wrong = files[WEIGHTS][:-1] + b"\xff"
    s3.faults[key] = S3Fault(body=wrong)

    for _ in range(3):
        with pytest.raises(AdapterCorrupt, match="checksum"):
            load(s3_store, digest)

    assert s3.requests["GET", key] == gets + 2
    kept = [path for path in files_in(tmp_path / "cache") if path.read_bytes() == wrong]
    assert [path.suffix for path in kept] == [".quarantined"]
    s3.faults.clear()
    clock.now += 11
    assert len(load(s3_store, digest)) == 3


def test_wrong_bytes_that_come_once_do_no_harm(s3: FakeS3, s3_store: AdapterStore) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)
    digest = s3_store.resolve(A).result().digest
    s3.faults[f"{FOLDER}/a/{WEIGHTS}"] = S3Fault(body=files[WEIGHTS][:-1] + b"\xff", times=1)

    assert len(load(s3_store, digest)) == 3


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-server-side-encryption": "aws:kms"},
        {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
        {"x-amz-checksum-sha256": "aGVsbG8=-3", "x-amz-server-side-encryption": "aws:kms"},
        {
            "x-amz-checksum-sha256": "aGVsbG8=",
            "x-amz-checksum-type": "COMPOSITE",
            "x-amz-server-side-encryption": "aws:kms",
        },
    ],
)
def test_what_is_no_checksum_of_the_whole_object_is_not_taken_for_one(
    headers: dict[str, str], s3: FakeS3, s3_store: AdapterStore
) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)
    s3.put(f"{FOLDER}/a/{WEIGHTS}", Stored(files[WEIGHTS], headers=headers, etag="0" * 32))

    assert len(load(s3_store, s3_store.resolve(A).result().digest)) == 3


def test_a_multipart_etag_is_no_checksum(s3: FakeS3, s3_store: AdapterStore) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)
    s3.put(f"{FOLDER}/a/{WEIGHTS}", Stored(files[WEIGHTS], etag=f"{'0' * 32}-2"))

    assert len(load(s3_store, s3_store.resolve(A).result().digest)) == 3


REFUSALS = {
    "missing": (CONFIG, S3Fault(404, "NoSuchKey"), AdapterNotFound, "no such bucket or object"),
    "forbidden": (CONFIG, S3Fault(403, "AccessDenied"), AdapterForbidden, "may not read it"),
    "forbidden weights": (WEIGHTS, S3Fault(403, "AccessDenied"), AdapterForbidden, "may not"),
    "busy": (
        CONFIG,
        S3Fault(503, "SlowDown", {"Retry-After": "7"}),
        SourceUnavailable,
        "answers 503",
    ),
    "broken": (WEIGHTS, S3Fault(500, "InternalError"), SourceUnavailable, "answers 500"),
    "too many": (WEIGHTS, S3Fault(429, "TooManyRequests"), SourceUnavailable, "answers 429"),
    "silent": (CONFIG, S3Fault(hang=True), SourceUnavailable, "does not answer"),
    "dripping": (WEIGHTS, S3Fault(drip_s=0.2), SourceUnavailable, "does not answer in full"),
    "cut off": (WEIGHTS, S3Fault(cut_after=3), SourceUnavailable, "does not answer"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_s3_refuses_has_a_name(case: str, s3: FakeS3, s3_store: AdapterStore) -> None:
    name, fault, error, words = REFUSALS[case]
    s3.put_all(f"{FOLDER}/a", adapter_files())
    s3.faults[f"{FOLDER}/a/{name}"] = fault

    with pytest.raises(error, match=words) as caught:
        s3_store.resolve(A).result()

    assert s3_store.list() == ((), 0)
    assert isinstance(caught.value, ShardError)
    away = 500 if error is SourceUnavailable else 0
    assert caught.value.retry_after_ms == (7000 if case == "busy" else away)
    assert "SECRET" not in repr(caught.value)


def test_a_store_that_is_not_there_is_unavailable(
    s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = store_at(S3Root("bucket"), s3=S3Settings(tmp_path, timeout_s=1.0))

    with pytest.raises(SourceUnavailable, match="does not answer"):
        store.resolve(A).result()
    store.close()


def test_a_shard_without_credentials_says_so_instead_of_not_found(
    s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = store_at(S3Root("bucket"), s3=S3Settings(tmp_path, timeout_s=1.0))

    with pytest.raises(SourceUnavailable, match="NoCredentialsError"):
        store.resolve(A).result()
    store.close()


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({"adapter_model.bin": b"\x80"}, AdapterIncompatible, r"adapter_model\.bin.*safetensors"),
        ({}, AdapterNotFound, r"adapter_model\.safetensors is missing"),
        ({WEIGHTS: b""}, AdapterCorrupt, "truncated"),
        ({WEIGHTS: b"<html>sign in</html>"}, AdapterCorrupt, "HTML"),
        ({WEIGHTS: safetensors(lora())[:-1]}, AdapterCorrupt, "truncated"),
    ],
)
def test_folders_that_hold_no_adapter_are_refused(
    files: dict[str, bytes], error: type[ShardError], words: str, s3: FakeS3, s3_store: AdapterStore
) -> None:
    s3.put_all(f"{FOLDER}/a", {CONFIG: adapter_files()[CONFIG]} | files)

    with pytest.raises(error, match=words):
        s3_store.resolve(A).result()

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from loralane_server.adapters.hub_source import HubSettings
from loralane_server.adapters.reader import LayerTensors
from loralane_server.adapters.references import S3Place, S3Root
from loralane_server.adapters.resolver import HUB_TTL_S
from loralane_server.adapters.s3_source import S3Settings
from loralane_server.adapters.store import AdapterStore
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterForbidden,
    AdapterIncompatible,
    AdapterNotFound,
    ShardError,
    SourceUnavailable,
)

from tests.server.adapters.fake_hub import FakeHub, Repo, fake_hub
from tests.server.adapters.fake_s3 import FakeS3, S3Fault, Stored, fake_s3, sha256_header
from tests.server.adapters.samples import (
    adapter_files,
    header_bytes,
    lora,
    safetensors,
    store_at,
    write,
)

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
FOLDER = "bucket/team/adapters"
A = f"s3://{FOLDER}/a"


class Clock:
    """Tells the time that it was set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with fake_s3() as s3:
        for name, value in {
            "AWS_ENDPOINT_URL": s3.url,
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "SECRET_OF_THE_SHARD",
            "AWS_REGION": "eu-west-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }.items():
            monkeypatch.setenv(name, value)
        yield s3


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def store(s3: FakeS3, hub: FakeHub, tmp_path: Path, clock: Clock) -> Iterator[AdapterStore]:
    (tmp_path / "folders").mkdir()
    store = store_at(
        tmp_path / "folders",
        S3Root("bucket", "team/adapters"),
        hub=HubSettings(hub.url, tmp_path / "hub", timeout_s=1.0),
        s3=S3Settings(tmp_path / "cache", timeout_s=1.0),
        clock=clock,
    )
    yield store
    store.check()
    store.close()


def load(store: AdapterStore, digest: str) -> list[LayerTensors]:
    layers: list[LayerTensors] = []
    store.load(digest, layers.append).result()
    return layers


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_resolving_reads_config_and_header_and_no_tensor_byte(
    s3: FakeS3, store: AdapterStore
) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)

    found = store.resolve(A).result()

    assert (found.rank, found.reference, found.kind) == (4, A, "s3")
    assert s3.sent[f"{FOLDER}/a/{WEIGHTS}"] == header_bytes(files[WEIGHTS])
    assert store.header_bytes_read == header_bytes(files[WEIGHTS])
    assert store.tier(found.digest) == "remote"
    assert store.bytes_read == 0


def test_the_first_load_downloads_once_and_later_ones_not_at_all(
    s3: FakeS3, store: AdapterStore, tmp_path: Path
) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)
    found = store.resolve(A).result()
    head = s3.sent[f"{FOLDER}/a/{WEIGHTS}"]

    first = load(store, found.digest)
    store.cache.drop(found.digest)
    second = load(store, found.digest)

    assert s3.sent[f"{FOLDER}/a/{WEIGHTS}"] == head + len(files[WEIGHTS])
    assert [layer.layer for layer in first] == [-1, 0, 1]
    assert first[1].targets["q_proj"].a.equal(second[1].targets["q_proj"].a)
    kept = {hashlib.sha256(path.read_bytes()).digest() for path in files_in(tmp_path / "cache")}
    assert kept == {hashlib.sha256(content).digest() for content in files.values()}


def test_the_same_bytes_mean_the_same_as_from_a_folder(
    s3: FakeS3, store: AdapterStore, tmp_path: Path
) -> None:
    s3.put_all(f"{FOLDER}/a", adapter_files())
    write(tmp_path / "folders" / "b", adapter_files())

    there = load(store, store.resolve(A).result().digest)
    here = load(store, store.resolve("b").result().digest)

    assert all(
        there[layer].targets[module].b.equal(here[layer].targets[module].b)
        for layer in (1, 2)
        for module in ("q_proj", "v_proj")
    )


def test_another_shard_finds_the_downloads_of_the_first(
    s3: FakeS3, store: AdapterStore, tmp_path: Path
) -> None:
    s3.put_all(f"{FOLDER}/a", adapter_files())
    load(store, store.resolve(A).result().digest)
    gets = s3.total("GET")
    again = store_at(S3Root("bucket", "team"), s3=S3Settings(tmp_path / "cache"))

    found = again.resolve(A).result()

    assert again.tier(found.digest) == "disk"
    assert len(load(again, found.digest)) == 3
    assert s3.total("GET") == gets
    again.close()


def test_a_replaced_object_is_another_adapter(
    s3: FakeS3, store: AdapterStore, clock: Clock
) -> None:
    s3.put_all(f"{FOLDER}/a", adapter_files())
    before = store.resolve(A).result()
    s3.put_all(f"{FOLDER}/a", adapter_files(lora(seed=2)))
    clock.now += HUB_TTL_S + 1

    after = store.resolve(A).result()

    assert after.digest != before.digest
    with pytest.raises(AdapterCorrupt, match="has changed since it was resolved"):
        load(store, before.digest)
    assert len(load(store, after.digest)) == 3


def test_an_object_that_is_put_again_unchanged_is_the_same_adapter(
    s3: FakeS3, store: AdapterStore, clock: Clock
) -> None:
    s3.put_all(f"{FOLDER}/a", adapter_files())
    before = store.resolve(A).result()
    s3.put_all(f"{FOLDER}/a", adapter_files())
    clock.now += HUB_TTL_S + 1

    assert store.resolve(A).result().digest == before.digest


def test_in_a_versioned_bucket_a_load_reads_the_version_that_was_resolved(
    s3: FakeS3, store: AdapterStore, clock: Clock
) -> None:
    for version, seed in (("v1", 1), ("v2", 2)):
        for name, content in adapter_files(lora(seed=seed)).items():
            s3.put(f"{FOLDER}/a/{name}", Stored(content, version))
        if version == "v1":
            old = store.resolve(A).result()
    clock.now += HUB_TTL_S + 1
    new = store.resolve(A).result()

    first, second = load(store, old.digest), load(store, new.digest)

    assert not first[1].targets["q_proj"].a.equal(second[1].targets["q_proj"].a)
    s3.put_all(f"{FOLDER}/b", adapter_files(lora(seed=1)))
    expected = load(store, store.resolve(f"s3://{FOLDER}/b").result().digest)
    assert first[1].targets["q_proj"].a.equal(expected[1].targets["q_proj"].a)


CHECKSUMS = {
    "the MD5 in the ETag": {},
    "a SHA-256 of the object": sha256_header(adapter_files()[WEIGHTS]),
}


@pytest.mark.parametrize("case", CHECKSUMS)
def test_wrong_bytes_are_fetched_once_more_and_then_refused_for_a_while(
    case: str, s3: FakeS3, store: AdapterStore, tmp_path: Path, clock: Clock
) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)
    key = f"{FOLDER}/a/{WEIGHTS}"
    etag = "" if not CHECKSUMS[case] else "0" * 32
    s3.put(key, Stored(files[WEIGHTS], headers=dict(CHECKSUMS[case]), etag=etag))
    digest = store.resolve(A).result().digest
    gets = s3.requests["GET", key]
    wrong = files[WEIGHTS][:-1] + b"\xff"
    s3.faults[key] = S3Fault(body=wrong)

    for _ in range(3):
        with pytest.raises(AdapterCorrupt, match="checksum"):
            load(store, digest)

    assert s3.requests["GET", key] == gets + 2
    kept = [path for path in files_in(tmp_path / "cache") if path.read_bytes() == wrong]
    assert [path.suffix for path in kept] == [".quarantined"]
    s3.faults.clear()
    clock.now += 11
    assert len(load(store, digest)) == 3


def test_wrong_bytes_that_come_once_do_no_harm(s3: FakeS3, store: AdapterStore) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)
    digest = store.resolve(A).result().digest
    s3.faults[f"{FOLDER}/a/{WEIGHTS}"] = S3Fault(body=files[WEIGHTS][:-1] + b"\xff", times=1)

    assert len(load(store, digest)) == 3


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
    headers: dict[str, str], s3: FakeS3, store: AdapterStore
) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)
    s3.put(f"{FOLDER}/a/{WEIGHTS}", Stored(files[WEIGHTS], headers=headers, etag="0" * 32))

    assert len(load(store, store.resolve(A).result().digest)) == 3


def test_a_multipart_etag_is_no_checksum(s3: FakeS3, store: AdapterStore) -> None:
    files = adapter_files()
    s3.put_all(f"{FOLDER}/a", files)
    s3.put(f"{FOLDER}/a/{WEIGHTS}", Stored(files[WEIGHTS], etag=f"{'0' * 32}-2"))

    assert len(load(store, store.resolve(A).result().digest)) == 3


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
def test_what_s3_refuses_has_a_name(case: str, s3: FakeS3, store: AdapterStore) -> None:
    name, fault, error, words = REFUSALS[case]
    s3.put_all(f"{FOLDER}/a", adapter_files())
    s3.faults[f"{FOLDER}/a/{name}"] = fault

    with pytest.raises(error, match=words) as caught:
        store.resolve(A).result()

    assert store.list() == ((), 0)
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
    files: dict[str, bytes], error: type[ShardError], words: str, s3: FakeS3, store: AdapterStore
) -> None:
    s3.put_all(f"{FOLDER}/a", {CONFIG: adapter_files()[CONFIG]} | files)

    with pytest.raises(error, match=words):
        store.resolve(A).result()


OUTSIDE = [
    "s3://bucket/team/adapters2/a", "s3://bucket/team/other/a", "s3://bucket/team/adapters",
    "s3://bucket/team/adapters/", "s3://bucket/team/adapters/../other/a",
    "s3://bucket/team/adapters//a", "s3://bucket/team/adapters/./a", "s3://bucket2/team/adapters/a",
    "s3://bucket", "s3://", "s3:///team/adapters/a", "S3://bucket/team/adapters/a",
    " s3://bucket/team/adapters/a", "s3://bucket/team/adapters/a\n",
    "s3://bucket/team/adapters/a\\b", "s3://bucket/team/adapters/a\0",
    "s3://bucket/team/adapters/s3://x/y", "http://127.0.0.1/a", "s3://bucket/team/adapters/a/",
    "s3://user:pass@bucket/team/adapters/a", "s3://Bucket/team/adapters/a",
    "s3://bucket/team/adapters/" + "a" * 2000,
]  # fmt: skip


@pytest.mark.parametrize("reference", OUTSIDE)
def test_nothing_outside_the_prefixes_is_ever_asked(
    reference: str, s3: FakeS3, hub: FakeHub, store: AdapterStore
) -> None:
    for folder in ("team/adapters2/a", "team/other/a", "team/adapters"):
        s3.put_all(f"bucket/{folder}", adapter_files())

    with pytest.raises(ShardError):
        store.resolve(reference).result()

    assert s3.total() == hub.total() == 0


def test_a_shard_index_cannot_lead_out_of_its_folder(s3: FakeS3, store: AdapterStore) -> None:
    index = b'{"weight_map": {"x": "../../other/adapter_model.safetensors"}}'
    files = {CONFIG: adapter_files()[CONFIG], f"{WEIGHTS}.index.json": index}
    s3.put_all(f"{FOLDER}/a", files)

    with pytest.raises(AdapterCorrupt, match="without any path"):
        store.resolve(A).result()

    assert not [key for _, key in s3.requests if "other" in key]


def test_a_relative_name_is_a_folder_then_an_object_then_a_hub_id(
    s3: FakeS3, hub: FakeHub, store: AdapterStore, tmp_path: Path
) -> None:
    write(tmp_path / "folders" / "org" / "here", adapter_files())
    for name in ("org/here", "org/there"):
        s3.put_all(f"{FOLDER}/{name}", adapter_files())
    for name in ("org/here", "org/there", "org/hub"):
        hub.repos[name] = Repo(adapter_files())

    kinds = [store.resolve(f"org/{name}").result().kind for name in ("here", "there", "hub")]

    assert kinds == ["local", "s3", "hub"]
    assert ("HEAD", f"{FOLDER}/org/here/{CONFIG}") not in s3.requests
    assert hub.requests["HEAD", "org/there", CONFIG] == 0


def test_a_known_hub_id_costs_s3_no_request(
    s3: FakeS3, hub: FakeHub, store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/hub"] = Repo(adapter_files())
    store.resolve("org/hub").result()
    assert s3.total() == 1

    for _ in range(3):
        clock.now += HUB_TTL_S + 1
        store.resolve("org/hub").result()
    store.resolve("org/hub", "another-token").result()

    assert s3.total() == 1
    assert hub.requests["HEAD", "org/hub", CONFIG] == 5


def test_what_is_gone_from_where_it_was_is_looked_for_everywhere_again(
    s3: FakeS3, hub: FakeHub, store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/x"] = Repo(adapter_files())
    store.resolve("org/x").result()
    s3.put_all(f"{FOLDER}/org/x", adapter_files())
    del hub.repos["org/x"]
    clock.now += HUB_TTL_S + 1

    assert store.resolve("org/x").result().kind == "s3"


def test_a_revision_names_the_hub_and_asks_nobody_else(
    s3: FakeS3, hub: FakeHub, store: AdapterStore
) -> None:
    hub.repos["org/x"] = Repo(adapter_files())
    s3.put_all(f"{FOLDER}/org/x", adapter_files())

    assert store.resolve("org/x@main").result().kind == "hub"
    assert s3.total() == 0


def test_a_name_that_no_hub_could_hold_may_be_a_key(
    s3: FakeS3, hub: FakeHub, store: AdapterStore
) -> None:
    s3.put_all(f"{FOLDER}/policy", adapter_files())
    s3.put_all(f"{FOLDER}/a/b/c", adapter_files())

    assert store.resolve("policy").result().kind == "s3"
    assert store.resolve("a/b/c").result().kind == "s3"
    assert hub.total() == 0


def test_where_listing_is_forbidden_a_missing_key_does_not_hide_the_hub(
    s3: FakeS3, hub: FakeHub, store: AdapterStore
) -> None:
    hub.repos["org/hub"] = Repo(adapter_files())
    s3.faults[f"{FOLDER}/org/hub/{CONFIG}"] = S3Fault(403, "AccessDenied")

    assert store.resolve("org/hub").result().kind == "hub"


def test_a_store_that_is_away_does_not_let_the_hub_answer_in_its_place(
    s3: FakeS3, hub: FakeHub, store: AdapterStore
) -> None:
    hub.repos["org/x"] = Repo(adapter_files())
    s3.faults[f"{FOLDER}/org/x/{CONFIG}"] = S3Fault(503, "SlowDown")

    with pytest.raises(SourceUnavailable, match="answers 503"):
        store.resolve("org/x").result()
    assert hub.total() == 0


def test_prefixes_are_asked_in_their_order(s3: FakeS3, tmp_path: Path) -> None:
    s3.put_all("second/x/a", adapter_files())
    store = store_at(S3Root("first", "x"), S3Root("second", "x"), s3=S3Settings(tmp_path))

    assert store.resolve("a").result().kind == "s3"
    assert s3.requests["HEAD", f"first/x/a/{CONFIG}"] == 1
    store.close()


def test_an_alias_may_lead_to_any_bucket(s3: FakeS3, tmp_path: Path) -> None:
    s3.put_all("elsewhere/a", adapter_files())
    store = store_at(aliases={"mine": "s3://elsewhere/a"}, s3=S3Settings(tmp_path))

    assert store.resolve("mine").result().kind == "s3"
    with pytest.raises(ShardError):
        store.resolve("s3://elsewhere/a").result()
    store.close()


def test_an_object_that_is_replaced_during_the_look_is_looked_at_again(
    s3: FakeS3, store: AdapterStore
) -> None:
    s3.put_all(f"{FOLDER}/a", adapter_files())
    s3.faults[f"{FOLDER}/a/{WEIGHTS}"] = S3Fault(412, "PreconditionFailed", times=1)

    assert store.resolve(A).result().rank == 4


def test_places_print_as_they_are_named() -> None:
    assert str(S3Place("b", "x/y")) == "s3://b/x/y"
    assert (str(S3Root("b")), str(S3Root("b", "x"))) == ("s3://b", "s3://b/x")

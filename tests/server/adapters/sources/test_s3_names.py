from pathlib import Path

import pytest
from loralane_server.adapters.sources.references import S3Place, S3Root
from loralane_server.adapters.sources.s3_source import S3Settings
from loralane_server.adapters.store.resolver import HUB_TTL_S
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.errors import (
    AdapterCorrupt,
    ShardError,
    SourceUnavailable,
)

from tests.server.adapters.clock import Clock
from tests.server.adapters.samples import (
    adapter_files,
    store_at,
    write,
)
from tests.server.adapters.sources.fake_hub import FakeHub, Repo
from tests.server.adapters.sources.fake_s3 import FakeS3, S3Fault

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
FOLDER = "bucket/team/adapters"
A = f"s3://{FOLDER}/a"

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
    reference: str, s3: FakeS3, hub: FakeHub, s3_store: AdapterStore
) -> None:
    for folder in ("team/adapters2/a", "team/other/a", "team/adapters"):
        s3.put_all(f"bucket/{folder}", adapter_files())

    with pytest.raises(ShardError):
        s3_store.resolve(reference).result()

    assert s3.total() == hub.total() == 0


def test_a_shard_index_cannot_lead_out_of_its_folder(s3: FakeS3, s3_store: AdapterStore) -> None:
    index = b'{"weight_map": {"x": "../../other/adapter_model.safetensors"}}'
    files = {CONFIG: adapter_files()[CONFIG], f"{WEIGHTS}.index.json": index}
    s3.put_all(f"{FOLDER}/a", files)

    with pytest.raises(AdapterCorrupt, match="without any path"):
        s3_store.resolve(A).result()

    assert not [key for _, key in s3.requests if "other" in key]


def test_a_relative_name_is_a_folder_then_an_object_then_a_hub_id(
    s3: FakeS3, hub: FakeHub, s3_store: AdapterStore, tmp_path: Path
) -> None:
    write(tmp_path / "folders" / "org" / "here", adapter_files())
    for name in ("org/here", "org/there"):
        s3.put_all(f"{FOLDER}/{name}", adapter_files())
    for name in ("org/here", "org/there", "org/hub"):
        hub.repos[name] = Repo(adapter_files())

    kinds = [s3_store.resolve(f"org/{name}").result().kind for name in ("here", "there", "hub")]

    assert kinds == ["local", "s3", "hub"]
    assert ("HEAD", f"{FOLDER}/org/here/{CONFIG}") not in s3.requests
    assert hub.requests["HEAD", "org/there", CONFIG] == 0


def test_a_known_hub_id_costs_s3_no_request(
    s3: FakeS3, hub: FakeHub, s3_store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/hub"] = Repo(adapter_files())
    s3_store.resolve("org/hub").result()
    assert s3.total() == 1

    for _ in range(3):
        clock.now += HUB_TTL_S + 1
        s3_store.resolve("org/hub").result()
    s3_store.resolve("org/hub", "another-token").result()

    assert s3.total() == 1
    assert hub.requests["HEAD", "org/hub", CONFIG] == 5


def test_what_is_gone_from_where_it_was_is_looked_for_everywhere_again(
    s3: FakeS3, hub: FakeHub, s3_store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/x"] = Repo(adapter_files())
    s3_store.resolve("org/x").result()
    s3.put_all(f"{FOLDER}/org/x", adapter_files())
    del hub.repos["org/x"]
    clock.now += HUB_TTL_S + 1

    assert s3_store.resolve("org/x").result().kind == "s3"


def test_a_revision_names_the_hub_and_asks_nobody_else(
    s3: FakeS3, hub: FakeHub, s3_store: AdapterStore
) -> None:
    hub.repos["org/x"] = Repo(adapter_files())
    s3.put_all(f"{FOLDER}/org/x", adapter_files())

    assert s3_store.resolve("org/x@main").result().kind == "hub"
    assert s3.total() == 0


def test_a_name_that_no_hub_could_hold_may_be_a_key(
    s3: FakeS3, hub: FakeHub, s3_store: AdapterStore
) -> None:
    s3.put_all(f"{FOLDER}/policy", adapter_files())
    s3.put_all(f"{FOLDER}/a/b/c", adapter_files())

    assert s3_store.resolve("policy").result().kind == "s3"
    assert s3_store.resolve("a/b/c").result().kind == "s3"
    assert hub.total() == 0


def test_where_listing_is_forbidden_a_missing_key_does_not_hide_the_hub(
    s3: FakeS3, hub: FakeHub, s3_store: AdapterStore
) -> None:
    hub.repos["org/hub"] = Repo(adapter_files())
    s3.faults[f"{FOLDER}/org/hub/{CONFIG}"] = S3Fault(403, "AccessDenied")

    assert s3_store.resolve("org/hub").result().kind == "hub"


def test_a_store_that_is_away_does_not_let_the_hub_answer_in_its_place(
    s3: FakeS3, hub: FakeHub, s3_store: AdapterStore
) -> None:
    hub.repos["org/x"] = Repo(adapter_files())
    s3.faults[f"{FOLDER}/org/x/{CONFIG}"] = S3Fault(503, "SlowDown")

    with pytest.raises(SourceUnavailable, match="answers 503"):
        s3_store.resolve("org/x").result()
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


def test_places_print_as_they_are_named() -> None:
    assert str(S3Place("b", "x/y")) == "s3://b/x/y"
    assert (str(S3Root("b")), str(S3Root("b", "x"))) == ("s3://b", "s3://b/x")

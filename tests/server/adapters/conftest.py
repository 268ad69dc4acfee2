from collections.abc import Iterator
from pathlib import Path

import pytest
from loralane_server.adapters.sources.hub_source import HubSettings
from loralane_server.adapters.sources.references import S3Root
from loralane_server.adapters.sources.s3_source import S3Settings
from loralane_server.adapters.store.store import AdapterStore

from tests.server.adapters.clock import Clock
from tests.server.adapters.samples import store_at
from tests.server.adapters.sources.fake_hub import FakeHub, fake_hub
from tests.server.adapters.sources.fake_s3 import FakeS3, fake_s3


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def hub_store(hub: FakeHub, tmp_path: Path, clock: Clock) -> Iterator[AdapterStore]:
    """A store that knows the hub alone."""
    store = store_at(hub=HubSettings(hub.url, tmp_path / "cache", timeout_s=1.0), clock=clock)
    yield store
    hub.open.set()
    store.check()
    store.close()


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
def s3_store(s3: FakeS3, hub: FakeHub, tmp_path: Path, clock: Clock) -> Iterator[AdapterStore]:
    """A store with a folder, a prefix of S3 and the hub."""
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

"""A store over the test's own folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from loralane_server.adapters.store.store import AdapterStore

from tests.server.adapters.samples import store_at


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    store = store_at(tmp_path)
    yield store
    store.check()
    store.close()

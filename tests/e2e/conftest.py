"""HTTP to the running product."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.product import PATIENCE_S, Served


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(served) as client:
        yield client


def client_of(served: Served) -> httpx.AsyncClient:
    """A client for as many streams at once as a test likes."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S, limits=limits)

"""What the tests over the whole product share: one tiny world, and one server for it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.product import Served, World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> "World":
    """A tiny model, adapters good and bad, and the reference's answers."""
    from tests.product import make_world  # brings torch, which most tests do not need

    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def served(world: "World") -> Iterator["Served"]:
    """`loralane serve` with the eight good adapters; at the end it stops cleanly."""
    from tests.product import serve, stop_cleanly

    with serve(*world.flags, "--max-rows=64") as served:
        yield served
        stop_cleanly(served.command)

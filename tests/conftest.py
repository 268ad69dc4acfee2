"""What tests share: the device that they run on; one tiny world, and one server for it."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from tests.product import Served, World


DeviceName = Literal["cpu", "xla"]

#: torch_xla has an environment of its own: `make test-xla`.
collect_ignore = [] if find_spec("torch_xla") else ["xla"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "xla"),
        default="cpu",
        help="what the shards of tests that fit any device run on",
    )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> DeviceName:
    """The device of tests that hold on any: the same bodies run in both environments."""
    name: DeviceName = request.config.getoption("--device")
    return name


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

"""Servers for real clients: the gateway over a fake router, and the whole product.

The tests here hold for both. What an answer must say, each target knows: the fake's answers are
worked out by hand, the product's come from the reference.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.product import Served, World

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "router" / "gateway" / "conftest.py"
CLIENTS_PYTHON = ROOT / ".venv-clients" / "bin" / "python"


@dataclass(frozen=True)
class Target:
    """A server, an adapter that it has ("" = base), and what it must answer greedily."""

    url: str
    adapter: str
    #: Of (adapter, prompt, tokens at most).
    answer: Callable[[str, str, int], str]


def reversed_words(adapter: str, prompt: str, tokens: int) -> str:
    """What the fake answers; it has one token a character."""
    answer = " ".join(reversed(prompt.split(" ")))
    return (answer + f"+{adapter}" if adapter else answer)[:tokens]


@contextmanager
def fake_target() -> Iterator[Target]:
    """The gateway in front of a fake router, in a process of its own."""
    with subprocess.Popen([sys.executable, FAKE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().removeprefix("ready ").strip()
        yield Target(url, "org/a", reversed_words)
        server.terminate()


@pytest.fixture(scope="session", params=["fake", "product"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    if request.param == "fake":
        with fake_target() as target:
            yield target
        return
    world: World = request.getfixturevalue("world")
    served: Served = request.getfixturevalue("served")
    yield Target(served.url, "a", world.text)


@pytest.fixture(scope="session")
def server_url(target: Target) -> str:
    return target.url


@pytest.fixture(scope="session")
def adapter(target: Target) -> str:
    """An adapter that the server has."""
    return target.adapter


@pytest.fixture(scope="session")
def missing_adapter() -> str:
    """An adapter that does not exist."""
    return "nope"


@pytest.fixture(scope="session")
def clients_python() -> Path:
    """The interpreter of the environment with the older clients."""
    if not CLIENTS_PYTHON.exists():
        pytest.fail(
            "lorax-client needs an environment of its own: python3 -m venv .venv-clients && "
            ".venv-clients/bin/pip install -c constraints/clients.txt lorax-client huggingface_hub",
            pytrace=False,
        )
    return CLIENTS_PYTHON

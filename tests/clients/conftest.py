"""A server for real clients. The tests here hold for any server: they know no text by heart."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "router" / "gateway" / "conftest.py"
CLIENTS_PYTHON = ROOT / ".venv-clients" / "bin" / "python"


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The gateway in front of a fake router, in a process of its own."""
    with subprocess.Popen([sys.executable, FAKE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().removeprefix("ready ").strip()
        server.terminate()


@pytest.fixture(scope="session")
def adapter() -> str:
    """An adapter that the server has."""
    return "org/a"


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

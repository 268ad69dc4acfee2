"""The unmodified `huggingface_hub` 0.x, in the environment of the older clients."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def probe(clients_python: Path, server_url: str, adapter: str, missing_adapter: str) -> Any:
    script = Path(__file__).with_name("hub_probe.py")
    command = [clients_python, script, server_url, adapter, missing_adapter]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_an_older_one(probe):
    assert probe["version"].startswith("0.")


def test_texts_are_those_of_base_and_adapter(probe, target):
    assert probe["base"] == target.answer("", "hello world", 12)
    assert probe["whole"] == target.answer(target.adapter, "hello world", 12)


def test_streams_carry_the_same_texts(probe):
    assert probe["stream"] == probe["async_stream"] == probe["whole"]
    assert probe["chat_stream"] == probe["chat"]


def test_details_count_the_tokens(probe):
    assert 0 < probe["generated_tokens"] <= 12


def test_a_missing_adapter_is_the_clients_own_error(probe):
    assert probe["missing"] == "GenerationError"

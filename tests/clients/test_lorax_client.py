"""The unmodified `lorax-client`, in an environment of its own."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def probe(clients_python: Path, server_url: str, adapter: str, missing_adapter: str) -> Any:
    script = Path(__file__).with_name("lorax_probe.py")
    command = [clients_python, script, server_url, adapter, missing_adapter]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_texts_are_those_of_base_and_adapter(probe, target):
    assert probe["base"]["text"] == target.answer("", "hello world", 12)
    assert probe["whole"]["text"] == target.answer(target.adapter, "hello world", 12)


def test_an_answer_has_the_details_that_the_client_requires(probe):
    whole = probe["whole"]

    assert whole["generated_tokens"] == len(whole["tokens"]) <= 12
    assert whole["prompt_tokens"] > 0
    assert whole["reason"] in ("length", "eos_token")
    assert "".join(whole["tokens"]) == whole["text"]


def test_a_stream_carries_the_same_text(probe):
    stream = probe["stream"]

    assert stream["joined"] == stream["text"] == probe["whole"]["text"]
    assert stream["generated_tokens"] == stream["events"] == probe["whole"]["generated_tokens"]
    assert stream["reason"] == probe["whole"]["reason"]


def test_the_async_client_gets_the_same(probe):
    assert probe["async_whole"] == probe["whole"]
    assert probe["async_stream"] == probe["stream"]


def test_alternatives_arrive(probe):
    assert probe["again"]["text"] == probe["whole"]["text"]
    assert set(probe["again"]["alternatives"]) == {2}


def test_a_seed_repeats_a_sample(probe):
    first, second = probe["sampled"]

    assert first == second


def test_errors_become_the_clients_exceptions(probe):
    assert probe["missing"] == probe["missing_stream"] == "GenerationError"
    assert probe["invalid"] == "ValidationError"

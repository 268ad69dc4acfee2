"""`make demo` as it runs: a process that serves, asks and shows, against a tiny model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.reference import (
    FAMILIES,
    AdapterRecipe,
    byte_tokenizer,
    greedy,
    random_model,
    save_adapter,
    save_model,
)

ROOT = Path(__file__).parents[2]
PROMPTS = ["Who are you?", "What is a fox?"]
#: The byte tokenizer's ids below this are visible ASCII, so that an answer is one word.
VISIBLE = 94
#: What demo.batch asks for.
TOKENS = 48


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters, and prompts, in one folder."""
    folder = tmp_path_factory.mktemp("show")
    model = random_model(FAMILIES["llama"])
    model.get_output_embeddings().weight.data[VISIBLE:] = 0
    save_model(model, folder / "model")
    for seed, name in enumerate(("loud", "quiet")):
        save_adapter(model, AdapterRecipe(name, 8, 16), folder / name, seed)
    (folder / "prompts.json").write_text(json.dumps({"prompts": PROMPTS}))
    return folder


def show(world: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "demo.show", f"--prompts={world / 'prompts.json'}"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def answer(world: Path, prompt: str, adapter: str | None) -> str:
    """What transformers and PEFT say to a chat of one question."""
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    model = random_model(FAMILIES["llama"])
    model.get_output_embeddings().weight.data[VISIBLE:] = 0
    said = greedy(model, world / adapter if adapter else None, [ids], TOKENS)
    text: str = tokenizer.decode(said[0])
    return text


def steps_of_the_last_batch(shown: str, tokens: int) -> int:
    """How many steps it took: as many as tokens if no two requests shared one."""
    *_, steps = re.findall(rf"{tokens} tokens in (\d+) steps", shown)
    return int(steps)


def processes_about(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in part for part in process.info["cmdline"] or ())
    ]


def test_every_model_answers_and_nothing_is_left_running(world):
    adapters = [f"--adapter={name}={world / name}" for name in ("loud", "quiet")]

    done = show(world, str(world / "model"), "--dtype=float32", "--threads=1", *adapters)

    assert done.returncode == 0, done.stderr
    for name, adapter in (("base", None), ("loud", "loud"), ("quiet", "quiet")):
        for prompt in PROMPTS:
            assert f"  {name:5}  {answer(world, prompt, adapter)}\n" in done.stdout
    # Half of this if all three begin at once, which a busy machine does not always manage.
    assert steps_of_the_last_batch(done.stdout, 3 * TOKENS) < 3 * TOKENS * 3 / 4
    assert "make serve" in done.stdout
    assert "\033" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert processes_about(world) == []


def test_a_model_that_cannot_be_served_is_one_error_with_the_servers_own_words(world):
    done = show(world, os.fspath(world / "loud"))

    assert done.returncode == 1
    assert "loralane serve ended with status 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert processes_about(world) == []

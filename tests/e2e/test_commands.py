"""`loralane shard` with `loralane router` in front of it, and `loralane check`."""

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.product import PATIENCE_S, Command, World, stop_cleanly

PROMPT, TOKENS = "tale 01", 16


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    """The commands of one test, ended whatever happens."""
    running: list[Command] = []
    yield running
    for command in running:
        command.end()


def ask(http: httpx.Client, adapter: str) -> httpx.Response:
    body = {"model": adapter, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    return http.post("/v1/completions", json=body)


def test_a_router_in_front_of_a_shard_survives_its_restart(world: World, commands: list[Command]):
    shard = Command("shard", *world.flags, "--listen=127.0.0.1:0")
    commands.append(shard)
    address = shard.wait_for(r"ready (\S+)")
    router = Command("router", f"--shard={address}", "--port=0")
    commands.append(router)
    url = router.wait_for(r"loralane serves model on (http://\S+)")

    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        first = ask(http, "a")
        stop_cleanly(shard)
        while http.get("/health/ready").status_code == 200:
            pass
        refused = ask(http, "a")
        again = Command("shard", *world.flags, f"--listen={address}")
        commands.append(again)
        again.wait_for(r"ready (\S+)")
        while http.get("/health/ready").status_code != 200:
            pass
        second = ask(http, "a")

    stop_cleanly(router)
    stop_cleanly(again)
    expected = world.text("a", PROMPT, TOKENS)
    assert first.json()["choices"][0]["text"] == expected
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert second.json()["choices"][0]["text"] == expected


def check(world: World, reference: str) -> "subprocess.CompletedProcess[str]":
    model, *flags = world.flags
    command = ["-m", "loralane_router", "check", reference, f"--model={model}", *flags]
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def test_a_shard_that_cannot_listen_says_where(world: World, commands: list[Command]):
    shard = Command("shard", *world.flags, "--listen=nowhere")
    commands.append(shard)

    assert shard.wait() == 1
    assert shard.output.endswith("loralane: cannot listen on nowhere; try another --listen")


def test_check_says_what_an_adapter_is(world: World):
    done = check(world, "g")

    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert (facts["reference"], facts["rank"], facts["lanes"], facts["targets"]) == (
        "g",
        24,
        24,
        21,
    )
    assert facts["bytes"] > 0
    assert "q_proj" in facts["modules"]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("wide", "lora_A.weight"),
        ("cut", "truncated"),
        ("/etc", "not below an --adapter-root"),
    ],
)
def test_check_refuses_with_1_and_the_reason(world: World, reference: str, message: str):
    done = check(world, reference)

    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr

"""`merged_adapters` of the unmodified `lorax-client`, against the whole product."""

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from tests.product import Served, World

#: Both of rank 8, one of them rsLoRA.
MEMBERS = ("a", "e")
PROMPT, TOKENS = "hello world", 12


@pytest.fixture(scope="module")
def probe(clients_python: Path, served: "Served") -> Any:
    script = Path(__file__).with_name("lorax_merge_probe.py")
    command = [clients_python, script, served.url, *MEMBERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_peft(world: "World", **options: Any) -> str:
    from tests import reference

    folders = [world.root / member for member in MEMBERS]
    with reference.together(world.model, folders, [0.5, 0.5], **options) as adapted:
        return world.decode(reference.continued(adapted, [world.ids(PROMPT)], TOKENS)[0])


def test_texts_are_those_of_peft(probe, world):
    ties = {"combination_type": "ties", "density": 0.5, "majority_sign_method": "frequency"}

    assert probe["texts"]["linear"] == by_peft(world, combination_type="linear")
    assert probe["texts"]["ties"] == by_peft(world, **ties)


def test_linear_is_the_default_and_streams_say_the_same(probe):
    linear = probe["texts"]["linear"]

    assert [probe[way] for way in ("default", "async", "stream")] == [linear] * 3


def test_every_strategy_says_its_own_and_says_it_again(probe, world):
    alone = {world.text(member, PROMPT, TOKENS) for member in ("", *MEMBERS)}

    assert len(alone | set(probe["texts"].values())) == len(alone) + 4
    assert probe["again"] == probe["texts"]


def test_a_member_that_is_missing_is_named(probe):
    kind, message = probe["missing"]

    assert kind == "GenerationError"
    assert "nope" in message


def test_the_merge_is_listed_by_a_name_that_tells_what_it_is(probe, served):
    # Other tests made this server know thousands: the page on which a merge's name would be.
    page = {"limit": 1000, "after": "merge:"}

    listed = httpx.get(f"{served.url}/v1/adapters", params=page).json()

    names = [adapter["name"] for adapter in listed["data"]]
    assert "merge:linear(a*0.5+e*0.5)" in names

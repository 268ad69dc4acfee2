"""A short soak, and proof that it would notice."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.product import PATIENCE_S, stop_cleanly
from tests.soak.clients import Moment, Record, crowd
from tests.soak.shelf import Shelf, Slot
from tests.soak.world import SoakWorld, soak_world

ADAPTERS, CHANGING, VERSIONS, CLIENTS = 60, 20, 3, 16
ANSWERS = 1000


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SoakWorld]:
    folder = tmp_path_factory.mktemp("soak")
    with soak_world(folder, ADAPTERS, CHANGING, VERSIONS) as world:
        yield world
        stop_cleanly(world.served.command)


def answered(count: int) -> Callable[[Record], bool]:
    return lambda record: record.counts["requests answered"] < count


async def test_adapters_that_come_go_and_change_never_answer_for_each_other(world):
    record = await crowd(
        world.served.url, world.shelf, world.base, CLIENTS, answered(ANSWERS), timeout=PATIENCE_S
    )

    assert record.is_good, "\n".join(record.lines())
    assert record.counts["requests answered"] >= ANSWERS
    assert record.counts["base requests"] > ANSWERS / 50
    assert record.counts["replacements on the disk"] > ANSWERS / 100
    assert record.counts["unload, 200"] > 0
    assert record.counts["answers that waited for their adapter"] > ADAPTERS


async def test_an_answer_of_another_adapter_is_noticed(world):
    *_, first, second = world.shelf.slots
    swapped = [replace(first, name=second.name), replace(second, name=first.name)]
    shelf = Shelf(world.shelf.root, swapped)

    record = await crowd(world.served.url, shelf, world.base, 2, answered(20), timeout=PATIENCE_S)

    assert record.wrong
    assert not record.is_good


def test_the_answer_of_a_version_that_was_replaced_before_the_request_is_wrong(world):
    slot = Slot("changes", world.shelf.slots[0].versions)
    slot.replaced = 4
    fingerprints = [version.fingerprint for version in slot.versions]

    at_rest = slot.fingerprints(since=4)
    meanwhile = slot.fingerprints(since=3)

    assert at_rest == [fingerprints[1]]
    assert meanwhile == [fingerprints[0], fingerprints[1]]


@pytest.mark.parametrize(
    ("status", "sent", "excused"),
    [
        (404, Moment(1, 1, 0), True),
        (404, Moment(1, 2, 1), True),
        (404, Moment(1, 2, 0), False),
        (424, Moment(0, 2, 0), True),
        (424, Moment(1, 2, 0), False),
        (500, Moment(0, 0, 1), False),
        (429, Moment(0, 0, 1), False),
    ],
)
def test_only_a_race_with_its_own_cause_excuses_a_refusal(
    world, status: int, sent: Moment, excused: bool
):
    slot = Slot("raced", (), replaced=1, unloaded=2)

    assert sent.excuses(slot, status) is excused


def test_a_refusal_that_nothing_explains_is_a_failure():
    assert not Record(unexpected=["a: 500"]).is_good
    assert Record().is_good

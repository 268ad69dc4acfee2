from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.sources.located import WEIGHTS_FILE
from loralane_server.adapters.store.catalogue import Catalogue
from loralane_server.adapters.store.entries import AdapterSummary, Derived, Entry, FromFiles
from loralane_server.errors import AdapterNotFound

from tests.server.adapters.samples import FUZZ


class World:
    """A catalogue, what is held, and the time."""

    def __init__(self, max_answers: int = 100, max_loose: int = 2) -> None:
        self.held: set[str] = set()
        self.now = 0.0
        self.catalogue = Catalogue(
            self.held.__contains__, lambda: self.now, max_answers=max_answers, max_loose=max_loose
        )

    def resolve(self, digest: str, reference: str = "", token: bytes = b"") -> AdapterSummary:
        return self.catalogue.remember((reference or f"org/{digest}", token), entry(digest))

    def knows(self, *digests: str) -> list[bool]:
        return [self.catalogue.find(digest) is not None for digest in digests]

    def listed(self) -> list[str]:
        return [summary.digest for summary in self.catalogue.page(0, "")[0]]


def entry(digest: str, members: tuple[str, ...] | None = None) -> Entry:
    summary = AdapterSummary(digest, f"org/{digest}", "local", 4, 100, 2, ("q_proj", "v_proj"))
    if members is not None:
        return Entry(summary, Derived(lambda: lambda layer: LayerTensors(layer, {}, 0), members))
    origin = FromFiles("local", (), Path, lambda: True, (WEIGHTS_FILE,))
    return Entry(summary, origin)


def test_what_was_remembered_is_found_by_who_asked_and_by_digest() -> None:
    world = World()
    world.now = 3.0
    summary = world.resolve("d1", token=b"t")
    world.now = 5.0

    found = world.catalogue.answer(("org/d1", b"t"))

    assert found is not None
    assert (found[0].summary, found[1]) == (summary, 2.0)
    assert world.catalogue.get("d1") is found[0]
    assert world.catalogue.answer(("org/d1", b"u")) is None
    world.catalogue.check()


def test_the_first_summary_stays_and_the_latest_way_to_the_bytes_is_used() -> None:
    world = World()
    first = world.resolve("d1", "one")
    moved = entry("d1")

    again = world.catalogue.remember(("two", b""), moved)

    assert again is first
    assert world.catalogue.get("d1").origin is moved.origin
    world.catalogue.check()


def test_adapters_that_change_the_same_modules_share_their_names() -> None:
    world = World()

    one, other = world.resolve("d1"), world.resolve("d2")

    assert one.modules is other.modules


def test_an_unloaded_entry_is_not_listed_and_can_be_loaded() -> None:
    world = World()
    summary = world.resolve("d1")

    world.catalogue.hide("d1")

    assert (world.listed(), world.catalogue.is_listed("d1")) == ([], False)
    assert world.catalogue.answer(("org/d1", b"")) is None
    assert world.catalogue.show("d1").summary is summary
    assert world.listed() == ["d1"]
    world.catalogue.check()


def test_loose_entries_beyond_the_bound_are_forgotten_oldest_first() -> None:
    world = World(max_loose=2)
    for digest in ("d1", "d2", "d3", "d4"):
        world.resolve(digest)

    for digest in ("d1", "d2", "d3"):
        world.catalogue.hide(digest)

    assert world.knows("d1", "d2", "d3", "d4") == [False, True, True, True]
    with pytest.raises(AdapterNotFound, match="resolve it first"):
        world.catalogue.get("d1")
    world.catalogue.check()


def test_a_loose_entry_that_is_used_is_forgotten_later() -> None:
    world = World(max_loose=2)
    for digest in ("d1", "d2", "d3"):
        world.resolve(digest)
    world.catalogue.hide("d1")
    world.catalogue.hide("d2")

    world.catalogue.show("d1")
    world.catalogue.hide("d3")

    assert world.knows("d1", "d2", "d3") == [True, False, True]
    world.catalogue.check()


def test_a_replaced_file_leaves_a_loose_entry() -> None:
    world = World(max_loose=1)
    for digest in ("d1", "d2", "d3"):
        world.resolve(digest, "same/name")

    assert world.knows("d1", "d2", "d3") == [False, True, True]
    assert world.listed() == ["d2", "d3"]
    world.catalogue.check()


def test_what_is_held_is_not_forgotten() -> None:
    world = World(max_loose=1)
    world.held.add("d1")
    for digest in ("d1", "d2", "d3", "d4"):
        world.resolve(digest, "same/name")

    assert world.knows("d1", "d2", "d3") == [True, False, True]
    world.held.clear()
    world.resolve("d5", "same/name")
    assert world.knows("d1", "d3", "d4", "d5") == [False, False, True, True]
    world.catalogue.check()


def test_answers_beyond_the_bound_are_forgotten_oldest_first() -> None:
    world = World(max_answers=2, max_loose=1)
    for digest in ("d1", "d2", "d1", "d3", "d4"):
        world.resolve(digest)

    assert world.catalogue.answer(("org/d1", b"")) is None
    assert world.catalogue.answer(("org/d3", b"")) is not None
    assert world.knows("d1", "d2", "d3", "d4") == [True, False, True, True]
    world.catalogue.check()


def test_many_callers_of_one_adapter_are_one_entry() -> None:
    world = World()
    for n in range(10):
        world.resolve("d1", token=bytes([n]))

    world.catalogue.hide("d1")

    assert world.listed() == []
    assert world.catalogue.answer(("org/d1", b"\x05")) is None
    world.catalogue.check()


def test_members_of_a_merge_stay_known_as_long_as_it_is() -> None:
    world = World(max_loose=1)
    world.resolve("d1")
    merged = world.catalogue.add(entry("m1", ("d1", "d1")))
    world.catalogue.hide("d1")
    world.resolve("d2")
    world.catalogue.hide("m1")

    assert world.knows("d1", "m1") == [True, True]
    assert world.catalogue.add(entry("m1", ("d1", "d1"))) is merged
    world.catalogue.hide("d2")
    world.catalogue.hide("m1")
    world.catalogue.check()

    world.resolve("d3")
    world.catalogue.hide("d3")
    assert world.knows("m1", "d2", "d3") == [False, False, True]
    world.catalogue.check()


def test_a_merge_of_what_is_not_known_is_refused() -> None:
    world = World()

    with pytest.raises(AdapterNotFound):
        world.catalogue.add(entry("m1", ("d1",)))

    assert world.knows("m1") == [False]
    world.catalogue.check()


def test_pages_follow_the_digests_and_end() -> None:
    world = World()
    for digest in ("d3", "d1", "d5", "d4", "d2"):
        world.resolve(digest)

    pages = [world.catalogue.page(2, after) for after in ("", "d2", "d4", "d5", "d21")]

    found = [[summary.digest for summary in page] for page, _ in pages]
    assert found == [["d1", "d2"], ["d3", "d4"], ["d5"], [], ["d3", "d4"]]
    assert {total for _, total in pages} == {5}
    assert len(world.catalogue.page(0, "d1")[0]) == 4


OPERATIONS = st.tuples(
    st.sampled_from(["resolve", "hide", "show", "hold", "let go", "merge"]),
    st.sampled_from("abcdef"),
    st.sampled_from("abcdef"),
)


@FUZZ
@given(st.lists(OPERATIONS, max_size=60))
def test_its_books_balance_whatever_happens(operations: list[tuple[str, str, str]]) -> None:
    world = World(max_answers=3, max_loose=2)
    catalogue = world.catalogue

    for verb, digest, other in operations:
        held = [name for name in world.held if catalogue.find(name)]
        try:
            match verb:
                case "resolve":
                    world.resolve(digest, f"org/{other}")
                case "hide":
                    catalogue.hide(digest)
                case "show":
                    catalogue.show(digest)
                case "hold":
                    world.held.add(digest)
                case "let go":
                    world.held.discard(digest)
                    held = []
                case _:
                    catalogue.add(entry(f"m{digest}{other}", (digest, other)))
        except AdapterNotFound:
            assert catalogue.find(digest) is None or catalogue.find(other) is None
        catalogue.check()
        assert all(world.knows(*held))

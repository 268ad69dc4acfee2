"""Listeners: each is told of its own rows and of what concerns everybody, and nothing twice."""

from dataclasses import replace

import pytest
from loralane_server.listeners import Listeners
from loralane_server.rows import (
    Admission,
    Capacity,
    OutToken,
    Residency,
    Row,
    Sink,
    StepEvent,
)

CAPACITY = Capacity(8, 8, 100, 100, 64, 64, 0)


class Heard:
    """What two listeners hear."""

    def __init__(self) -> None:
        self.listeners = Listeners()
        self.one: list[StepEvent] = []
        self.other: list[StepEvent] = []
        self.listeners.add(self.one.append, 0, CAPACITY)
        self.listeners.add(self.other.append, 0, CAPACITY)
        self.tell()
        self.one.clear()
        self.other.clear()

    def tell(self, *rows: Row, capacity: Capacity = CAPACITY, moved: bool = False) -> None:
        residency = (Residency("d", "host"),) if moved else ()
        self.listeners.tell(1, rows, residency, capacity)
        self.listeners.check()


@pytest.fixture
def heard() -> Heard:
    return Heard()


def row_of(sink: Sink) -> Row:
    row = Row(Admission(7, "", (1, 2), 4), sink, [1, 2])
    row.accept(OutToken(3))
    return row


def test_only_whose_row_it_is_hears_of_it_and_once(heard: Heard) -> None:
    row = row_of(heard.one.append)

    heard.tell(row)
    heard.tell(row)

    (event,) = heard.one
    assert [token.id for token in event.rows[0].tokens] == [3]
    assert heard.other == []


def test_everybody_hears_of_capacity_and_of_moves(heard: Heard) -> None:
    fewer = replace(CAPACITY, rows_free=7)

    heard.tell(capacity=fewer)
    heard.tell(capacity=fewer, moved=True)

    assert [event.capacity for event in heard.other] == [fewer, fewer]
    assert [event.residency for event in heard.one] == [(), (Residency("d", "host"),)]


def test_how_long_steps_take_is_no_news_by_itself(heard: Heard) -> None:
    heard.tell(capacity=replace(CAPACITY, step_ms=3.0, token_ms=0.1, pending_tokens=9))

    assert heard.one == heard.other == []


def test_a_listener_hears_that_its_admissions_are_counted_even_if_nothing_else_changed(
    heard: Heard,
) -> None:
    heard.listeners.count(heard.one.append)
    heard.listeners.count(heard.one.append)

    heard.tell()
    heard.tell()

    assert [event.admitted for event in heard.one] == [2]
    assert heard.other == []


def test_who_has_left_hears_and_counts_nothing(heard: Heard) -> None:
    sink = heard.one.append
    heard.listeners.remove(sink)

    heard.listeners.count(sink)
    heard.tell(row_of(sink), moved=True)

    assert heard.one == []
    assert len(heard.other) == 1

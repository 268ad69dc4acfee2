from collections.abc import Callable

import pytest
from loralane_server.adapters.sources.refusals import (
    MAX_RETRY_AFTER_S,
    BackOff,
    Refusals,
    retry_after_ms,
)
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterForbidden,
    AdapterIncompatible,
    AdapterNotFound,
    InvalidRequest,
    ShardError,
    SourceUnavailable,
)

from tests.server.adapters.clock import Clock


def waits(clock: Clock, refusals: Refusals, make: Callable[[], ShardError], n: int) -> list[float]:
    """Refuse n times, each as soon as that is possible; return how long each was refused for."""
    found = []
    for _ in range(n):
        refusals.check("key")
        began = clock.now
        refusals.refused("key", make())
        while True:
            try:
                refusals.check("key")
            except ShardError:
                clock.now += 0.25
            else:
                break
        found.append(clock.now - began)
    return found


@pytest.mark.parametrize(
    "kind", [AdapterNotFound, AdapterForbidden, AdapterIncompatible, AdapterCorrupt]
)
def test_what_is_refused_is_not_asked_for_again_for_a_second_that_doubles_to_thirty(
    kind: type[ShardError],
) -> None:
    clock = Clock()

    found = waits(clock, Refusals(clock), lambda: kind("no"), 8)

    assert found == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_source_that_is_away_is_asked_again_once_then_after_half_a_second_that_doubles() -> None:
    clock = Clock()

    found = waits(clock, Refusals(clock), lambda: SourceUnavailable("away"), 9)

    assert found == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]


def test_a_source_that_says_when_is_asked_then_but_not_after_an_age() -> None:
    clock = Clock()

    says_seven = waits(
        clock, Refusals(clock), lambda: SourceUnavailable("busy", retry_after_ms=7000), 3
    )
    says_a_day = waits(
        clock, Refusals(clock), lambda: SourceUnavailable("busy", retry_after_ms=86_400_000), 1
    )

    assert says_seven == [7, 7, 7]
    assert says_a_day == [MAX_RETRY_AFTER_S]


def test_who_asks_too_early_gets_the_same_error_and_what_is_left_of_the_wait() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    first = SourceUnavailable("the hub is busy", retry_after_ms=4000)
    refusals.refused("key", first)
    clock.now += 1.5

    with pytest.raises(SourceUnavailable, match="the hub is busy") as caught:
        refusals.check("key")

    assert caught.value.retry_after_ms == 2500
    assert first.retry_after_ms == 4000
    assert caught.value is not first


def test_the_first_error_of_a_source_that_is_away_says_when_to_come_back() -> None:
    error = SourceUnavailable("away")

    Refusals(Clock()).refused("key", error)

    assert error.retry_after_ms == 500


def test_tensors_are_remembered_with_the_error() -> None:
    refusals = Refusals(Clock())
    refusals.refused("key", AdapterIncompatible("no", tensors=["a.lora_A"]))

    with pytest.raises(AdapterIncompatible) as caught:
        refusals.check("key")

    assert caught.value.tensors == ("a.lora_A",)
    assert caught.value.retry_after_ms == 0


def test_success_starts_anew() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    waits(clock, refusals, lambda: AdapterNotFound("no"), 3)

    refusals.succeeded("key")

    assert waits(clock, refusals, lambda: AdapterNotFound("no"), 1) == [1]


def test_a_minute_without_a_question_starts_anew() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    waits(clock, refusals, lambda: AdapterNotFound("no"), 6)

    clock.now += 61

    assert waits(clock, refusals, lambda: AdapterNotFound("no"), 1) == [1]


def test_one_key_says_nothing_about_another() -> None:
    refusals = Refusals(Clock())
    refusals.refused(("org/a", b"hash of one token"), AdapterForbidden("no"))

    refusals.check(("org/a", b"hash of another"))
    refusals.check(("org/b", b"hash of one token"))


def test_what_is_wrong_by_itself_is_not_remembered() -> None:
    refusals = Refusals(Clock())
    refusals.refused("key", InvalidRequest("no"))

    refusals.check("key")


def test_the_memory_is_bounded_and_holds_no_tracebacks() -> None:
    refusals = Refusals(Clock())

    for n in range(5000):
        try:
            raise AdapterNotFound(f"adapter {n}")
        except AdapterNotFound as error:
            refusals.refused(n, error)

    refusals.check_bounds()
    refusals.check(0)  # the oldest were forgotten
    with pytest.raises(AdapterNotFound, match="adapter 4999"):
        refusals.check(4999)


def test_a_longer_back_off_may_be_asked_for() -> None:
    clock = Clock()

    found = waits(clock, Refusals(clock, BackOff(10, 25)), lambda: AdapterCorrupt("no"), 3)

    assert found == [10, 20, 25]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("7", 7000),
        (" 7 ", 7000),
        ("0", 0),
        ("", 0),
        ("soon", 0),
        ("-5", 0),
        ("\u0667", 0),
        ("9" * 40, 300_000),
        ("Thu, 01 Jan 1970 00:00:12 GMT", 2000),
        ("Thu, 01 Jan 1970 00:00:02 GMT", 0),
        ("Fri, 01 Jan 2100 00:00:00 GMT", 300_000),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(header: str, expected: int) -> None:
    assert retry_after_ms(header, now=10.0) == expected

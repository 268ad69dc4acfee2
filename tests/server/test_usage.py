"""How long adapters are remembered, and what is remembered of their loads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from loralane_server.rows import Admission
from loralane_server.usage import MAX_KNOWN, UsageBook

from tests.server.conftest import Listener
from tests.server.gated import GatedShard, gated

PROMPT = tuple(b"Once upon a time")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def running(tiny: Path, clock: Clock) -> Iterator[tuple[GatedShard, Listener]]:
    with gated(tiny, adapter_ttl=60.0, clock=clock) as shard:
        yield shard


Running = tuple[GatedShard, Listener]


def owners(shard: GatedShard) -> set[str]:
    return set(shard.engine.tenants())


def test_an_unused_adapter_expires_after_its_time_and_frees_its_lanes(
    running: Running, clock: Clock
) -> None:
    shard, listener = running
    digest = shard.digest("r12")
    listener.generate(Admission(1, digest, PROMPT, 2))

    clock.now += 60
    at_first = shard.engine.expire().result()
    clock.now += 1
    then = shard.engine.expire().result()

    assert (at_first, then) == ([], [digest])
    assert owners(shard) == set()
    assert shard.engine.expire().result() == []
    assert shard.engine.last_used(digest) == 0
    listener.wait_until(lambda: not resident(listener, digest))


def resident(listener: Listener, digest: str) -> bool:
    changes = [c for event in listener.steps for c in event.residency if c.digest == digest]
    return changes[-1].tier == "device"


def test_each_use_begins_the_time_anew(running: Running, clock: Clock) -> None:
    shard, listener = running
    digest = shard.digest("r12")
    for request_id in range(3):
        clock.now += 50
        listener.generate(Admission(request_id, digest, PROMPT, 2))

    assert shard.engine.expire().result() == []
    assert shard.engine.last_used(digest) == 1150


def test_an_adapter_of_its_own_time_expires_by_it_with_lanes_or_without(
    running: Running, clock: Clock
) -> None:
    shard, _ = running
    loaded, known, for_ever = (shard.digest(name) for name in ("r1", "r3", "r5"))
    shard.engine.load(loaded).result()
    shard.engine.load(for_ever).result()
    shard.engine.set_ttl(loaded, 5).result()
    shard.engine.set_ttl(known, 10).result()
    shard.engine.set_ttl(for_ever, 0).result()

    expired = []
    for _ in range(3):
        clock.now += 6
        expired.append(shard.engine.expire().result())
    clock.now += 1000

    assert expired == [[loaded], [known], []]
    assert shard.engine.expire().result() == []
    assert owners(shard) == {for_ever}
    assert [shard.engine.ttl(digest) for digest in (known, for_ever)] == [60, 0]


def test_who_is_in_use_pinned_or_being_loaded_does_not_expire(
    running: Running, clock: Clock
) -> None:
    shard, listener = running
    used, pinned, arriving = (shard.digest(name) for name in ("r1", "r3", "r5"))
    listener.admit(Admission(1, used, PROMPT, max_tokens=240))
    listener.wait_until(lambda: bool(listener.tokens(1)))
    shard.engine.load(pinned).result()
    shard.engine.pin(pinned, True).result()
    shard.store.hold(arriving)
    loading = shard.engine.load(arriving)

    clock.now += 1000
    expired = shard.engine.expire().result()

    assert expired == []
    assert owners(shard) == {used, pinned, arriving}
    shard.store.open(arriving)
    loading.result()
    assert shard.engine.expire().result() == []
    listener.cancel(1)
    listener.wait(1)
    shard.engine.pin(pinned, False).result()
    clock.now += 61
    assert set(shard.engine.expire().result()) == {used, pinned, arriving}


def test_without_a_time_nothing_expires(tiny: Path, clock: Clock) -> None:
    with gated(tiny, clock=clock) as (shard, _):
        digest = shard.digest("r1")
        shard.engine.load(digest).result()

        clock.now += 1e9

        assert shard.engine.expire().result() == []
        assert shard.engine.ttl(digest) == 0


def test_an_expired_adapter_comes_back_by_itself(running: Running, clock: Clock) -> None:
    shard, listener = running
    digest = shard.digest("r8")
    (first,) = listener.generate(Admission(1, digest, PROMPT, 8))
    clock.now += 61
    shard.engine.expire().result()
    forgotten = not shard.store.is_listed(digest) and not shard.store.host_bytes(digest)

    (again,) = listener.generate(Admission(2, digest, PROMPT, 8))

    assert forgotten
    assert again == first
    assert shard.store.is_listed(digest)


def test_a_load_is_told_apart_by_what_it_was_spent_on(running: Running) -> None:
    shard, _ = running
    digest = shard.digest("r16")
    unknown = shard.engine.load_times(digest)

    shard.engine.load(digest).result()
    cold = shard.engine.load_times(digest)
    whole = shard.engine.load_ms(digest)
    ahead = shard.digest("r8")
    shard.store.load(ahead, lambda layer: None).result()  # into the host cache, to its very end
    shard.engine.load(ahead).result()
    warm = shard.engine.load_times(ahead)

    assert unknown.open_ms == unknown.read_ms == unknown.cast_ms == unknown.write_ms == 0
    assert min(cold.open_ms, cold.read_ms, cold.cast_ms, cold.write_ms, cold.wait_ms) > 0
    assert cold.open_ms + cold.read_ms + cold.cast_ms < whole
    assert (warm.open_ms, warm.read_ms, warm.cast_ms) == (0, 0, 0)
    assert warm.write_ms > 0


def test_who_was_not_wanted_for_longest_is_forgotten_first() -> None:
    book = UsageBook(0.0, Clock())
    for number in range(MAX_KNOWN):
        book.wanted(str(number))
    book.set_ttl("0", 5)

    book.used("one more")

    assert [book.ttl(digest) for digest in ("0", "1")] == [5, 0]
    assert [book.get(digest).touched for digest in ("0", "1", "2")] == [1000, 0, 1000]

"""Which adapters came into host memory or left it: whole ones only, and whoever asks is woken."""

import threading

import pytest
from loralane_server.adapters.store.host_moves import HostMoves

WHOLE = 3


@pytest.fixture
def moves() -> HostMoves:
    return HostMoves(WHOLE)


def test_only_whole_adapters_come_and_go(moves: HostMoves) -> None:
    moves.note("part", 0, 1)
    moves.note("part", 1, 0)
    moves.note("came", WHOLE - 1, WHOLE)
    moves.note("left", WHOLE, 0)

    assert moves.take() == ("came", "left")
    assert moves.take() == ()


def test_the_first_move_wakes_whoever_takes_and_the_next_does_not(moves: HostMoves) -> None:
    woken: list[None] = []
    moves.watch(lambda: woken.append(None))

    for digest in ("a", "b", "a"):
        moves.note(digest, WHOLE, 0)
    taken = moves.take()
    moves.note("c", WHOLE, 0)

    assert taken == ("a", "b")
    assert len(woken) == 2


def test_nothing_that_other_threads_note_is_lost(moves: HostMoves) -> None:
    taken: list[str] = []

    def note(name: str) -> None:
        for i in range(200):
            moves.note(name + str(i), WHOLE, 0)

    threads = [threading.Thread(target=note, args=[name]) for name in "abcd"]

    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += moves.take()
    taken += moves.take()

    assert sorted(taken) == sorted(name + str(i) for name in "abcd" for i in range(200))

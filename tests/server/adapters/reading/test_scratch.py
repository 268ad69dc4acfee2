"""Memory for what is read: nobody's memory is given to somebody else."""

import torch
from loralane_server.adapters.reading.scratch import Scratch, Spares


def test_scratch_gives_memory_side_by_side_until_it_is_cleared() -> None:
    scratch = Scratch()
    scratch.room(1000)
    scratch.clear()

    first, second = scratch.room(300).fill_(1), scratch.room(500).fill_(2)

    assert bool((first == 1).all())
    assert second.data_ptr() == first.data_ptr() + 320
    assert second.data_ptr() % 64 == first.data_ptr() % 64


def test_scratch_that_is_full_leaves_what_was_given_alone() -> None:
    scratch = Scratch()
    first = scratch.room(100).fill_(1)

    scratch.room(1 << 20).fill_(2)

    assert bool((first == 1).all())


def test_as_much_is_made_ready_as_was_taken() -> None:
    spares = Spares()
    for _ in range(3):
        spares.room(4096)
    spares.refill()

    assert spares.ready_bytes == 3 * 4096


def test_a_block_is_given_once() -> None:
    spares = Spares()
    taken = [spares.room(4096) for _ in range(4)]
    spares.refill()
    taken += [spares.room(4096) for _ in range(5)]
    spares.refill()
    taken += [spares.room(4096) for _ in range(6)]

    assert len({block.data_ptr() for block in taken}) == 15
    assert all(block.dtype == torch.uint8 and len(block) == 4096 for block in taken)


def test_a_refill_after_nothing_was_taken_keeps_what_is_ready() -> None:
    spares = Spares()
    spares.room(4096)
    spares.refill()

    spares.refill()

    assert spares.ready_bytes == 4096


def test_no_more_than_the_bound_is_kept_ready() -> None:
    spares = Spares(most_bytes=10_000)
    for _ in range(5):
        spares.room(4096)

    spares.refill()

    assert spares.ready_bytes == 2 * 4096

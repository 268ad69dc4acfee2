"""KV pages: given low ones first, shared by count, kept while somebody thinks they are worth it."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loralane_server.device.seam import Int32
from loralane_server.errors import Overloaded
from loralane_server.kv.pages import PageTable, pages_for


class Hoarder:
    """Keeps every page, and gives up the one that was let go first."""

    def __init__(self) -> None:
        self.idle: list[int] = []

    def let_go(self, page: int) -> bool:
        self.idle.append(page)
        return True

    def claim(self, page: int) -> None:
        self.idle.remove(page)

    def evict(self) -> int:
        return self.idle.pop(0)


def hoarded(pages: int) -> PageTable:
    table = PageTable(pages)
    table.kept_by(Hoarder())
    return table


def test_pages_for_a_number_of_tokens() -> None:
    assert [pages_for(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_low_pages_are_given_first() -> None:
    table = PageTable(8)

    first, second = table.take(2), table.take(3)
    table.give_back(first)

    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3, 4])
    assert table.take(3).tolist() == [0, 1, 5]
    table.check()


def test_more_than_there_is_is_refused_and_nothing_is_taken() -> None:
    table = PageTable(4)
    table.take(3)

    with pytest.raises(Overloaded, match="2 wanted, 1 free"):
        table.take(2)

    assert table.free == 1
    assert table.take(1).tolist() == [3]
    assert table.take(0).tolist() == []
    table.check()


def test_a_shared_page_is_free_when_its_last_owner_leaves() -> None:
    table = PageTable(3)
    pages = table.take(2)
    table.share(pages[:1])

    table.give_back(pages)

    assert [table.owners(page) for page in range(3)] == [1, 0, 0]
    assert table.free == 2
    table.give_back(pages[:1])
    assert table.free == 3
    table.check()


def test_a_kept_page_counts_as_free_and_leaves_after_those_that_are() -> None:
    table = hoarded(4)
    table.give_back(table.take(2))

    assert (table.free, table.cached) == (4, 2)
    assert table.take(3).tolist() == [2, 3, 1]
    assert (table.free, table.cached) == (1, 1)
    table.check()


def test_a_kept_page_that_is_shared_cannot_be_taken() -> None:
    table = hoarded(2)
    pages = table.take(2)
    table.give_back(pages)

    table.share(pages[:1])

    assert (table.free, table.cached) == (1, 1)
    with pytest.raises(Overloaded, match="2 wanted, 1 free"):
        table.take(2)
    assert table.take(1).tolist() == [1]
    table.check()


@pytest.mark.parametrize("misuse", [PageTable.share, PageTable.give_back])
def test_a_page_without_owner_is_nobodys_to_share_or_give_back(
    misuse: Callable[[PageTable, Int32], None],
) -> None:
    table = PageTable(2)
    pages = table.take(1)
    table.give_back(pages)

    with pytest.raises(AssertionError, match="page 0"):
        misuse(table, pages)


@pytest.mark.parametrize("says_it_keeps", [True, False])
def test_check_finds_a_page_that_is_lost_or_both_free_and_kept(says_it_keeps: bool) -> None:
    class Liar(Hoarder):
        def let_go(self, page: int) -> bool:
            if not says_it_keeps:
                self.idle.append(page)
            return says_it_keeps

    table = PageTable(4)
    table.kept_by(Liar())
    table.check()

    table.give_back(table.take(1))

    with pytest.raises(AssertionError):
        table.check()


@given(st.integers(0, 40), st.lists(st.integers(0, 12), max_size=30), st.booleans())
def test_pages_are_conserved(total: int, sizes: list[int], kept: bool) -> None:
    table = hoarded(total) if kept else PageTable(total)
    held: list[Int32] = []

    for size in sizes:
        if size > table.free:
            table.give_back(held.pop(0) if held else np.empty(0, dtype=np.int32))
        else:
            held.append(table.take(size))

    owned = [page for pages in held for page in pages.tolist()]
    assert len(set(owned)) == len(owned) == total - table.free
    table.check()

"""The prefix cache: what is found is what was asked for, and prefixes leave from their ends."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from loralane_server.device.seam import Int32
from loralane_server.errors import Overloaded
from loralane_server.kv.pages import PAGE_TOKENS, PageTable, pages_for
from loralane_server.kv.prefix_cache import Chain, PrefixCache


def text(letters: str, more: int = 1) -> list[int]:
    """Return one page of tokens for each letter, and some more tokens."""
    return [ord(letter) for letter in letters for _ in range(PAGE_TOKENS)] + [0] * more


@dataclass
class Computed:
    """A row with all its tokens computed."""

    chain: Chain
    tokens: list[int]
    pages: Int32
    #: How many of its pages were not computed.
    found: int


@dataclass
class Shard:
    """Table and cache, used as the loop uses them."""

    table: PageTable
    cache: PrefixCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.table)

    def compute(self, digest: str, tokens: list[int], chain: Chain | None = None) -> Computed:
        """Start a row, or one that was stopped, and compute all its tokens."""
        chain = chain or Chain(digest)
        found = self.cache.match(chain, tokens)
        taken = self.table.take(pages_for(len(tokens)) - len(found))
        row = Computed(chain, tokens, np.concatenate([found, taken]), len(found))
        self.cache.keep(chain, tokens, row.pages, len(tokens))
        return row

    def run(self, digest: str, tokens: list[int]) -> Computed:
        """Start a row, compute all and end it."""
        row = self.compute(digest, tokens)
        self.table.give_back(row.pages)
        return row

    def finds(self, digest: str, tokens: list[int]) -> int:
        """Return how many pages a row would not have to compute."""
        found = self.cache.match(Chain(digest), tokens)
        self.table.give_back(found)
        return len(found)

    def check(self) -> None:
        self.table.check()
        self.cache.check()


@pytest.fixture
def shard() -> Shard:
    return Shard(PageTable(8))


def test_a_prefix_computed_before_is_found_and_owned(shard: Shard) -> None:
    first = shard.run("", text("ab", more=5))

    second = shard.compute("", text("abc"))

    assert second.found == 2
    assert second.pages[:2].tolist() == first.pages[:2].tolist()
    assert [shard.table.owners(page) for page in second.pages.tolist()] == [1] * 4
    assert shard.table.free == 4
    shard.check()


def test_what_a_running_row_has_computed_is_shared_with_it(shard: Shard) -> None:
    first = shard.compute("", text("ab"))

    second = shard.compute("", text("ab"))

    assert second.pages[:2].tolist() == first.pages[:2].tolist()
    assert second.pages[2] != first.pages[2]
    assert [shard.table.owners(page) for page in first.pages.tolist()] == [2, 2, 1]
    shard.check()


def test_the_last_token_is_never_found(shard: Shard) -> None:
    shard.run("", text("ab", more=0))

    assert shard.finds("", text("ab", more=0)) == 1
    assert shard.finds("", text("ab", more=1)) == 2
    assert shard.finds("", text("", more=1)) == 0
    assert shard.finds("", []) == 0
    shard.check()


def test_only_full_pages_are_kept(shard: Shard) -> None:
    tokens = text("ab")
    chain = Chain("")
    shard.cache.match(chain, tokens)
    pages = shard.table.take(3)

    for computed, kept in [(0, 0), (15, 0), (16, 1), (31, 1), (31, 1), (33, 2), (33, 2)]:
        shard.cache.keep(chain, tokens, pages, computed)
        assert shard.finds("", tokens) == kept

    shard.check()


def test_pages_that_generation_fills_are_kept(shard: Shard) -> None:
    row = shard.compute("", text("a", more=15))
    row.tokens.append(0)
    shard.cache.keep(row.chain, row.tokens, row.pages, 32)

    assert shard.finds("", text("a", more=17)) == 2
    shard.check()


def test_adapters_and_the_base_share_nothing(shard: Shard) -> None:
    shard.run("one", text("ab"))

    assert shard.finds("one", text("ab")) == 2
    assert shard.finds("two", text("ab")) == 0
    assert shard.finds("", text("ab")) == 0
    shard.check()


def test_the_same_tokens_behind_others_are_not_the_same(shard: Shard) -> None:
    shard.run("", text("ab"))

    assert shard.finds("", text("cb")) == 0
    assert shard.finds("", text("ba")) == 0
    assert shard.finds("", text("b")) == 0
    assert shard.finds("", text("acb")) == 1
    assert shard.finds("", [0, *text("ab")]) == 0
    shard.check()


def test_every_token_of_a_page_counts(shard: Shard) -> None:
    shard.run("", text("ab"))

    for i in range(2 * PAGE_TOKENS):
        tokens = text("ab")
        tokens[i] = 0
        assert shard.finds("", tokens) == i // PAGE_TOKENS

    shard.check()


def test_what_a_row_needs_is_never_given_up_for_another(shard: Shard) -> None:
    shard.run("", text("ab"))
    row = shard.compute("", text("ab"))

    with pytest.raises(Overloaded, match="6 wanted, 5 free"):
        shard.table.take(6)
    other = shard.table.take(5)

    assert not set(other.tolist()) & set(row.pages.tolist())
    assert shard.table.cached == 0
    shard.check()


def test_the_end_of_a_prefix_leaves_before_its_beginning(shard: Shard) -> None:
    shard.run("", text("abcd"))

    for free, found in [(4, 4), (1, 3), (1, 2), (1, 1), (1, 0)]:
        shard.table.take(free)
        assert shard.finds("", text("abcd")) == found
        shard.check()


def test_the_prefix_that_was_used_last_leaves_last(shard: Shard) -> None:
    shard.run("", text("ab"))
    shard.run("", text("cd"))
    shard.finds("", text("ab"))

    shard.table.take(6)

    assert shard.finds("", text("cd")) == 0
    assert shard.finds("", text("ab")) == 2
    shard.check()


def test_a_beginning_that_two_prefixes_share_leaves_after_both(shard: Shard) -> None:
    shard.run("", text("ab"))
    shard.run("", text("ac"))

    for taken, found in [(6, (1, 2)), (1, (1, 1)), (1, (0, 0))]:
        shard.table.take(taken)
        assert (shard.finds("", text("ab")), shard.finds("", text("ac"))) == found
        shard.check()


def rows_side_by_side(shard: Shard) -> tuple[Computed, Computed]:
    """Return two rows that began with the same page before either was computed."""
    chains = Chain(""), Chain("")
    texts = text("ab"), text("ac")
    for chain, tokens in zip(chains, texts, strict=True):
        shard.cache.match(chain, tokens)
    rows = [Computed(c, t, shard.table.take(3), 0) for c, t in zip(chains, texts, strict=True)]
    for row in rows:
        shard.cache.keep(row.chain, row.tokens, row.pages, len(row.tokens))
    return rows[0], rows[1]


def test_of_two_pages_with_the_same_prefix_the_first_is_kept(shard: Shard) -> None:
    first, second = rows_side_by_side(shard)

    shard.table.give_back(second.pages)

    assert shard.table.cached == 1
    found = shard.cache.match(Chain(""), text("ac"))
    assert found.tolist() == [first.pages[0], second.pages[1]]
    shard.check()


def test_a_page_leaves_before_the_one_that_leads_to_it_though_another_row_had_that(
    shard: Shard,
) -> None:
    first, second = rows_side_by_side(shard)
    shard.table.give_back(first.pages)
    shard.table.give_back(second.pages)

    left = [shard.table.take(n)[-1] for n in (6, 1, 1)]

    assert left == [first.pages[1], second.pages[1], first.pages[0]]
    shard.check()


def test_a_page_behind_a_lost_one_is_found_again_when_that_is_computed_again(shard: Shard) -> None:
    first, second = rows_side_by_side(shard)
    shard.table.give_back(first.pages)
    lost = shard.table.take(5)
    assert shard.finds("", text("ac")) == 0
    shard.check()
    shard.table.give_back(lost)

    shard.run("", text("a"))

    found = shard.cache.match(Chain(""), text("ac"))
    assert found.tolist()[1:] == [second.pages[1]]
    shard.check()


def test_a_page_that_nothing_leads_to_leaves_like_others(shard: Shard) -> None:
    first, second = rows_side_by_side(shard)
    shard.table.give_back(first.pages)
    shard.table.give_back(shard.table.take(5))

    shard.table.give_back(second.pages)

    assert (shard.table.free, shard.table.cached) == (8, 1)
    assert len(shard.table.take(8)) == 8
    shard.check()


def test_a_stopped_row_finds_its_own_pages_again(shard: Shard) -> None:
    row = shard.compute("", text("ab", more=3))
    shard.table.give_back(row.pages)

    again = shard.compute("", row.tokens, row.chain)

    assert again.found == 2
    assert again.pages[:2].tolist() == row.pages[:2].tolist()
    shard.check()


def test_a_stopped_row_keeps_anew_what_was_given_up_meanwhile(shard: Shard) -> None:
    row = shard.compute("", text("ab", more=3))
    shard.table.give_back(row.pages)
    shard.table.give_back(shard.table.take(7))

    again = shard.compute("", row.tokens, row.chain)

    assert again.found == 1
    assert shard.finds("", text("ab")) == 2
    shard.check()


def test_hits_are_counted_in_tokens(shard: Shard) -> None:
    shard.run("", text("ab", more=8))
    shard.run("", text("abc", more=8))

    assert (shard.cache.asked, shard.cache.matched) == (40 + 56, 32)


def test_switched_off_it_keeps_and_finds_nothing() -> None:
    table = PageTable(8)
    cache = PrefixCache(table, enabled=False)
    chain, tokens = Chain(""), text("ab")
    pages = table.take(3)

    cache.keep(chain, tokens, pages, len(tokens))

    assert cache.match(Chain(""), tokens).tolist() == []
    table.give_back(pages)
    assert (table.free, table.cached) == (8, 0)
    cache.check()
    table.check()

"""Pages and prefix cache in any order of events, beside a model that knows all prefixes by heart.

The model keeps whole prefixes where the cache keeps hashes, remembers what was last written to
every page, and foretells each answer: what is found, what is given up, and in which order.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from loralane_server.device.seam import Int32
from loralane_server.errors import Overloaded
from loralane_server.kv.pages import PAGE_TOKENS, PageTable, pages_for
from loralane_server.kv.prefix_cache import Chain, PrefixCache

PAGES = 12
MOST_ROWS = 5
MOST_TOKENS = PAGES * PAGE_TOKENS

#: All that the keys and values in a page depend on: digest, and all tokens up to the page's last.
Prefix = tuple[str, tuple[int, ...]]

#: Few digests and tokens, whole pages of one and some odd ones: so prefixes meet, and part again.
digests = st.sampled_from(["", "one", "two"])
blocks = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4)
odd = st.integers(0, PAGE_TOKENS + 1)


@dataclass(eq=False)
class Row:
    """A row; without pages it is stopped, or has not begun."""

    digest: str
    tokens: list[int]
    chain: Chain
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    #: How many of its pages were found or offered to the cache since it began or went on.
    offered: int = 0

    @property
    def array(self) -> Int32:
        """The pages as the code under test wants them."""
        return np.array(self.pages, dtype=np.int32)

    def prefix(self, page: int) -> Prefix:
        """Return what the row's page with that index holds when it is full."""
        return self.digest, tuple(self.tokens[: (page + 1) * PAGE_TOKENS])


def pick(data: st.DataObject, rows: list[Row]) -> Row:
    """Draw a row, by its place: that is short to print."""
    return rows[data.draw(st.integers(0, len(rows) - 1))]


class Model:
    """Naive books: who owns which page, what is in it, what is kept, and when it was used."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.written: dict[int, Prefix] = {}
        self.kept: dict[Prefix, int] = {}
        #: Of the idle ones: the release that last used it, and of one release the ends first.
        self.used: dict[int, tuple[int, int]] = {}
        self.releases = 0

    @property
    def owners(self) -> Counter[int]:
        """How many rows own each page."""
        return Counter(page for row in self.rows for page in row.pages)

    @property
    def idle(self) -> list[int]:
        """The kept pages that nobody owns, in the order in which they are to leave."""
        owned = self.owners
        idle = [page for page in self.kept.values() if not owned[page]]
        return sorted(idle, key=lambda page: self.used[page])

    @property
    def free(self) -> set[int]:
        """The pages that nobody owns or keeps."""
        return set(range(PAGES)) - self.owners.keys() - set(self.kept.values())

    def find(self, row: Row) -> list[int]:
        """Return the pages of the longest kept prefix that leaves a token to compute."""
        found: list[int] = []
        for i in range((len(row.tokens) - 1) // PAGE_TOKENS):
            if row.prefix(i) not in self.kept:
                break
            found.append(self.kept[row.prefix(i)])
        return found

    def release(self, row: Row) -> None:
        """Take a row's pages away: what that makes idle was used now, and all that leads to it."""
        pages, row.pages, row.computed = row.pages, [], 0
        self.releases += 1
        owned, reached = self.owners, False
        for i in reversed(range(len(pages))):
            page = self.kept.get(row.prefix(i))
            reached = page is not None and not owned[page] and (reached or page == pages[i])
            if page is not None and reached:
                self.used[page] = (self.releases, -i)

    def evict(self, count: int) -> set[int]:
        """Give up the idle pages that leave next."""
        gone = set(self.idle[:count])
        self.kept = {prefix: page for prefix, page in self.kept.items() if page not in gone}
        return gone


class PrefixMachine(RuleBasedStateMachine):
    """Rows start, compute, generate, are stopped, go on and end; the cache does as the model."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen
        self.table = PageTable(PAGES)
        self.cache = PrefixCache(self.table)
        self.model = Model()

    @rule(digest=digests, letters=blocks, more=odd)
    @precondition(lambda self: len(self.model.rows) < MOST_ROWS)
    def start(self, digest: str, letters: list[int], more: int) -> None:
        tokens = [letter for letter in letters for _ in range(PAGE_TOKENS)] + [1] * more
        self.begin(Row(digest, tokens, Chain(digest)))

    @rule(data=st.data(), digest=digests, same=st.booleans())
    @precondition(lambda self: 0 < len(self.model.rows) < MOST_ROWS)
    def start_with_the_tokens_of_another(
        self, data: st.DataObject, digest: str, same: bool
    ) -> None:
        other = pick(data, self.model.rows)
        digest = other.digest if same else digest
        self.begin(Row(digest, list(other.tokens), Chain(digest)))

    @rule(data=st.data(), count=st.integers(1, 4 * PAGE_TOKENS))
    @precondition(lambda self: any(row.computed < len(row.tokens) for row in self.model.rows))
    def compute(self, data: st.DataObject, count: int) -> None:
        pending = [row for row in self.model.rows if row.computed < len(row.tokens)]
        row = pick(data, pending)
        end = min(row.computed + count, len(row.tokens))
        if self.take(row, pages_for(end) - len(row.pages)):
            self.write(row, end)
            self.keep(row)

    @rule(data=st.data(), letter=st.sampled_from([1, 2]), count=st.integers(1, 20))
    @precondition(lambda self: bool(self.model.rows))
    def generate(self, data: st.DataObject, letter: int, count: int) -> None:
        row = pick(data, self.model.rows)
        row.tokens += [letter] * min(count, MOST_TOKENS - len(row.tokens))

    @rule(data=st.data())
    @precondition(lambda self: any(row.pages for row in self.model.rows))
    def stop(self, data: st.DataObject) -> None:
        self.give_back(pick(data, [row for row in self.model.rows if row.pages]))
        self.seen["stopped"] += 1

    @rule(data=st.data())
    @precondition(lambda self: any(not row.pages for row in self.model.rows))
    def go_on(self, data: st.DataObject) -> None:
        row = pick(data, [row for row in self.model.rows if not row.pages])
        self.model.rows.remove(row)
        self.begin(row)

    @rule(data=st.data())
    @precondition(lambda self: bool(self.model.rows))
    def end(self, data: st.DataObject) -> None:
        row = pick(data, self.model.rows)
        self.give_back(row)
        self.model.rows.remove(row)

    @invariant()
    def books_balance(self) -> None:
        self.seen["steps"] += 1
        self.table.check()
        self.cache.check()
        owners = self.model.owners
        assert [self.table.owners(page) for page in range(PAGES)] == [
            owners[page] for page in range(PAGES)
        ]
        assert list(self.cache.idle) == self.model.idle
        assert self.table.cached == len(self.model.idle)
        assert self.table.free == PAGES - len(owners)

    @invariant()
    def rows_hold_their_own_tokens(self) -> None:
        for row in self.model.rows:
            for i, page in enumerate(row.pages):
                digest, tokens = self.model.written[page]
                assert digest == row.digest
                computed = row.tokens[: min(row.computed, (i + 1) * PAGE_TOKENS)]
                assert list(tokens) == computed

    def begin(self, row: Row) -> None:
        expected = self.model.find(row)

        found = self.cache.match(row.chain, row.tokens).tolist()

        assert found == expected
        self.model.rows.append(row)
        row.pages, row.computed, row.offered = found, len(found) * PAGE_TOKENS, len(found)
        for i, page in enumerate(found):
            assert self.model.written[page] == row.prefix(i)
        self.seen["found"] += len(found)

    def take(self, row: Row, count: int) -> bool:
        free, idle = self.model.free, self.model.idle
        try:
            taken = self.table.take(count).tolist()
        except Overloaded:
            assert count > len(free) + len(idle)
            self.seen["refused"] += 1
            return False
        gone = self.model.evict(max(0, count - len(free)))
        assert len(set(taken)) == len(taken) == count
        assert gone <= set(taken) <= free | gone
        row.pages += taken
        self.seen["given up"] += len(gone)
        return True

    def write(self, row: Row, end: int) -> None:
        owners = self.model.owners
        for i in range(row.computed // PAGE_TOKENS, pages_for(end)):
            assert owners[row.pages[i]] == 1, "another row reads this page"
            assert row.pages[i] not in self.model.kept.values(), "a kept page is written again"
            tokens = row.tokens[: min(end, (i + 1) * PAGE_TOKENS)]
            self.model.written[row.pages[i]] = row.digest, tuple(tokens)
        row.computed = end

    def keep(self, row: Row) -> None:
        self.cache.keep(row.chain, row.tokens, row.array, row.computed)
        full = row.computed // PAGE_TOKENS
        for i in range(row.offered, full):
            page = self.model.kept.setdefault(row.prefix(i), row.pages[i])
            self.seen["kept by another"] += page != row.pages[i]
        row.offered = max(row.offered, full)

    def give_back(self, row: Row) -> None:
        self.table.give_back(row.array)
        self.model.release(row)


def test_any_order_of_events_is_as_the_model_says() -> None:
    seen: Counter[str] = Counter()

    class Watched(PrefixMachine):
        def __init__(self) -> None:
            super().__init__(seen)

    run_state_machine_as_test(
        Watched, settings=settings(max_examples=150, stateful_step_count=100, deadline=None)
    )

    assert seen["steps"] > 10_000
    rare = ("found", "kept by another", "given up", "refused", "stopped")
    assert all(seen[event] > 20 for event in rare), seen

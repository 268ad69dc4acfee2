"""The KV pages of rows: found behind a prefix that is kept, taken as a row grows, given back."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from loralane_server.kv.pages import PAGE_TOKENS, PageTable, pages_for
from loralane_server.kv.prefix_cache import PrefixCache
from loralane_server.rows import NO_PAGES, Row
from loralane_server.scheduling.preemption import Claim


class RowPages:
    """Owns the page table and the prefix cache. Touched only by the engine's thread."""

    def __init__(self, table: PageTable, *, prefix_cache: bool) -> None:
        self._table = table
        self._cache = PrefixCache(table, enabled=prefix_cache)

    @property
    def total(self) -> int:
        """All pages."""
        return self._table.total

    @property
    def free(self) -> int:
        """Pages that no row owns."""
        return self._table.free

    @property
    def cached(self) -> int:
        """Of these, the pages that are kept until they are wanted."""
        return self._table.cached

    def find(self, row: Row) -> bool:
        """Let a row that has not begun start behind the longest prefix that is kept.

        Returns whether that is a longer one than it had.
        """
        assert not row.begun
        assert not row.awaited
        had = row.computed
        self.release(row)
        row.pages = self._cache.match(row.chain, row.tokens)
        row.computed = len(row.pages) * PAGE_TOKENS
        return row.computed > had

    def cover(self, row: Row, count: int) -> None:
        """Give a row what pages it lacks for its next `count` tokens: these must be free."""
        missing = pages_for(row.computed + count) - len(row.pages)
        if missing > 0:
            row.pages = np.concatenate([row.pages, self._table.take(missing)])
        if row.cached is None:
            row.cached = row.computed
        row.begun = True

    def keep(self, row: Row) -> None:
        """Keep the pages that a row has filled, with tokens that are known, for whoever has them.

        They may still be filled by a step under way: whoever finds them reads them in a later one.
        """
        computed = min(row.computed, len(row.tokens))
        self._cache.keep(row.chain, row.tokens, row.pages, computed)

    def release(self, row: Row) -> None:
        """Take a row's pages: it ends, or begins anew."""
        self._table.give_back(row.pages)
        row.pages = NO_PAGES
        row.computed = 0
        row.begun = False

    def check(self, rows: Iterable[Row]) -> None:
        """Assert that every page belongs to the rows that list it, which have the same prefix."""
        self._table.check()
        self._cache.check()
        owners: Counter[int] = Counter()
        prefixes: dict[int, tuple[str, int, list[int]]] = {}
        for row in rows:
            pages = row.pages.tolist()
            assert len(set(pages)) == len(pages)
            assert row.computed <= len(pages) * PAGE_TOKENS
            owners.update(pages)
            for i, page in enumerate(pages):
                prefix = (row.admission.digest, i, row.tokens[: (i + 1) * PAGE_TOKENS])
                assert prefixes.setdefault(page, prefix) == prefix
        assert all(self._table.owners(page) == count for page, count in owners.items())
        assert len(owners) + self.free == self.total


def claim_of(row: Row) -> Claim:
    """Return what a row asks of the next step."""
    admission, tokens, pages = row.admission, row.length, len(row.pages)
    # The last token that it generates is never computed.
    longest = len(admission.prompt) + admission.max_tokens - 1
    return Claim(
        pending=tokens - row.computed,
        covered=pages * PAGE_TOKENS - row.computed,
        grows=pages_for(longest) > pages_for(tokens),
        begun=row.begun,
        runnable=row.runnable,
        owns=pages > 0,
        computed=row.computed,
    )


def lacking(row: Row) -> int:
    """Return how many pages a row still has to take for the tokens that it has."""
    return max(0, pages_for(row.length) - len(row.pages))

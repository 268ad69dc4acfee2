"""The prefix cache: KV pages whose tokens have been computed before are not computed again.

Only full pages are kept, each under a key that chains all that its keys and values depend on:

    key of page i = blake2b(key of page i - 1, its PAGE_TOKENS token ids)

rooted at the adapter's digest ("" = base). So two adapters never share a page, nor an adapter and
the base. Nothing ever becomes stale: an adapter whose files are replaced has another digest, and
what was kept for the old one is never found again and leaves as the least recently used. Keys are
256 bits of a cryptographic hash: nobody can make two prompts that share one.

Of a page that nobody owns, the idle ones, the least recently used is given up first, and the end of
a prefix before its beginning: a page is found only by way of those before it. A row may own a page
without owning those before it (it computed the same tokens as another row, whose pages were kept).
If one of these is given up meanwhile, the row's later pages cannot be found until some row computes
the missing one again; left idle, they leave in their turn like all others.
"""

from array import array
from collections import OrderedDict
from collections.abc import KeysView, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from loralane_server.device.seam import Int32
from loralane_server.kv.pages import PAGE_TOKENS, PageTable


class Link(NamedTuple):
    """What a page is kept under: its own key, and that of the page before it."""

    parent: bytes
    key: bytes


class Chain:
    """The keys of one row's pages, each hashed once, and how many of its pages were dealt with.

    Belongs to one row for all its life, preemptions included: the row's tokens may only grow.
    """

    __slots__ = ("_keys", "kept")

    def __init__(self, digest: str) -> None:
        #: The root's, then those of the pages.
        self._keys = [_hash(digest.encode(), b"root")]
        #: Pages from the start that the cache keeps, or need not keep as it has others like them.
        self.kept = 0

    def link(self, page: int, tokens: Sequence[int]) -> Link:
        """Return the link of the row's page with that index, which `tokens` must fill."""
        while len(self._keys) < page + 2:
            start = (len(self._keys) - 1) * PAGE_TOKENS
            ids = array("i", tokens[start : start + PAGE_TOKENS])
            assert len(ids) == PAGE_TOKENS
            self._keys.append(_hash(self._keys[-1] + ids.tobytes(), b"page"))
        return Link(self._keys[page], self._keys[page + 1])


class PrefixCache:
    """Owns what is known of the contents of pages. Engine's thread only.

    Every operation costs O(1) per page that it names. With `enabled` off, nothing is kept and so
    nothing found.
    """

    def __init__(self, table: PageTable, *, enabled: bool = True) -> None:
        self._table = table
        self._enabled = enabled
        #: Tokens of prefixes that were looked for, so far: of all rows at every start.
        self.asked = 0
        #: How many of these were found.
        self.matched = 0
        self._pages: dict[bytes, int] = {}
        #: The same the other way round.
        self._links: dict[int, Link] = {}
        #: The pages that nobody owns; the next to leave first, every page before its parent.
        self._idle: OrderedDict[int, None] = OrderedDict()
        table.kept_by(self)

    @property
    def idle(self) -> KeysView[int]:
        """The pages that are kept and nobody owns, the next to leave first."""
        return self._idle.keys()

    def match(self, chain: Chain, tokens: Sequence[int]) -> Int32:
        """Return the pages of the longest kept prefix of `tokens`, which the caller now owns.

        Called when a row starts, and when it starts again after it gave all its pages back. The
        last token is never part of what is found: computing it is what gives the next one.
        """
        found: list[int] = []
        for i in range((len(tokens) - 1) // PAGE_TOKENS if self._enabled else 0):
            page = self._pages.get(chain.link(i, tokens).key)
            if page is None:
                break
            found.append(page)
        chain.kept = len(found)
        self.asked += len(tokens)
        self.matched += len(found) * PAGE_TOKENS
        pages = np.array(found, dtype=np.int32)
        self._table.share(pages)
        return pages

    def keep(self, chain: Chain, tokens: Sequence[int], pages: Int32, computed: int) -> None:
        """Keep a row's pages that are full now. Cheap if none is, so call it after every step.

        pages: the row's, which it must own.
        computed: how many of `tokens` have their keys and values in `pages`.

        Where a page with the same prefix is kept already, that one stays and the row's is left
        alone.
        """
        full = computed // PAGE_TOKENS if self._enabled else 0
        for i in range(chain.kept, full):
            link = chain.link(i, tokens)
            if link.key not in self._pages:
                page = int(pages[i])
                self._pages[link.key] = page
                self._links[page] = link
        chain.kept = max(chain.kept, full)

    def let_go(self, page: int) -> bool:
        """See `Keeper`: the last owner left a page, which is now idle if it is kept."""
        link = self._links.get(page)
        if link is None:
            return False
        self._idle[page] = None
        parent = self._pages.get(link.parent)
        while parent is not None and parent in self._idle:
            self._idle.move_to_end(parent)
            parent = self._pages.get(self._links[parent].parent)
        return True

    def claim(self, page: int) -> None:
        """See `Keeper`: an idle page has an owner again."""
        del self._idle[page]

    def evict(self) -> int:
        """See `Keeper`: forget the idle page that is the next to leave."""
        page, _ = self._idle.popitem(last=False)
        del self._pages[self._links.pop(page).key]
        return page

    def check(self) -> None:
        """Assert that keys and pages agree, and that pages leave before their parents."""
        assert self._pages == {link.key: page for page, link in self._links.items()}
        assert len(self._pages) == len(self._links)
        assert self._idle.keys() == {p for p in self._links if not self._table.owners(p)}
        order = {page: i for i, page in enumerate(self._idle)}
        for page, i in order.items():
            parent = self._pages.get(self._links[page].parent)
            assert parent is None or order.get(parent, len(order)) > i


def _hash(data: bytes, person: bytes) -> bytes:
    return blake2b(data, digest_size=32, person=person).digest()

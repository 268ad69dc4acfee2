"""What the shard holds for this router, counted by the router itself.

An admission counts from the moment it is sent, so nothing is admitted twice into the same room,
however late the shard's messages are. What the shard reports beyond that count belongs to somebody
else (another router, rows that are being cleared) and is left alone while it lasts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.admission import Ask, Holder, Room
from loralane_router.errors import RequestError
from loralane_router.facts import AdapterFacts

#: Seconds after which a request that pinned adapters keep out may come back.
_PINNED_RETRY_S: Final = 1.0


@dataclass(slots=True)
class _Use:
    lanes: int
    rows: int
    since: float


@dataclass(frozen=True, slots=True)
class _Others:
    rows: int = 0
    pages: int = 0
    lanes: int = 0


class Ledger:
    """Rows, pages and lanes of one connection to one shard. Owned by the dispatcher."""

    def __init__(self, capacity: pb.Capacity) -> None:
        self._capacity = capacity
        self._rows = 0
        self._pages = 0
        self._in_use: dict[str, _Use] = {}
        self._pinned: dict[str, int] = {}
        self._others = _Others()

    @property
    def capacity(self) -> pb.Capacity:
        """What the shard reported last."""
        return self._capacity

    def pages(self, tokens: int) -> int:
        """Return how many pages so many tokens take."""
        return -(-tokens // max(1, self._capacity.page_tokens))

    def needed_pages(self, tokens: int, adapter: AdapterFacts) -> int:
        """Return how many pages so many tokens take.

        Raises RequestError if the shard could not hold them, or the adapter's lanes, even if it
        were empty.
        """
        pages, capacity = self.pages(tokens), self._capacity
        if pages > capacity.pages_total:
            raise RequestError(
                pb.ERROR_KIND_INVALID_REQUEST,
                f"prompt and max_tokens take {pages} pages of {capacity.page_tokens} tokens and "
                f"the shard has {capacity.pages_total}; lower max_tokens or shorten the prompt",
                param="max_tokens",
            )
        lanes = adapter.lanes
        if lanes > capacity.lanes_total:
            raise RequestError(
                pb.ERROR_KIND_TOO_LARGE,
                f"the adapter takes {lanes} lanes and the shard has {capacity.lanes_total}",
            )
        self.check_pins(adapter.digest, lanes)
        return pages

    def check_pins(self, digest: str, lanes: int) -> None:
        """Raise RequestError if an adapter can have no lanes before another is unpinned."""
        pinned, total = self.pinned_lanes(without=digest), self._capacity.lanes_total
        if lanes > total - pinned:
            raise RequestError(
                pb.ERROR_KIND_OVERLOADED,
                f"the adapter takes {lanes} lanes, but pinned adapters hold {pinned} of "
                f"{total}; unpin one",
                retry_after_s=_PINNED_RETRY_S,
            )

    def uses(self, digest: str) -> bool:
        """Whether an admitted request refers to this adapter."""
        return digest in self._in_use

    def pin(self, adapter: AdapterFacts) -> None:
        """Note whether an adapter keeps its lanes when no row uses it."""
        if adapter.pinned and adapter.tier == "device":
            self._pinned[adapter.digest] = adapter.lanes
        else:
            self._pinned.pop(adapter.digest, None)

    def unpin(self, digest: str) -> None:
        """Note that the shard has forgotten an adapter, pin and all."""
        self._pinned.pop(digest, None)

    def take(self, ask: Ask, now: float) -> None:
        """Count a request as admitted."""
        self._rows += 1
        self._pages += ask.pages
        if ask.lanes:
            use = self._in_use.setdefault(ask.digest, _Use(ask.lanes, 0, now))
            use.rows += 1

    def release(self, ask: Ask) -> None:
        """Count a request as ended, as the shard said."""
        self._rows -= 1
        self._pages -= ask.pages
        if ask.lanes:
            use = self._in_use[ask.digest]
            use.rows -= 1
            if not use.rows:
                del self._in_use[ask.digest]

    def observe(self, capacity: pb.Capacity) -> None:
        """Compare with what the shard reports after a step."""
        self._capacity = capacity
        self._others = _Others(
            rows=max(0, capacity.rows_total - capacity.rows_free - self._rows),
            pages=max(0, capacity.pages_total - capacity.pages_free - self._pages),
            lanes=max(0, capacity.lanes_in_use - self._held_lanes()),
        )

    def room(self) -> Room:
        """Return what may still be admitted.

        With nothing of our own on the shard no step comes, so a report that says "full" would
        never be corrected: then only totals count, and the shard may refuse.
        """
        others = self._others if self._rows else _Others()
        return Room(
            rows=self._capacity.rows_total - self._rows - others.rows,
            pages=self._capacity.pages_total - self._pages - others.pages,
            lanes=self._capacity.lanes_total - self._held_lanes() - others.lanes,
            holders=self._holders(),
        )

    def pinned_lanes(self, without: str) -> int:
        """Return how many lanes are pinned by other adapters than this one."""
        return sum(lanes for digest, lanes in self._pinned.items() if digest != without)

    def check(self) -> None:
        """Assert that the counts add up."""
        assert self._rows >= 0
        assert self._pages >= 0
        assert all(use.rows > 0 for use in self._in_use.values())
        assert self._rows or (not self._pages and not self._in_use)

    def _holders(self) -> Mapping[str, Holder]:
        pinned = {d: Holder(lanes, 0.0, True) for d, lanes in self._pinned.items()}
        used = {
            d: Holder(use.lanes, use.since, d in self._pinned) for d, use in self._in_use.items()
        }
        return pinned | used

    def _held_lanes(self) -> int:
        return sum(holder.lanes for holder in self._holders().values())

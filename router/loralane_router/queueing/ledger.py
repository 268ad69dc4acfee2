"""The room that is left on a shard: what it last reported, less what it cannot have counted yet.

A report says how many admissions of this stream it counts (`StepReply.admitted`). Those sent since
are taken off here, so nothing is admitted twice into the same room, however late reports are.
Whatever else a report shows (another router's rows, rows that are being cleared) is simply so.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import AdapterFacts
from loralane_router.errors import RequestError
from loralane_router.queueing.admission import Ask, Holder, Room
from loralane_router.queueing.kept_rows import Taken

#: Seconds after which a request that pinned adapters keep out may come back.
_PINNED_RETRY_S: Final = 1.0
#: Pages that a row is admitted with beyond its prompt's. With fewer it would soon stop another row,
#: or be stopped, for its answer's first tokens; many would keep rows out for tokens never made.
HEADROOM_PAGES: Final = 2


@dataclass(slots=True)
class _Use:
    lanes: int
    rows: int
    since: float


class Ledger:
    """Rows, pages and lanes of one connection to one shard. Owned by the dispatcher."""

    def __init__(self, capacity: pb.Capacity) -> None:
        self._capacity = capacity
        #: Adapters of rows that were admitted and have not ended.
        self._in_use: dict[str, _Use] = {}
        self._pinned: dict[str, int] = {}
        #: Admissions that the last report does not count, as they were sent.
        self._uncounted: deque[Ask] = deque()
        self._sent = 0
        #: Rows that were given away and have not ended, by flow.
        self._rows: Counter[str] = Counter()
        #: The flows of the last admissions, as many as the shard has rows.
        self._lately: deque[str] = deque(maxlen=max(1, capacity.rows_total))

    @property
    def capacity(self) -> pb.Capacity:
        """What the shard reported last."""
        return self._capacity

    @property
    def uncounted_tokens(self) -> int:
        """Of prompts that were admitted and that the last report does not count."""
        return sum(ask.tokens for ask in self._uncounted)

    def pages(self, tokens: int) -> int:
        """Return how many pages so many tokens take."""
        return -(-tokens // max(1, self._capacity.page_tokens))

    def needed_pages(self, prompt: int, max_tokens: int, adapter: AdapterFacts) -> int:
        """Return how many pages must be free when a row with such a prompt is admitted.

        Raises RequestError if the shard could not hold it to its end, or the adapter's lanes, even
        if it were empty.
        """
        pages, capacity = self.pages(prompt + max_tokens), self._capacity
        if pages > capacity.pages_total:
            raise RequestError(
                pb.ERROR_KIND_INVALID_REQUEST,
                f"prompt and max_tokens take {pages} pages of {capacity.page_tokens} tokens and "
                f"the shard has {capacity.pages_total}; lower max_tokens or shorten the prompt",
                param="max_tokens",
            )
        self.check_lanes(adapter)
        return min(pages, self.pages(prompt) + HEADROOM_PAGES)

    def check_lanes(self, adapter: AdapterFacts) -> None:
        """Raise RequestError if the shard could not hold an adapter's lanes even if no row ran."""
        lanes, total = adapter.lanes, self._capacity.lanes_total
        if lanes > total:
            raise RequestError(
                pb.ERROR_KIND_TOO_LARGE,
                f"the adapter takes {lanes} lanes and the shard has {total}",
            )
        self.check_pins(adapter.digest, lanes)

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

    def pin(self, adapter: AdapterFacts) -> bool:
        """Note whether an adapter keeps its lanes when no row uses it. Return if that is new."""
        if not adapter.pinned or adapter.tier != "device":
            return self.unpin(adapter.digest)
        is_new = self._pinned.get(adapter.digest) != adapter.lanes
        self._pinned[adapter.digest] = adapter.lanes
        return is_new

    def unpin(self, digest: str) -> bool:
        """Note that an adapter is not pinned, or forgotten. Return whether it was."""
        return self._pinned.pop(digest, None) is not None

    def take(self, ask: Ask, now: float) -> None:
        """Count a request as admitted."""
        self._sent += 1
        self._rows[ask.flow] += 1
        self._lately.append(ask.flow)
        self._uncounted.append(ask)
        if ask.lanes:
            use = self._in_use.setdefault(ask.digest, _Use(ask.lanes, 0, now))
            use.rows += 1

    def release(self, ask: Ask) -> None:
        """Count a request as ended, as the shard said; so it had counted it."""
        if ask in self._uncounted:
            self._uncounted.remove(ask)
        self._rows[ask.flow] -= 1
        if not self._rows[ask.flow]:
            del self._rows[ask.flow]
        if ask.lanes:
            use = self._in_use[ask.digest]
            use.rows -= 1
            if not use.rows:
                del self._in_use[ask.digest]

    def observe(self, capacity: pb.Capacity, admitted: int) -> None:
        """Take over a report that counts so many admissions of this stream."""
        self._capacity = capacity
        while self._uncounted and self._sent - len(self._uncounted) < admitted:
            self._uncounted.popleft()

    @property
    def free_rows(self) -> int:
        """How many rows may still be admitted; cheaper than all of `room`."""
        return self._capacity.rows_free - len(self._uncounted)

    def room(self) -> Room:
        """Return what may still be admitted."""
        capacity, pinned = self._capacity, self._pinned
        # Pages that rows the report counts have still to take for their prompts are not free.
        pending = capacity.pending_tokens // max(1, capacity.page_tokens)
        pages = pending + sum(ask.pages for ask in self._uncounted)
        lanes = sum(self._in_use[digest].lanes for digest in self._uncounted_adapters())
        return Room(
            rows=self.free_rows,
            pages=capacity.pages_free - pages,
            lanes=capacity.lanes_total - capacity.lanes_in_use - lanes,
            holders={d: Holder(lanes, 0.0, True) for d, lanes in pinned.items()}
            | {d: Holder(u.lanes, u.since, d in pinned) for d, u in self._in_use.items()},
            taken=Taken(capacity.rows_total, self._rows, Counter(self._lately)),
        )

    def pinned_lanes(self, without: str) -> int:
        """Return how many lanes are pinned by other adapters than this one."""
        return sum(lanes for digest, lanes in self._pinned.items() if digest != without)

    def check(self) -> None:
        """Assert that the counts add up."""
        assert all(rows > 0 for rows in self._rows.values())
        rows = self._rows.total()
        assert all(use.rows > 0 for use in self._in_use.values())
        assert sum(use.rows for use in self._in_use.values()) <= rows
        assert len(self._uncounted) <= min(rows, self._sent)

    def _uncounted_adapters(self) -> set[str]:
        """Return the adapters in use of which the last report counts no row, and no pin."""
        new = Counter(ask.digest for ask in self._uncounted if ask.lanes)
        in_use, pinned = self._in_use, self._pinned
        return {d for d, rows in new.items() if in_use[d].rows == rows and d not in pinned}

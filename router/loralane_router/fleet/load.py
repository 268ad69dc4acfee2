"""How busy one shard is with what this router gave it: a pure view of its queues and ledger."""

from dataclasses import dataclass

from loralane_router.fleet.routing import ShardView
from loralane_router.queueing.ledger import Ledger
from loralane_router.queueing.queues import Queues


@dataclass(frozen=True, slots=True)
class Load:
    """What a shard has to do at one moment."""

    #: As far as it does not depend on the adapter that somebody asks for.
    view: ShardView
    #: Adapters that waiting and running requests refer to.
    wanted: frozenset[str]


def load_of(queues: Queues, ledger: Ledger) -> Load:
    """Return the load of a shard whose capacity is known."""
    capacity, room, wanted = ledger.capacity, ledger.room(), queues.wanted_lanes()
    held = capacity.lanes_total - room.lanes
    more = sum(lanes for digest, lanes in wanted.items() if digest not in room.holders)
    view = ShardView(
        rows_total=capacity.rows_total,
        rows_free=max(0, room.rows),
        waiting=len(queues),
        decoding=capacity.rows_total - capacity.rows_free,
        pending_tokens=capacity.pending_tokens + ledger.uncounted_tokens,
        queued_tokens=queues.tokens,
        step_ms=capacity.step_ms,
        token_ms=capacity.token_ms,
        lanes_total=capacity.lanes_total,
        lanes_in_use=held + more,
    )
    return Load(view, frozenset(wanted) | frozenset(room.holders))

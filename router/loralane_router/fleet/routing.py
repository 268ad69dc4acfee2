"""Which shard a request goes to: the one with the least expected time to its first token.

One score in seconds, so that load and residency are weighed against each other by what they cost:

    prompts ahead of it, and its own     tokens still to be computed there, in steps beside decoding
  + a free row                           rows end at a steady rate; it waits for its turn
  + its adapter                          by the tier where it is on that shard, behind other loads
  + lanes                                until enough adapters are idle, if all lanes are in use
  + scarcity                             of rows and, for an adapter that is not there, of lanes

The last is what the choice costs those who come later: the fewer are idle, the likelier somebody
will wait for what this request occupies. Without it cold adapters pile up where prompts are short,
and nearly all who are late are late for want of lanes or rows on one shard while others have many.

No adapter has a home. A shard that holds it wins while it is free soon enough, else another one
loads it too: so hot adapters spread, and cold ones stay where they are. The constants were chosen
with the simulator (`python -m bench.sim`); half or twice as much of any changes little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: What a shard is believed to take before it has said: milliseconds of a step of decoding rows,
#: and of each token of a prompt. An 8B model on one chip is about there.
DEFAULT_STEP_MS: Final = 15.0
DEFAULT_TOKEN_MS: Final = 0.1
#: Tokens of prompts that a step computes at most (a shard's default): each so many cost a step.
STEP_TOKENS: Final = 512
#: Steps that a row lasts on average: about what chat answers have in tokens.
ROW_STEPS: Final = 200
#: Rows that end for each adapter that becomes idle: most end beside others of the same adapter.
ROWS_FOR_AN_IDLE_ADAPTER: Final = 3
#: What a row, or an adapter's lanes, cost others when all are in use, in lifetimes of a row; less
#: with the square of the share of lanes in use, and with the fourth power of that of rows.
SCARCITY: Final = 0.3
#: Seconds before an adapter is ready and, of them, for each of its bytes, by tier: a copy to the
#: device (2 GB/s), a read from disk (1 GB/s), a download. Of a download (0.25 s, 200 MB/s) half is
#: counted: prompts ahead are computed meanwhile. One that is being loaded is about halfway. Better
#: on the low side: in the simulator an estimate a quarter as large carries no less, one four times
#: as large does. So nothing is learned from loads: how wrong a constant is matters too little.
LOAD_S: Final = {
    "loading": (0.06, 1.25e-9),
    "host": (0.005, 0.5e-9),
    "disk": (0.05, 1e-9),
    "remote": (0.125, 2.5e-9),
}
#: What an adapter is taken for whose size is not known: rank 16 of an 8B model, about.
TYPICAL_BYTES: Final = 50_000_000
#: Seconds for each load that is under way before it.
AHEAD_S: Final = 0.03


@dataclass(frozen=True, slots=True)
class ShardView:
    """What a router knows of one shard, and of one adapter there, when it chooses."""

    rows_total: int
    #: Rows that a request could have at once; admissions that the shard has not seen yet are off.
    rows_free: int
    #: Requests that the router gave to this shard and that are not admitted yet.
    waiting: int = 0
    #: Rows that have their first token.
    decoding: int = 0
    #: Tokens of prompts of admitted rows that are still to be computed.
    pending_tokens: int = 0
    #: Tokens of the prompts of those that wait.
    queued_tokens: int = 0
    #: As the shard reports them (`Capacity`); 0 = not yet known.
    step_ms: float = 0.0
    token_ms: float = 0.0
    lanes_total: int = 0
    #: Of adapters that a row uses or that are pinned, and of those that waiting requests want.
    lanes_in_use: int = 0
    #: Adapters that are read or written there now, or that waiting requests have asked for.
    loads: int = 0
    #: Where the wanted adapter is on this shard: "device", "loading" (one of `loads`), "host",
    #: "disk" or "remote" (also: nothing is known). "device" for the base.
    tier: str = "remote"


@dataclass(frozen=True, slots=True)
class Need:
    """What the request to place needs."""

    #: Of its prompt.
    tokens: int
    #: Of its adapter; 0 for base.
    lanes: int = 0
    #: Of its adapter's tensors; 0 = not known.
    bytes: int = 0
    #: "" = base.
    digest: str = ""


def choose(views: Sequence[ShardView], need: Need, turn: int = 0) -> int:
    """Return the index of the shard that has the least expected time to first token.

    Equals: the one with fewer requests, then by turns (`turn`: how many choices were made before).
    Raises ValueError if there is no shard.
    """
    if not views:
        raise ValueError("there is no shard to choose from")
    seconds = [expected_s(view, need) for view in views]
    least = min(seconds)
    if seconds.count(least) == 1:
        return seconds.index(least)
    equals = [i for i, expected in enumerate(seconds) if expected == least]
    fewest = min(_requests(views[i]) for i in equals)
    equals = [i for i in equals if _requests(views[i]) == fewest]
    return equals[turn % len(equals)]


def expected_s(view: ShardView, need: Need) -> float:
    """Return the seconds until this request would have its first token on this shard.

    What it would cost others there (scarcity) is added.
    """
    step_s = (view.step_ms or DEFAULT_STEP_MS) / 1e3
    token_s = (view.token_ms or DEFAULT_TOKEN_MS) / 1e3
    row_s = ROW_STEPS * step_s
    ahead = view.pending_tokens + view.queued_tokens + need.tokens
    seconds = step_s + ahead * (token_s + step_s / STEP_TOKENS)
    idle = view.rows_free - view.waiting
    if idle > 0:
        seconds += SCARCITY * row_s * (1 - idle / view.rows_total) ** 4
    else:
        seconds += row_s * (SCARCITY + (1 - idle) / max(1, view.rows_total))
    if view.tier != "device" and need.lanes:
        seconds += _ready_s(view, need, row_s)
    return seconds


def _ready_s(view: ShardView, need: Need, row_s: float) -> float:
    """Return how long an adapter takes that is not on the device; row_s: how long a row lasts."""
    fixed_s, byte_s = LOAD_S[view.tier]
    seconds = fixed_s + byte_s * (need.bytes or TYPICAL_BYTES)
    in_use = view.lanes_in_use
    short = in_use - view.lanes_total
    if view.tier != "loading":
        seconds += view.loads * AHEAD_S
        seconds += SCARCITY * row_s * min(1.0, in_use / max(1, view.lanes_total)) ** 2
        short += need.lanes
    if short > 0:
        seconds += short * ROWS_FOR_AN_IDLE_ADAPTER * row_s / max(1, in_use)
    return seconds


def _requests(view: ShardView) -> int:
    return view.rows_total - view.rows_free + view.waiting

"""Whether one more request may wait, and when one that may not should come back: pure.

A queue is bounded by requests and by the tokens of their prompts. Prompts, and not max_tokens: a
prompt is known exactly, is what the router keeps in memory for a waiting request, and must be
computed before its first token; max_tokens is a wish that most answers stay far below (a chat that
leaves it out would count a whole context). So the rate is one of prompt tokens too: those that
leave the queue in a second. Whatever the answers' lengths are, that is how fast the queue moves.

A full queue refuses. The one that crosses the bound is taken, so that a long prompt is not refused
where short ones are not.

But who fills the queue must not shut others out of it. So its places belong to the flows that want
them (`fairness`), in equal shares by weight, and more than a share is lent only while there is
plenty: beyond its share a flow has at most half as many places as are left (`may_join`). Who is
alone has them all; who is not is refused at the door before the last places are gone, which are
there for whoever has less.

A full queue still takes a request that is within its flow's share, and the newest of the flow that
has most beyond its own is refused in its place: it has waited least. Two flows cannot push each
other out in turn, since who takes a place is within its share with it, and only who is beyond its
own yields one. That happens when others come to a queue that one had for itself.

Who yields is refused late, after it has waited, which is what the rule at the door saves: for the
same reason a flow yields only if it has more than chance gives it. Simulated at ten times what can
be done, eight equal flows in 16 places: 0.01 % of the refusals are late, 2.4 % without the rule at
the door; at 1.2 times it is 0.2 %, and 20 % without (0.6 % with 8 places). Where one of them sends
ten times its share, the others get 99 % of what they ask for with 16 places and 95 % with 8 (59 %
where a full queue refuses every request alike).

A request is refused when its body has been decoded and its prompt tokenized, though that costs more
than to refuse it at sight: clients come back after a 429, and must not do so for what can never be
served. Nothing is asked of a shard for an adapter that was found before: a busy one answers late.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.errors import RequestError

#: What `Retry-After` may say, seconds. More would be a guess; a client should not be lost for it.
_SOONEST_S, _LATEST_S = 1.0, 60.0
#: Seconds over which the rate is averaged: a few answers' time.
_MEMORY_S: Final = 30.0
#: Standard deviations of a number of arrivals that chance makes of a share. Where that is more than
#: the share itself, twice the share is a flood.
_CHANCE: Final = 2.0
#: Two requests of one flow are chance, whatever its share is.
_FEW: Final = 2
#: Of the places that are left, how many a flow may have beyond its share.
_LENT: Final = 0.5


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits for rows."""

    #: Less those that could start at once; negative while rows are free.
    requests: int
    #: Of the prompts that wait.
    tokens: int
    #: Prompt tokens that leave the queue in a second, as far as known; 0 = not known.
    tokens_per_s: float

    @property
    def retry_after_s(self) -> float:
        """Seconds until what waits now has left the queue; between 1 and 60."""
        if not self.tokens_per_s:
            return _SOONEST_S
        return min(max(self.tokens / self.tokens_per_s, _SOONEST_S), _LATEST_S)


def overloaded(backlog: Backlog, reason: str) -> RequestError:
    """Return the refusal of a request that could be served later (429)."""
    return RequestError(
        pb.ERROR_KIND_OVERLOADED,
        f"{reason}; try again later",
        retry_after_s=backlog.retry_after_s,
    )


def refusal(backlog: Backlog, max_requests: int, max_tokens: int | None) -> RequestError | None:
    """Return why the next request may not wait (429), None if it may.

    `max_tokens` None = no bound. What can start at once is never refused.
    """
    if backlog.requests >= max_requests:
        waiting = f"{backlog.requests} requests"
    elif max_tokens is not None and backlog.tokens >= max_tokens and backlog.requests >= 0:
        waiting = f"requests of {backlog.tokens} prompt tokens"
    else:
        return None
    return overloaded(backlog, f"{waiting} are waiting already")


def places_left(
    backlog: Backlog, everybody: int, max_requests: int, max_tokens: int | None
) -> float:
    """Return how many more requests a queue takes that `refusal` does not refuse.

    Where tokens are bounded, that is how many of the length of those `everybody` who are there.
    """
    by_requests = max_requests - backlog.requests
    if max_tokens is None or backlog.requests < 0 or not backlog.tokens:
        return by_requests
    return min(by_requests, (max_tokens / backlog.tokens - 1) * everybody)


@dataclass(frozen=True, slots=True)
class Standing:
    """One flow in a queue."""

    #: That wait or are being opened.
    requests: int
    weight: float


def is_owed(flow: Standing, everybody: int, weight: float) -> bool:
    """Whether one more request of a flow is within its share of a full queue.

    everybody, weight: requests in the queue, and what all flows weigh, this one included. A share
    is one request at least: among many flows, or with a small weight, it would be less for ever.
    """
    return flow.requests + 1 <= max(1.0, everybody * flow.weight / weight)


def may_join(flow: Standing, everybody: int, weight: float, places: float) -> bool:
    """Whether one more request of a flow may join a queue that has so many places left.

    everybody, weight: as for `is_owed`. Within its share it may; beyond it while there is plenty.
    """
    share = max(1.0, (everybody + 1) * flow.weight / weight)
    return flow.requests + 1 <= share + _LENT * places


def most_beyond(
    flows: Mapping[str, Standing], everybody: int, weight: float
) -> tuple[str, int] | None:
    """Return the flow that has most beyond its share, and how many may yield; None if none may.

    It keeps its share, rounded down, and one request at least. everybody, weight: as for `is_owed`.
    """
    spare = {
        name: _spare(flow.requests, everybody * flow.weight / weight)
        for name, flow in flows.items()
    }
    most = max(spare, key=spare.__getitem__, default=None)
    return (most, spare[most]) if most is not None and spare[most] > 0 else None


def _spare(requests: int, share: float) -> int:
    """Return how many requests may yield of a flow with such a share."""
    beyond = requests - share
    if requests <= _FEW or beyond < min(share, _CHANCE * math.sqrt(share)):
        return 0
    return min(math.ceil(beyond), requests - 1)


class DrainRate:
    """How many prompt tokens leave a queue in a second while somebody waits in it.

    Time in which nobody waits says nothing about how fast the queue moves, nor does what starts
    at once. The past fades: what was `_MEMORY_S` ago counts about a third.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        #: When it was last looked at, if somebody was left waiting then.
        self._since: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 until it is known."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def note(self, now: float, left: int, *, waiting: bool) -> None:
        """Take over that prompts of so many tokens leave the queue, and whether others still wait.

        Call it at every chance to leave, whether or not somebody did.
        """
        if self._since is not None:
            passed = now - self._since
            kept = math.exp(-passed / _MEMORY_S)
            self._tokens = self._tokens * kept + left
            self._seconds = self._seconds * kept + passed
        self._since = now if waiting else None

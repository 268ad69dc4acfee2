"""Who comes in: the bound on what waits at all shards of a router, and who yields when it is full.

What is decided is in `overload`; here is what it is decided from, and what follows from it. Whoever
is told "later" comes back, so nobody is told so whose request could never be served: it is refused
when its parameters and its prompt have been looked at, and its adapter has been found some time.
"""

from types import TracebackType
from typing import Final, Self

from loralane_router.adapters.facts import AdapterFacts
from loralane_router.config import RouterConfig
from loralane_router.errors import RequestError
from loralane_router.fleet.fleet import Fleet
from loralane_router.queueing.overload import Backlog, overloaded, places_left, refusal
from loralane_router.requests import TextRequest

#: The flow of requests for adapters that were never resolved. No digest and no key's flow is this.
_NOT_SEEN_YET: Final = "not seen yet"


class Coming:
    """One request that is being opened: it counts as that within its `with` block."""

    def __init__(self, door: "Door", flow: str) -> None:
        self._door = door
        #: As far as it is known.
        self.flow = flow
        #: Of its prompt, once that is known.
        self.tokens = 0
        #: Whether others must yield before it may wait.
        self.needs_place = False

    def __enter__(self) -> Self:
        self._door.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._door.end(self)


class Door:
    """Owned by the router, on its event loop."""

    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self._fleet = fleet
        self._max_requests = config.max_queue
        self._max_tokens = config.max_queue_tokens
        #: Of the prompts of requests that are being opened, as far as they are known.
        self._tokens = 0

    def coming(self, request: TextRequest) -> Coming:
        """Return a request that is about to be opened.

        Raises RequestError (429) where its adapter was never seen and many such are being opened.
        """
        coming = Coming(self, self._flow_so_far(request))
        if coming.flow == _NOT_SEEN_YET:
            self._may_come(coming.flow)
        return coming

    def begin(self, coming: Coming) -> None:
        """Count a request as being opened; it says so itself."""
        self._fleet.crowd.expect(coming.flow)

    def end(self, coming: Coming) -> None:
        """Count it no longer."""
        self._tokens -= coming.tokens
        self._fleet.crowd.expect_no_more(coming.flow)

    def note_prompt(self, coming: Coming, tokens: int) -> None:
        """Count the tokens of its prompt; raises RequestError (429) if it may not come."""
        coming.needs_place = self._may_come(coming.flow, counted=1)
        coming.tokens = tokens
        self._tokens += tokens

    def make_place(self, coming: Coming, flow: str) -> None:
        """Refuse others in the place of a request that waits next and counts no more as coming.

        `flow`: as it is known now. Raises RequestError (429) if nobody has to yield to it.
        """
        backlog = self._backlog()
        if not coming.needs_place or (error := self._refusal(backlog)) is None:
            return
        yielding = self._fleet.crowd.yielding(flow, self._excess(backlog))
        if not yielding:
            raise error
        for waiting in yielding:
            waiting.refuse(waiting.ask.request_id, error)

    def _may_come(self, flow: str, *, counted: int = 0) -> bool:
        """Return whether others must yield to a request of this flow; 429 if it may not come.

        `counted`: how many of those that count are that request. All is asked here that is asked
        again when it has its shard: until then it waits for that shard's answer, and would be
        refused late.
        """
        backlog, crowd = self._backlog(counted), self._fleet.crowd
        if backlog.requests < 0:
            return False  # it can start at once, whoever else has rows
        if (error := self._refusal(backlog)) is None:
            places = places_left(
                backlog, crowd.size - counted, self._max_requests, self._max_tokens
            )
            if not crowd.may_join(flow, places, counted=counted):
                raise overloaded(backlog, "too many requests of this adapter or key are waiting")
            return False
        if flow == _NOT_SEEN_YET:
            # Nobody has to yield to an adapter that may not exist, but its requests have a share.
            may_come = crowd.is_within(flow, counted=counted)
        else:
            may_come = bool(crowd.yielding(flow, self._excess(backlog), counted=counted))
        if not may_come:
            raise error
        return True

    def _refusal(self, backlog: Backlog) -> RequestError | None:
        return refusal(backlog, self._max_requests, self._max_tokens)

    def _excess(self, backlog: Backlog) -> int:
        """Return how many tokens must go before another prompt may wait."""
        return 0 if self._max_tokens is None else max(0, backlog.tokens + 1 - self._max_tokens)

    def _backlog(self, counted: int = 0) -> Backlog:
        fleet = self._fleet
        return Backlog(
            requests=fleet.crowd.coming - counted + fleet.waiting - fleet.free_rows,
            tokens=self._tokens + fleet.waiting_tokens,
            tokens_per_s=fleet.tokens_per_s,
        )

    def _flow_so_far(self, request: TextRequest) -> str:
        """Return the flow of a request by what its adapter last was.

        Adapters that nobody has asked for yet are one flow until they are resolved: a flood of
        invented names has one share of the queue. An alias is not invented: it is a flow by its
        name, so that after a start the operator's adapters are not refused for each other.
        """
        fleet, name = self._fleet, request.adapter
        facts = fleet.placing.last_seen(request.merge or name)
        if facts is not None:
            return fleet.shares.flow_of(request.key, called(request, facts), facts.digest)
        if request.merge is None and fleet.names.aliased(name) is not None:
            return fleet.shares.flow_of(request.key, name, name)
        return _NOT_SEEN_YET


def called(request: TextRequest, adapter: AdapterFacts) -> str:
    """Return what a request calls its adapter; "" = the base."""
    if request.merge is not None:
        return adapter.reference
    return request.adapter if adapter.digest else ""

"""One request from acceptance to its end, as the dispatchers carry it, from shard to shard."""

from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import BASE, AdapterFacts
from loralane_router.errors import RequestError
from loralane_router.fleet.shards import unavailable
from loralane_router.metrics.counters import Metrics
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.deadlines import AdapterWait
from loralane_router.requests import Merge
from loralane_router.text.generation import Generation

#: About a minute of refusals.
_MOST_REFUSALS: Final = 64
#: Shards that may be lost in a row while they run a request and before it gets on. One lost shard
#: says nothing about the request, two may be bad luck; three were the request's doing, and a fleet
#: must not be ended by it.
MOST_LOSSES: Final = 3
#: So many tokens from one shard are getting on: what ends a shard at some token does so again when
#: that token is computed again.
_PROGRESS_TOKENS: Final = 16


@dataclass(slots=True)
class Entry:
    """What is asked, what is sent for it, and who reads the answer."""

    ask: Ask
    admission: pb.Admission
    generation: Generation
    #: What was asked for and with which token: it is resolved on every shard that it comes to.
    asked: str | Merge = ""
    token: str | None = field(default=None, repr=False)
    #: Asks its shard once more what that means; None where that was done, and for the base.
    resolve_again: Callable[[], Awaitable[AdapterFacts]] | None = field(default=None, repr=False)
    #: How long it waits for its adapter; None = as long as it takes, and for the base.
    wait: AdapterWait | None = None
    #: Its row is given up, and when that has ended the base is asked.
    falls_back: bool = False
    #: Whether its flow was charged for the prompt, which happens once, on whatever shard.
    is_paid: bool = False
    refusals: int = 0
    #: What this shard made; the admission, which says how to go on elsewhere, lacks it.
    made: "array[int]" = field(default_factory=lambda: array("I"), repr=False)
    #: Shards lost in a row that ran it and did not get on.
    losses: int = 0
    #: When the last tokens came, or 0 before the first.
    last_tokens: float = 0.0

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of its prompt, and of its answer at most, as they are asked of the next shard."""
        return len(self.admission.prompt), self.admission.max_tokens

    def was_refused(self, row: pb.Row) -> bool:
        """Whether the shard had no room after all, and it is worth to ask again."""
        refused = self._failed_unheard(row, pb.ERROR_KIND_OVERLOADED)
        return refused and self.refusals < _MOST_REFUSALS

    def lost_its_adapter(self, row: pb.Row) -> bool:
        """Whether the adapter was unloaded after this request had found it, for the first time."""
        lost = self._failed_unheard(row, pb.ERROR_KIND_NOT_FOUND)
        return lost and self.resolve_again is not None

    def _failed_unheard(self, row: pb.Row, kind: "pb.ErrorKind.ValueType") -> bool:
        """Whether it failed with this before its first token here, and somebody still waits."""
        failed = row.finish_reason == pb.FINISH_REASON_ERROR and row.error.kind == kind
        return failed and not self.made and not self.generation.finished

    async def find_adapter_again(self) -> AdapterFacts:
        """Resolve the adapter a second time; there is no third. Raises RequestError."""
        resolve, self.resolve_again = self.resolve_again, None
        assert resolve is not None
        return await resolve()

    def readdress(self, facts: AdapterFacts, pages: int) -> None:
        """Ask for this adapter, as the shard that is asked next described it.

        Raises RequestError (503) if another adapter's tokens are out already.
        """
        if self.last_tokens and facts.digest != self.ask.digest:
            raise unavailable(
                "the shard that generated this went away, and the adapter is another one on the "
                "shard that would go on (its files differ); send the request again"
            )
        own_flow = self.ask.flow == self.ask.digest
        self.ask = replace(
            self.ask,
            digest=facts.digest,
            pages=pages,
            lanes=facts.lanes,
            is_cold=facts.is_cold,
            flow=facts.digest if own_flow else self.ask.flow,
            tokens=len(self.admission.prompt),
        )
        self.admission.digest = facts.digest
        self.generation.adapter_digest = facts.digest

    def fall_back(self) -> None:
        """Ask the base from now on, from the start of the prompt. Nothing was generated yet."""
        assert not self.last_tokens
        self.readdress(BASE, self.ask.pages)
        self.asked, self.token, self.resolve_again, self.wait = "", None, None, None
        self.falls_back = False
        self.generation.fall_back()

    def leave_shard(self, *, ran: bool) -> None:
        """Ask for what is missing, its shard being gone: the tokens that came are prompt now.

        Sampling is a function of seed and position, so what comes next is what that shard would
        have made. One token at least is missing: the message with a row's last token ends the row.
        Raises RequestError (500) if that is not so, or if too many shards were lost by it.
        """
        if self.falls_back:
            self.fall_back()
        if ran:
            self.losses = 0 if len(self.made) >= _PROGRESS_TOKENS else self.losses + 1
        if self.losses >= MOST_LOSSES:
            raise RequestError(
                pb.ERROR_KIND_INTERNAL,
                f"{self.losses} shards in a row went away while they ran this request; it is not "
                "given to another",
            )
        if len(self.made) >= self.admission.max_tokens:
            raise RequestError(pb.ERROR_KIND_INTERNAL, "the shard did not end a complete answer")
        self.admission.prompt.extend(self.made)
        self.admission.max_tokens -= len(self.made)
        self.made = array("I")
        self.refusals = 0

    def measure(self, row: pb.Row, metrics: Metrics, now: float) -> None:
        """Count what one step made for this request."""
        tokens, digest = len(row.tokens), self.ask.digest
        self.made.extend(token.id for token in row.tokens)
        if row.cold_ms and not self.last_tokens:
            metrics.adapter_cold.observe(row.cold_ms / 1000)
            metrics.usage.cold(digest, row.cold_ms / 1000)
        if not tokens:
            return
        metrics.generated_tokens.inc(tokens)
        metrics.prefix_cached_tokens.inc(row.cached_tokens)
        metrics.usage.tokens(digest, tokens)
        if self.last_tokens:
            metrics.inter_token.observe((now - self.last_tokens) / tokens)
        else:
            waited, prompt_tokens = now - self.ask.arrived, self.generation.prompt_tokens
            metrics.prompt_tokens.inc(prompt_tokens)
            metrics.queue.observe(self.generation.queue_s)
            metrics.time_to_first_token.observe(waited)
            metrics.usage.first_token(digest, prompt_tokens, waited)
        self.last_tokens = now

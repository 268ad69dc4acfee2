"""One request from acceptance to its end, as the dispatcher carries it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.admission import Ask
from loralane_router.facts import AdapterFacts
from loralane_router.generation import Generation
from loralane_router.metrics import Metrics

#: About a minute of refusals.
_MOST_REFUSALS: Final = 64


@dataclass(slots=True)
class Entry:
    """What is asked, what is sent for it, and who reads the answer."""

    ask: Ask
    admission: pb.Admission
    generation: Generation
    #: Asks once more what its name means; None where that was done, and for the base.
    resolve_again: Callable[[], Awaitable[AdapterFacts]] | None = field(default=None, repr=False)
    refusals: int = 0
    #: When the last tokens came, or 0 before the first.
    last_tokens: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that its prompt and its answer take at most."""
        return len(self.admission.prompt) + self.admission.max_tokens

    def was_refused(self, row: pb.Row) -> bool:
        """Whether the shard had no room after all, and it is worth to ask again."""
        refused = self._failed_unheard(row, pb.ERROR_KIND_OVERLOADED)
        return refused and self.refusals < _MOST_REFUSALS

    def lost_its_adapter(self, row: pb.Row) -> bool:
        """Whether the adapter was unloaded after this request had found it, for the first time."""
        lost = self._failed_unheard(row, pb.ERROR_KIND_NOT_FOUND)
        return lost and self.resolve_again is not None

    def _failed_unheard(self, row: pb.Row, kind: "pb.ErrorKind.ValueType") -> bool:
        """Whether it failed with this before its first token, and somebody still waits for it."""
        failed = row.finish_reason == pb.FINISH_REASON_ERROR and row.error.kind == kind
        return failed and not self.last_tokens and not self.generation.finished

    async def find_adapter_again(self) -> AdapterFacts:
        """Resolve the adapter a second time; there is no third. Raises RequestError."""
        resolve, self.resolve_again = self.resolve_again, None
        assert resolve is not None
        return await resolve()

    def readdress(self, facts: AdapterFacts) -> None:
        """Ask for this adapter from now on. Nothing was generated yet."""
        assert not self.last_tokens
        self.ask = replace(self.ask, digest=facts.digest, lanes=facts.lanes, is_cold=facts.is_cold)
        self.admission.digest = facts.digest
        self.generation.adapter_digest = facts.digest

    def measure(self, row: pb.Row, metrics: Metrics, now: float) -> None:
        """Count what one step made for this request."""
        tokens, digest = len(row.tokens), self.ask.digest
        if row.cold_ms:
            metrics.adapter_cold.observe(row.cold_ms / 1000)
            metrics.usage.cold(digest, row.cold_ms / 1000)
        if not tokens:
            return
        metrics.generated_tokens.inc(tokens)
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

"""A row's life on the shard, and what the engine reports of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np

from loralane_server.device.seam import Int32, Sampling, Span, chosen_for
from loralane_server.errors import ShardError
from loralane_server.kv.prefix_cache import Chain

#: Where an adapter's tensors are, as far as the engine knows: in the pool, in the host cache, in
#: files.
Tier = Literal["device", "host", "disk"]

#: What a row owns that has not begun.
NO_PAGES: Int32 = np.empty(0, dtype=np.int32)


class Finish(Enum):
    """Why a row ended."""

    LENGTH = "length"
    STOP_TOKEN = "stop_token"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Admission:
    """A request as it arrives: token ids and how to continue them."""

    request_id: int
    #: "" = base model.
    digest: str
    prompt: Sequence[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    #: How many alternatives to report a token; None = no log-probabilities.
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class OutToken:
    """One generated token."""

    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowEvent:
    """What happened to one row in one step."""

    request_id: int
    tokens: tuple[OutToken, ...] = ()
    finish: Finish | None = None
    error: ShardError | None = None
    #: How long the row waited for its adapter; on its first event only.
    cold_ms: float = 0.0
    #: Tokens of the prompt that were found computed; on its first event only.
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the shard can still take, and how soon: this is left out when two are compared."""

    rows_total: int
    rows_free: int
    pages_total: int
    #: Those that no row owns, less those that the rows' tokens so far will take.
    pages_free: int
    lanes_total: int
    lanes_free: int
    lanes_in_use: int
    #: Of the pages that no row owns, those that the prefix cache keeps until they are wanted.
    pages_cached: int = field(default=0, compare=False)
    #: Of all rows, still to be computed before each can be sampled.
    pending_tokens: int = field(default=0, compare=False)
    #: As `Rates`.
    step_ms: float = field(default=0.0, compare=False)
    token_ms: float = field(default=0.0, compare=False)
    #: As `GraphCount`.
    graphs_declared: int = field(default=0, compare=False)
    graphs_compiled: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Residency:
    """Where an adapter is, which was elsewhere before."""

    digest: str
    tier: Tier
    #: 0 unless it is resident.
    lanes: int = 0


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One message: all that one step changed for one listener."""

    step: int
    rows: tuple[RowEvent, ...]
    residency: tuple[Residency, ...]
    capacity: Capacity
    #: Admissions of this listener so far; the capacity counts them all.
    admitted: int = 0


#: Takes events on the engine's thread; must not block.
Sink = Callable[[StepEvent], None]


@dataclass(slots=True, eq=False)
class Row:
    """A running request. Touched only by the engine's thread."""

    admission: Admission
    sink: Sink
    #: Prompt and generated tokens, as far as they are known.
    tokens: list[int]
    #: How many more the steps under way choose for it.
    awaited: int = 0
    #: Its span in the step that chooses the last of these.
    place: int = 0
    #: Pages of the tokens that are computed, and of those that the step under way computes.
    pages: Int32 = field(default_factory=lambda: NO_PAGES)
    #: Names its pages for the prefix cache.
    chain: Chain = field(init=False)
    #: Lane pages of its adapter; they may be read as far as the adapter's layers are written.
    lane_pages: tuple[int, ...] = ()
    #: How many tokens have their keys and values in the pages, or will have after the steps that
    #: are under way.
    computed: int = 0
    #: Whether it was given pages of its own, and not stopped since.
    begun: bool = False
    #: Tokens that it found computed when it began first; None = it never began.
    cached: int | None = None
    #: Whether its adapter (if any) is resident.
    ready: bool = False
    #: Whether a wave computes its first tokens: no other step may.
    in_wave: bool = False
    #: Whether it was taken out: what a step under way chooses for it is nobody's.
    ended: bool = False
    arrived: float = 0.0
    cold_ms: float = 0.0
    #: Not yet reported.
    events: list[RowEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chain = Chain(self.admission.digest)

    @property
    def runnable(self) -> bool:
        """Whether an ordinary step may compute it."""
        return self.ready and not self.in_wave and not self.complete

    @property
    def length(self) -> int:
        """Its tokens so far, with those that are awaited."""
        return len(self.tokens) + self.awaited

    @property
    def complete(self) -> bool:
        """Whether the last token that it may have is awaited: nothing is left to compute."""
        return self.length - len(self.admission.prompt) >= self.admission.max_tokens

    @property
    def pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return self.length - self.computed

    @property
    def generated(self) -> int:
        """Tokens generated so far, as far as they are known."""
        return len(self.tokens) - len(self.admission.prompt)

    def inputs(self, count: int) -> list[int]:
        """Return the next `count` tokens to compute, as a step takes them; see `StepInput`."""
        known = self.tokens[self.computed : self.computed + count]
        return known if len(known) == count else [*known, chosen_for(self.place)]

    def span(self, count: int) -> Span:
        """Return the next `count` tokens' part of a step."""
        return Span(self.computed, count, self.pages, self.lane_pages)

    def accept(self, token: OutToken) -> Finish | None:
        """Add a sampled token; return why the row ends with it, or None."""
        cold, cached = (0.0, 0) if self.generated else (self.cold_ms, self.cached or 0)
        self.tokens.append(token.id)
        finish = None
        if token.id in self.admission.stop_token_ids:
            finish = Finish.STOP_TOKEN
        elif self.generated >= self.admission.max_tokens:
            finish = Finish.LENGTH
        event = RowEvent(
            self.admission.request_id, (token,), finish, cold_ms=cold, cached_tokens=cached
        )
        self.events.append(event)
        return finish

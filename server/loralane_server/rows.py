"""A row's life on the shard, and what the engine reports of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from loralane_server.device.seam import Int32, Sampling, Span
from loralane_server.errors import ShardError

#: What a row owns before it is admitted.
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


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the shard can still take."""

    rows_total: int
    rows_free: int
    pages_total: int
    pages_free: int
    lanes_total: int
    lanes_free: int
    lanes_in_use: int


@dataclass(frozen=True, slots=True)
class Residency:
    """An adapter entered the pool or left it."""

    digest: str
    resident: bool
    lanes: int


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One message: all that one step changed for one listener."""

    step: int
    rows: tuple[RowEvent, ...]
    residency: tuple[Residency, ...]
    capacity: Capacity


#: Takes events on the engine's thread; must not block.
Sink = Callable[[StepEvent], None]


@dataclass(slots=True, eq=False)
class Row:
    """A running request. Touched only by the engine's thread."""

    admission: Admission
    sink: Sink
    #: Pages for prompt and answer, taken at admission.
    pages: Int32
    #: Prompt and generated tokens.
    tokens: list[int]
    #: Lane pages of its adapter; they may be read as far as the adapter's layers are written.
    lane_pages: tuple[int, ...] = ()
    #: How many of `tokens` have their keys and values in the pages.
    computed: int = 0
    #: Whether its adapter (if any) is resident.
    ready: bool = False
    #: Whether a wave computes its first tokens: no other step may.
    in_wave: bool = False
    arrived: float = 0.0
    cold_ms: float = 0.0
    #: Not yet reported.
    events: list[RowEvent] = field(default_factory=list)

    @property
    def runnable(self) -> bool:
        """Whether an ordinary step may compute it."""
        return self.ready and not self.in_wave

    @property
    def pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.admission.prompt)

    def span(self, count: int) -> Span:
        """Return the next `count` tokens' part of a step."""
        return Span(self.computed, count, self.pages, self.lane_pages)

    def accept(self, token: OutToken) -> Finish | None:
        """Add a sampled token; return why the row ends with it, or None."""
        first = self.generated == 0
        self.tokens.append(token.id)
        finish = None
        if token.id in self.admission.stop_token_ids:
            finish = Finish.STOP_TOKEN
        elif self.generated >= self.admission.max_tokens:
            finish = Finish.LENGTH
        cold = self.cold_ms if first else 0.0
        self.events.append(RowEvent(self.admission.request_id, (token,), finish, cold_ms=cold))
        return finish

"""The router as every surface sees it: open a request, read its deltas, manage adapters."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from loralane_router.config import RouterConfig
from loralane_router.metrics import Metrics
from loralane_router.requests import Delta, TextRequest

__all__ = ["AdapterEntry", "Generation", "ModelInfo", "Router"]


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One adapter as users see it. Units: bytes, milliseconds, unix seconds."""

    #: The alias, or the reference where it has none.
    name: str
    reference: str
    digest: str
    #: "remote", "disk", "host" or "device".
    tier: str
    rank: int
    lanes: int
    bytes: int
    targets: int
    modules: tuple[str, ...]
    #: Running rows that use it.
    rows: int
    pinned: bool
    load_ms: float
    last_used: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The base model that the shard serves."""

    model_id: str
    architecture: str
    dtype: str
    device: str
    #: Prompt and generated tokens together.
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    version: str


class Generation:
    """One accepted request; iterate it for its deltas, close it in `finally`."""

    prompt_tokens: int
    #: As the user named it; "" for base.
    adapter: str
    #: "" for base.
    adapter_digest: str
    #: The one in use (drawn where the request had none).
    seed: int
    #: Seconds from acceptance to admission; 0 until admitted.
    queue_s: float
    #: How long the row waited for its adapter, milliseconds; 0 until its first delta.
    cold_ms: float
    #: The one in use (what fits, where the request had none).
    max_tokens: int

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Return the deltas; the last has a finish reason. Raises RequestError on failure."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Cancel unless finished. Idempotent."""
        raise NotImplementedError


class Router:
    """Requests in, deltas out. Everything runs on the event loop that called `start`."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        #: Whether the shard answers; requests are refused (503) while it does not.
        self.ready = False

    @property
    def info(self) -> ModelInfo:
        """The base model. Raises RequestError (503) before the shard was first reached."""
        raise NotImplementedError

    async def start(self) -> None:
        """Connect to the shard and read its tokenizer; waits until both are there."""
        raise NotImplementedError

    async def close(self) -> None:
        """End every request with one error and disconnect. Idempotent."""
        raise NotImplementedError

    async def open(self, request: TextRequest) -> Generation:
        """Validate, tokenize, resolve the adapter and enqueue. Raises RequestError."""
        raise NotImplementedError

    def tokenize(self, text: str) -> list[tuple[int, str, int, int]]:
        """Return (id, text, start, stop) of every token; offsets in characters."""
        raise NotImplementedError

    def adapters(self) -> list[AdapterEntry]:
        """Return the adapters as last seen, without asking the shard."""
        raise NotImplementedError

    async def list_adapters(self) -> list[AdapterEntry]:
        """Ask the shard and return all adapters it knows. Raises RequestError."""
        raise NotImplementedError

    async def load_adapter(self, name: str, reference: str, token: str | None) -> AdapterEntry:
        """Give `reference` a name and make it resident. Raises RequestError."""
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> tuple[int, int]:
        """Forget an adapter; return (freed host bytes, freed lanes). Raises RequestError."""
        raise NotImplementedError

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterEntry:
        """Protect an adapter from eviction, or no longer. Raises RequestError."""
        raise NotImplementedError

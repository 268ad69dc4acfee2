"""The router as every surface sees it: open a request, read its deltas, manage adapters."""

import secrets
import time
from collections.abc import AsyncIterator
from itertools import count

from loralane_router.adapters.administration import Administration
from loralane_router.adapters.facts import AdapterEntry, AdapterFacts, Page
from loralane_router.config import RouterConfig
from loralane_router.fleet.fleet import Fleet
from loralane_router.fleet.placing import Placement
from loralane_router.fleet.shards import unavailable
from loralane_router.metrics.counters import Metrics
from loralane_router.metrics.exposition import Exposition
from loralane_router.metrics.snapshots import Snapshot, summed
from loralane_router.model import Model, ModelInfo
from loralane_router.parameters import admission_of, check, check_waiting, fit
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.deadlines import wait_of
from loralane_router.queueing.door import Door, called
from loralane_router.queueing.entry import Entry
from loralane_router.requests import TextRequest
from loralane_router.text.generation import Accepted, Generation

__all__ = ["AdapterEntry", "Generation", "ModelInfo", "Page", "Router"]


class Router:
    """Requests in, deltas out. Everything runs on the event loop that called `start`."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.fleet = Fleet(config, self.metrics)
        self._door = Door(self.fleet, config)
        self._administration = Administration(self.fleet)
        self.metrics.registry.register(Exposition(self._snapshot))
        self._request_ids = count(1)

    @property
    def ready(self) -> bool:
        """Whether a shard answers; requests are refused (503) while none does."""
        return self.fleet.ready

    @property
    def info(self) -> ModelInfo:
        """The base model. Raises RequestError (503) before a shard was first reached."""
        return self.fleet.model.info

    @property
    def capacity(self) -> dict[str, int]:
        """Rows, pages and lanes of all connected shards together, by the names of the wire."""
        capacities = (link.dispatcher.capacity for link in self.fleet.links)
        return summed(capacity for capacity in capacities if capacity is not None)

    async def start(self) -> None:
        """Connect to the shards and stay connected until `close`. Does not wait for any."""
        await self.fleet.start()

    async def close(self) -> None:
        """End every request with one error and disconnect. Idempotent."""
        await self.fleet.close()

    def ready_changes(self) -> AsyncIterator[bool]:
        """Return `ready` as it is now and after every change, without end."""
        return self.fleet.changes()

    async def wait_ready(self) -> None:
        """Return when a shard answers."""
        async for ready in self.ready_changes():
            if ready:
                return

    async def open(self, request: TextRequest) -> Generation:
        """Validate, tokenize, choose a shard, resolve the adapter there and enqueue.

        Raises RequestError; 429 only for what could be served, see `Door`.
        """
        arrived = time.monotonic()
        model = self._live_model()
        with self._door.coming(request) as coming:
            check(request.parameters)
            check_waiting(request)
            prompt = await model.prompt_ids(request)
            max_tokens = fit(len(prompt), request.parameters.max_tokens, model.info.max_model_len)
            self._door.note_prompt(coming, len(prompt))
            placed = await self.fleet.placing.place_in_time(
                request.merge or request.adapter,
                request.token,
                wait_of(request, arrived),
                tokens=len(prompt),
            )
        if self._live_model() is not model:
            raise unavailable("the shard was replaced meanwhile; send the request again")
        ask = self._ask(request, len(prompt), max_tokens, placed, arrived)
        self._door.make_place(coming, ask.flow)
        return self._submit(model, request, prompt, max_tokens, placed, ask)

    def check_ready(self) -> None:
        """Raise RequestError (503) if no shard is connected."""
        self._live_model()

    def tokenize(self, text: str) -> list[tuple[int, str, int, int]]:
        """Return (id, text, start, stop) of every token; offsets in characters."""
        return self.fleet.model.codec.spans(text)

    def adapters(self, limit: int, after: str = "") -> Page:
        """Return adapters as last seen, without asking a shard: those behind a name, in order."""
        return self._administration.page(limit, after)

    def adapter(self, name: str) -> AdapterEntry | None:
        """Return what a name was last seen to mean; None if it is no alias and not known."""
        return self._administration.entry(name)

    async def list_adapters(self, limit: int, after: str = "") -> Page:
        """Return the same as the shards describe them now. Raises RequestError."""
        return await self._administration.listed(limit, after)

    async def load_adapter(
        self, name: str, reference: str, token: str | None, ttl_s: float | None = None
    ) -> AdapterEntry:
        """Give `reference` a name and make it resident. Raises RequestError.

        `ttl_s`: forget it when it was unused for so long; 0 = never, None = as it is.
        """
        return await self._administration.load(name, reference, token, ttl_s)

    async def validate_adapter(
        self, reference: str, token: str | None, *, tensors: bool
    ) -> tuple[AdapterFacts, tuple[str, ...]]:
        """Return what an adapter is, and oddities that change nothing; remember nothing.

        `tensors`: read every tensor too. Raises RequestError as a request for it would.
        """
        return await self._administration.validate(reference, token, tensors)

    async def unload_adapter(self, name: str) -> tuple[int, int]:
        """Forget an adapter; return (freed host bytes, freed lanes).

        Raises RequestError: not found, or a request waits for it or uses it.
        """
        return await self._administration.unload(name)

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterEntry:
        """Protect an adapter from eviction, or no longer. Raises RequestError."""
        return await self._administration.pin(name, pinned)

    def check(self) -> None:
        """Assert what must hold between calls."""
        self.fleet.check()

    def _snapshot(self) -> Snapshot:
        """Return what metrics say of this moment."""
        return Snapshot(
            model_name=self.info.model_id if self.ready else None,
            shards=[link.state() for link in self.fleet.links],
            several=self.fleet.several,
            usage=self.metrics.usage.rows(),
            now=time.time(),
        )

    def _live_model(self) -> Model:
        """Return the connected shards' model. Raises RequestError (503) while there is none."""
        self.fleet.connected()
        return self.fleet.model

    def _ask(
        self,
        request: TextRequest,
        tokens: int,
        max_tokens: int,
        placed: Placement,
        arrived: float,
    ) -> Ask:
        """Return what a request needs of its shard. Raises RequestError if that cannot have it."""
        adapter = placed.adapter
        return Ask(
            next(self._request_ids),
            adapter.digest,
            placed.link.dispatcher.needed_pages(tokens, max_tokens, adapter),
            adapter.lanes,
            arrived,
            adapter.is_cold,
            self.fleet.shares.flow_of(request.key, called(request, adapter), adapter.digest),
            tokens=tokens,
            priority=request.priority,
        )

    def _submit(
        self,
        model: Model,
        request: TextRequest,
        prompt: list[int],
        max_tokens: int,
        placed: Placement,
        ask: Ask,
    ) -> Generation:
        link, adapter = placed.link, placed.adapter
        wait = wait_of(request, ask.arrived) if adapter.digest else None
        seed = request.parameters.seed
        accepted = Accepted(
            request_id=ask.request_id,
            prompt_tokens=len(prompt),
            adapter=called(request, adapter),
            digest=adapter.digest,
            seed=secrets.randbits(64) if seed is None else seed,
            max_tokens=max_tokens,
            stop=request.parameters.stop,
            may_fall_back=wait is not None and wait.policy == "base",
        )
        generation = Generation(accepted, model.codec, link.dispatcher.cancel)
        if placed.is_fallback:
            generation.fall_back()
        admission = admission_of(accepted, request.parameters, prompt, model.info)
        asked = request.merge or request.adapter
        link.submit(Entry(ask, admission, generation, asked, request.token, wait=wait))
        return generation

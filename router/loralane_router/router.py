"""The router as every surface sees it: open a request, read its deltas, manage adapters."""

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.admission import Ask
from loralane_router.config import RouterConfig
from loralane_router.connection import Connection
from loralane_router.dispatch import Dispatcher
from loralane_router.entry import Entry
from loralane_router.errors import RequestError
from loralane_router.exposition import Exposition, Snapshot
from loralane_router.facts import BASE, AdapterEntry, AdapterFacts, Page, facts_of
from loralane_router.generation import Accepted, Generation
from loralane_router.metrics import Metrics
from loralane_router.model import Model, ModelInfo
from loralane_router.parameters import admission_of, check, fit
from loralane_router.registry import Registry, not_found
from loralane_router.requests import Merge, TextRequest
from loralane_router.shards import unavailable

__all__ = ["AdapterEntry", "Generation", "ModelInfo", "Page", "Router"]

#: Seconds after which a request that found the queue full may come back.
_FULL_RETRY_S: Final = 1.0


class Router:
    """Requests in, deltas out. Everything runs on the event loop that called `start`."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self._dispatcher = Dispatcher(self.metrics)
        self._registry = Registry(config.served_model_name)
        self._connection = Connection(
            config.shards[0], self._dispatcher, self._registry, self.metrics
        )
        self.metrics.registry.register(Exposition(self._snapshot))
        self._request_ids = count(1)
        #: Requests inside `open`, which will wait unless they are refused.
        self._opening = 0

    @property
    def ready(self) -> bool:
        """Whether the shard answers; requests are refused (503) while it does not."""
        return self._connection.ready

    @property
    def info(self) -> ModelInfo:
        """The base model. Raises RequestError (503) before the shard was first reached."""
        return self._connection.model.info

    async def start(self) -> None:
        """Connect to the shard and stay connected until `close`. Does not wait for the shard."""
        await self._connection.start()

    async def close(self) -> None:
        """End every request with one error and disconnect. Idempotent."""
        await self._connection.close()

    def ready_changes(self) -> AsyncIterator[bool]:
        """Return `ready` as it is now and after every change, without end."""
        return self._connection.changes()

    async def wait_ready(self) -> None:
        """Return when the shard answers."""
        async for ready in self.ready_changes():
            if ready:
                return

    async def open(self, request: TextRequest) -> Generation:
        """Validate, tokenize, resolve the adapter and enqueue. Raises RequestError."""
        arrived = self._dispatcher.now()
        model = self._live_model()
        self._refuse_beyond_queue(self._opening - self._dispatcher.rows)
        self._opening += 1
        try:
            check(request.parameters)
            prompt = await model.prompt_ids(request)
            max_tokens = fit(len(prompt), request.parameters.max_tokens, model.info.max_model_len)
            adapter = await self._resolve(request.merge or request.adapter, request.token)
        finally:
            self._opening -= 1
        if self._live_model() is not model:
            raise unavailable("the shard was replaced meanwhile; send the request again")
        return self._submit(model, request, prompt, max_tokens, adapter, arrived)

    def _refuse_beyond_queue(self, ahead: int) -> None:
        if ahead >= self.config.max_queue:
            raise RequestError(
                pb.ERROR_KIND_OVERLOADED,
                f"{ahead} requests are waiting already; try again later",
                retry_after_s=_FULL_RETRY_S,
            )

    def tokenize(self, text: str) -> list[tuple[int, str, int, int]]:
        """Return (id, text, start, stop) of every token; offsets in characters."""
        return self._connection.model.codec.spans(text)

    def adapters(self, limit: int, after: str = "") -> Page:
        """Return adapters as last seen, without asking the shard: those behind a name, in order."""
        return self._registry.page(limit, after)

    def adapter(self, name: str) -> AdapterEntry | None:
        """Return what a name was last seen to mean; None if it is no alias and not known."""
        return self._registry.entry(name)

    async def list_adapters(self, limit: int, after: str = "") -> Page:
        """Return the same as the shard describes them now. Raises RequestError."""
        page = await self._registry.listed(self._connection.shard, limit, after)
        self._dispatcher.note_pins(entry.facts for entry in page.entries if entry.facts.digest)
        return page

    async def load_adapter(
        self, name: str, reference: str, token: str | None, ttl_s: float | None = None
    ) -> AdapterEntry:
        """Give `reference` a name and make it resident. Raises RequestError.

        `ttl_s`: forget it when it was unused for so long; 0 = never, None = as it is.
        """
        shard = self._connection.shard
        self._registry.check_alias(name)
        facts = await self._resolve_and(reference, token, lambda digest: shard.load(digest, ttl_s))
        self._registry.add_alias(name, reference, facts)
        return self._entry(name, facts)

    async def validate_adapter(
        self, reference: str, token: str | None, *, tensors: bool
    ) -> tuple[AdapterFacts, tuple[str, ...]]:
        """Return what an adapter is, and oddities that change nothing; remember nothing.

        `tensors`: read every tensor too. Raises RequestError as a request for it would.
        """
        shard, sent = self._connection.shard, self._registry.sent(reference)
        reply = await shard.validate(sent, token, tensors)
        if reply.HasField("error"):
            raise RequestError.from_proto(reply.error)
        return facts_of(reply.adapter), tuple(reply.notes)

    async def unload_adapter(self, name: str) -> tuple[int, int]:
        """Forget an adapter; return (freed host bytes, freed lanes).

        Raises RequestError: not found, or a request waits for it or uses it.
        """
        shard = self._connection.shard
        facts = await self._registry.search(shard, name)
        if facts is None:
            raise not_found(name)
        if self._dispatcher.needs(facts.digest):
            raise RequestError(
                pb.ERROR_KIND_IN_USE,
                f"requests wait for adapter {name!r} or use it; unload it when they have ended",
            )
        try:
            reply = await shard.unload(facts.digest)
        except RequestError as error:
            if error.kind != pb.ERROR_KIND_NOT_FOUND:
                raise
            reply = pb.UnloadAdapterReply()  # it went by itself: unused too long, or replaced
        self._registry.forget(facts.digest)
        self._dispatcher.note_unloaded(facts.digest)
        return reply.freed_host_bytes, reply.freed_lanes

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterEntry:
        """Protect an adapter from eviction, or no longer. Raises RequestError."""
        shard = self._connection.shard
        facts = await self._registry.search(shard, name)
        if facts is not None:
            facts = self._updated(await shard.pin(facts.digest, pinned))
        else:
            facts = await self._resolve_and(name, None, lambda digest: shard.pin(digest, pinned))
        return self._entry(name, facts)

    async def _resolve_and(
        self, name: str, token: str | None, act: Callable[[str], Awaitable[pb.Adapter]]
    ) -> AdapterFacts:
        """Act on the adapter that a name means, once more if it was unloaded in between."""
        shard = self._connection.shard
        resolved = await self._registry.resolve(shard, name, token)
        try:
            return self._updated(await act(resolved.digest))
        except RequestError as error:
            if error.kind != pb.ERROR_KIND_NOT_FOUND:
                raise
        resolved = await self._registry.resolve(shard, name, token)
        return self._updated(await act(resolved.digest))

    def _updated(self, adapter: pb.Adapter) -> AdapterFacts:
        facts = self._registry.remember(adapter)
        self._dispatcher.note_pins([facts])
        return facts

    def _entry(self, name: str, facts: AdapterFacts) -> AdapterEntry:
        """Return an adapter as the one sees it who has just named it."""
        known = self._registry.entry(name)
        return AdapterEntry(name, facts.reference if known is None else known.reference, facts)

    def _snapshot(self) -> Snapshot:
        """Return what metrics say of this moment."""
        return Snapshot(
            model_name=self.info.model_id if self.ready else None,
            capacity=self._dispatcher.capacity,
            work=self._dispatcher.work(),
            tiers=self._registry.tiers,
            on_device=tuple(self._registry.held("device")),
            on_host=self._registry.held("host"),
            usage=self.metrics.usage.rows(),
            now=time.time(),
        )

    def _live_model(self) -> Model:
        """Return the connected shard's model. Raises RequestError (503) while there is none."""
        if not self.ready:
            raise unavailable("the shard is not connected; try again when the router is ready")
        return self._connection.model

    async def _resolve(self, name: str | Merge, token: str | None) -> AdapterFacts:
        """Return the adapter that a request names; one without a digest is the base model."""
        shard = self._connection.shard
        if isinstance(name, Merge):
            facts = await self._registry.resolve(shard, name, token)
        elif self._registry.is_base(name):
            return BASE
        else:
            before = self._registry.find(name)
            facts = await self._registry.resolve(shard, name, token)
            if before is not None and before.pinned and before.digest != facts.digest:
                # Its files were replaced: the pin belongs to the name's adapter, not to old bytes.
                facts = await self._move_pin(name, before, facts)
        self._dispatcher.note_pins([facts])
        return facts

    async def _move_pin(self, name: str, old: AdapterFacts, new: AdapterFacts) -> AdapterFacts:
        """Pin what a name means now instead of what it meant; the old makes room for the new.

        Where that fails (RequestError, or the client leaves), the name keeps the old and its pin:
        the next request that names it tries again.
        """
        shard = self._connection.shard
        try:
            self._updated(await shard.pin(old.digest, False))
            return self._updated(await shard.pin(new.digest, True))
        except BaseException:
            self._registry.name_again(name, old)
            with suppress(RequestError):
                self._updated(await shard.pin(old.digest, True))
            raise

    def _submit(
        self,
        model: Model,
        request: TextRequest,
        prompt: list[int],
        max_tokens: int,
        adapter: AdapterFacts,
        arrived: float,
    ) -> Generation:
        pages = self._dispatcher.needed_pages(len(prompt) + max_tokens, adapter)
        # After all that a client can get wrong: those who are told "overloaded" come back.
        self._refuse_beyond_queue(self._dispatcher.waiting - self._dispatcher.free_rows)
        seed = request.parameters.seed
        accepted = Accepted(
            request_id=next(self._request_ids),
            prompt_tokens=len(prompt),
            adapter=_name(request, adapter),
            digest=adapter.digest,
            seed=secrets.randbits(64) if seed is None else seed,
            max_tokens=max_tokens,
            stop=request.parameters.stop,
        )
        generation = Generation(accepted, model.codec, self._dispatcher.cancel)
        ask = Ask(
            accepted.request_id, adapter.digest, pages, adapter.lanes, arrived, adapter.is_cold
        )
        admission = admission_of(accepted, request.parameters, prompt, model.info)
        entry = Entry(ask, admission, generation)
        if adapter.digest:
            entry.resolve_again = lambda: self._resolve(
                request.merge or request.adapter, request.token
            )
        self._dispatcher.submit(entry)
        return generation


def _name(request: TextRequest, adapter: AdapterFacts) -> str:
    if request.merge is not None:
        return adapter.reference
    return request.adapter if adapter.digest else ""

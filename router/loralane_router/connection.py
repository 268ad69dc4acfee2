"""The connection to the shard: made, served until it breaks, and made again."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.dispatch import Dispatcher
from loralane_router.errors import RequestError
from loralane_router.facts import TIER_NAMES
from loralane_router.metrics import Metrics
from loralane_router.model import Model
from loralane_router.registry import Registry
from loralane_router.shards import ShardClient, unavailable

_log = logging.getLogger(__name__)

#: Seconds between attempts to reach the shard: doubled each time, up to the last.
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0


class Connection:
    """One shard's client, kept connected by one task from `start` to `close`."""

    def __init__(
        self, address: str, dispatcher: Dispatcher, registry: Registry, metrics: Metrics
    ) -> None:
        self._address = address
        self._dispatcher = dispatcher
        self._registry = registry
        self._metrics = metrics
        self._shard: ShardClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._model: Model | None = None
        self._ready = False
        #: The number of the last step heard of on this connection; None before the first.
        self._step: int | None = None
        self._changed = asyncio.Condition()

    @property
    def ready(self) -> bool:
        """Whether the shard answers and rows can run."""
        return self._ready

    @property
    def model(self) -> Model:
        """The model as last seen. Raises RequestError (503) before the first connection."""
        if self._model is None:
            raise unavailable("the shard was not reached yet; try again when the router is ready")
        return self._model

    @property
    def shard(self) -> ShardClient:
        """The shard's client. Raises RequestError (503) while it is not connected."""
        if self._shard is None or not self._ready:
            raise unavailable("the shard is not connected; try again when the router is ready")
        return self._shard

    async def start(self) -> None:
        """Begin to connect; does not wait for the shard."""
        self._shard = ShardClient(self._address)
        self._task = asyncio.create_task(self._stay_connected(self._shard), name="connection")

    async def close(self) -> None:
        """Disconnect; every request ends with an error. Idempotent."""
        task, shard = self._task, self._shard
        self._task = self._shard = None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if shard is not None:
            await shard.close()

    async def changes(self) -> AsyncIterator[bool]:
        """Yield `ready`: now, and after every change."""
        while True:
            told = self._ready
            yield told
            async with self._changed:
                while self._ready == told:
                    await self._changed.wait()

    async def _stay_connected(self, shard: ShardClient) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_S
        while True:
            began = loop.time()
            try:
                await self._serve(shard)
            except RequestError as error:
                _log.warning("shard %s: %s", self._address, error.message)
            except Exception:  # whatever it was, its requests have ended and the next may succeed
                _log.exception("shard %s: the connection failed", self._address)
            finally:
                await self._set_ready(False)
            lasted = loop.time() - began > _LONGEST_PAUSE_S
            pause = _FIRST_PAUSE_S if lasted else min(2 * pause, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    async def _serve(self, shard: ShardClient) -> None:
        """Serve one connection; ends with RequestError when it breaks."""
        info = await shard.info()
        files = await shard.tokenizer_files()
        self._model = await asyncio.to_thread(Model, info, files)
        self._registry.connect(info)
        await self._registry.sync(shard)
        stream = shard.run(self._dispatcher.wake)
        try:
            self._dispatcher.connect(info.capacity)
            self._dispatcher.note_pins(facts for _, facts in self._registry.held("device"))
            self._step = None
            await self._set_ready(True)
            await self._dispatcher.serve(stream, self._observe)
        finally:
            await stream.aclose()

    def _observe(self, step: pb.StepReply) -> None:
        self._metrics.steps.inc(0 if self._step is None else step.step - self._step)
        self._step = step.step
        self._registry.observe(step.residency)
        for change in step.residency:
            self._metrics.adapter_moves.labels(TIER_NAMES[change.tier]).inc()

    async def _set_ready(self, ready: bool) -> None:
        self._metrics.shard_up.set(ready)
        async with self._changed:
            self._ready = ready
            self._changed.notify_all()

"""The connection to one shard: made, served until it breaks, and made again."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import TIER_NAMES
from loralane_router.adapters.names import Names
from loralane_router.adapters.registry import Registry
from loralane_router.errors import RequestError
from loralane_router.fleet.shards import ShardClient, unavailable
from loralane_router.metrics.counters import Metrics
from loralane_router.model import CommonModel, OtherModel
from loralane_router.queueing.dispatch import Dispatcher

_log = logging.getLogger(__name__)

#: Seconds between attempts to reach the shard: doubled each time, up to the last.
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0


class Connection:
    """One shard's client, kept connected by one task from `start` to `close`."""

    def __init__(
        self,
        address: str,
        dispatcher: Dispatcher,
        registry: Registry,
        names: Names,
        model: CommonModel,
        metrics: Metrics,
        on_change: Callable[[], None],
    ) -> None:
        self._address = address
        self._dispatcher = dispatcher
        self._registry = registry
        self._names = names
        self._model = model
        self._metrics = metrics
        self._on_change = on_change
        self._shard: ShardClient | None = None
        self._task: asyncio.Task[None] | None = None
        #: Whether rows can run; new ones may begin unless the shard is about to go away.
        self._ready = self._leaving = False
        #: The number of the last step heard of on this connection; None before the first.
        self._step: int | None = None
        self._problem = ""

    @property
    def ready(self) -> bool:
        """Whether the shard answers and takes requests."""
        return self._ready and not self._leaving

    @property
    def problem(self) -> str:
        """Why the shard is not connected; "" while it is, and before that is known."""
        return self._problem

    @property
    def shard(self) -> ShardClient:
        """The shard's client. Raises RequestError (503) while it is not connected."""
        if self._shard is None or not self.ready:
            raise unavailable("the shard is not connected; try again when the router is ready")
        return self._shard

    async def start(self) -> None:
        """Begin to connect; does not wait for the shard."""
        self._shard = ShardClient(self._address)
        self._task = asyncio.create_task(self._stay_connected(self._shard), name="connection")

    async def close(self) -> None:
        """Disconnect; every request leaves with an error. Idempotent."""
        task, shard = self._task, self._shard
        self._task = self._shard = None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if shard is not None:
            await shard.close()

    async def _stay_connected(self, shard: ShardClient) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_S
        while True:
            began, refused = loop.time(), False
            try:
                await self._serve(shard)
            except RequestError as error:
                refused = isinstance(error, OtherModel)
                self._note_problem(error.message)
            except Exception:  # whatever it was, its requests have ended and the next may succeed
                _log.exception("shard %s: the connection failed", self._address)
            lasted = loop.time() - began > _LONGEST_PAUSE_S
            pause = _FIRST_PAUSE_S if lasted else min(2 * pause, _LONGEST_PAUSE_S)
            await asyncio.sleep(_LONGEST_PAUSE_S if refused else pause)

    async def _serve(self, shard: ShardClient) -> None:
        """Serve one connection; ends with RequestError when it breaks."""
        info = await shard.info()
        await self._model.join(self._address, info, shard.tokenizer_files)
        try:
            for alias in self._names.connect(self._address, info):
                _log.warning(
                    "shard %s: alias %r stands for another adapter on other shards, so requests "
                    "for it do not come here",
                    self._address,
                    alias,
                )
            await self._registry.sync(shard)
            await self._run(shard, info.capacity)
        finally:
            self._model.leave(self._address)

    async def _run(self, shard: ShardClient, capacity: pb.Capacity) -> None:
        stream = shard.run(self._dispatcher.wake)
        try:
            self._dispatcher.connect(capacity)
            self._dispatcher.note_pins(facts for _, facts in self._registry.held("device"))
            self._step = None
            self._leaving = False
            self._set_ready(True)
            watching = asyncio.create_task(self._watch(shard), name="shard-health")
            try:
                await self._dispatcher.serve(stream, self._observe)
            finally:
                watching.cancel()
                await asyncio.wait([watching])
        finally:
            self._set_ready(False)
            await stream.aclose()

    async def _watch(self, shard: ShardClient) -> None:
        """Take over when the shard says that it will go: it finishes its rows and gets no new."""
        async for serving in shard.serving():
            if self._leaving == serving:
                _log.info("shard %s: %s", self._address, "serves" if serving else "is leaving")
                self._leaving = not serving
                self._on_change()

    def _observe(self, step: pb.StepReply) -> None:
        self._metrics.steps.inc(0 if self._step is None else step.step - self._step)
        self._step = step.step
        self._registry.observe(step.residency)
        for change in step.residency:
            self._metrics.adapter_moves.labels(TIER_NAMES.get(change.tier, "remote")).inc()

    def _set_ready(self, ready: bool) -> None:
        if ready:
            _log.info("shard %s: connected", self._address)
            self._problem = ""
        self._ready = ready
        self._on_change()

    def _note_problem(self, message: str) -> None:
        """Log why there is no connection: once, until that changes."""
        if message != self._problem:
            _log.warning("shard %s: %s", self._address, message)
            self._problem = message
            self._on_change()

"""Adapters that are resident before a shard says that it is ready."""

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from loralane_server.adapters.pool import lanes_for
from loralane_server.adapters.store.entries import AdapterSummary
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.engine import Engine
from loralane_server.errors import AdapterTooLarge, ShardError

log = logging.getLogger(__name__)

T = TypeVar("T")


async def preload(
    engine: Engine, store: AdapterStore, names: Sequence[str], pinned: Sequence[str]
) -> None:
    """Load adapters by alias or reference, as a caller without a token; keep those of `pinned`.

    Raises `ShardError` naming the adapter that cannot be had, or the lanes that all of them need.
    """
    found: dict[str, AdapterSummary] = {}
    for name in dict.fromkeys([*pinned, *names]):
        found[name] = await _naming(name, asyncio.wrap_future(store.resolve(name)))
    await _check_room(engine, found.values())
    loads = {
        name: asyncio.wrap_future(engine.load(summary.digest)) for name, summary in found.items()
    }
    ended = asyncio.wrap_future(engine.stopped)
    for number, (name, load) in enumerate(loads.items(), 1):
        await asyncio.wait((load, ended), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        await _naming(name, load)
        log.info("preloaded adapter %d of %d: %s", number, len(loads), name)
    for name in pinned:
        await asyncio.wrap_future(engine.pin(found[name].digest, True))


async def _naming(name: str, work: Awaitable[T]) -> T:
    """Return what `work` returns; an error of it says which adapter it is about."""
    try:
        return await work
    except ShardError as exc:
        message = f"adapter {name} cannot be preloaded: {exc.message}"
        raise type(exc)(message, tensors=exc.tensors) from exc


async def _check_room(engine: Engine, adapters: Iterable[AdapterSummary]) -> None:
    lanes = {summary.digest: lanes_for(summary.rank) for summary in adapters}
    needed, there = sum(lanes.values()), (await asyncio.wrap_future(engine.capacity())).lanes_total
    if needed > there:
        raise AdapterTooLarge(
            f"the adapters of --preload and --pin take {needed} lanes together and the shard has "
            f"{there}; raise --lanes or name fewer"
        )

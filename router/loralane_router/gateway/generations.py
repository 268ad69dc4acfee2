"""Opening, reading and closing generations: the mechanics that all text routes share.

Whoever opens generations closes them on every way out, a vanished client included: then row, pages
and lanes are free again at the shard's next step.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from loralane_proto import shard_pb2 as pb
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from loralane_router.errors import RequestError
from loralane_router.gateway.begun import Begun
from loralane_router.requests import Delta, FinishReason, OutToken, TextRequest
from loralane_router.router import Generation, Router

_T = TypeVar("_T")

#: JSON has no infinity; it is what a token of probability 0 gets on other servers too.
_LEAST_LOGPROB: Final = -9999.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation, complete."""

    text: str
    tokens: tuple[OutToken, ...]
    finish_reason: FinishReason
    #: The steps that made it.
    deltas: tuple[Delta, ...]


async def open_all(
    router: Router, requests: Sequence[TextRequest], *, clamp: bool = False
) -> list[Generation]:
    """Open all or none. With `clamp`, max_tokens shrinks to what fits. Raises RequestError."""
    opened: list[Generation] = []
    try:
        for request in requests:
            opened.append(await _open(router, request, clamp=clamp))
    except BaseException:
        await close_all(opened)
        raise
    return opened


async def _open(router: Router, request: TextRequest, *, clamp: bool) -> Generation:
    """Without `clamp` a max_tokens that does not fit is refused, as whoever asked for it expects.

    A surface's default that does not fit gives way to "as many as fit": if the request is invalid
    with the one and valid with the other, that many is less than the default.
    """
    try:
        return await router.open(request)
    except RequestError as error:
        if not clamp or error.kind != pb.ERROR_KIND_INVALID_REQUEST:
            raise
    unbounded = replace(request.parameters, max_tokens=None)
    return await router.open(replace(request, parameters=unbounded))


async def close_all(generations: Sequence[Generation]) -> None:
    """Cancel what is not finished."""
    for generation in generations:
        await generation.aclose()


async def collect_all(generations: Sequence[Generation]) -> list[Answer]:
    """Read all to their ends and close them. Raises RequestError."""
    try:
        return [await _collect(generation) for generation in generations]
    finally:
        await close_all(generations)


async def _collect(generation: Generation) -> Answer:
    deltas = [delta async for delta in generation]
    reason = deltas[-1].finish_reason
    assert reason is not None, "a generation's last delta has a finish reason"
    text = "".join(delta.text for delta in deltas)
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return Answer(text, tokens, reason, tuple(deltas))


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield all deltas as they come, each with its generation's index. Raises RequestError."""
    if len(generations) == 1:
        async for delta in generations[0]:
            yield 0, delta
        return
    arrivals: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
    pumps = [
        asyncio.create_task(_pump(index, generation, arrivals))
        for index, generation in enumerate(generations)
    ]
    try:
        running = len(pumps)
        while running:
            item = await arrivals.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int,
    generation: Generation,
    arrivals: asyncio.Queue[tuple[int, Delta] | Exception | None],
) -> None:
    try:
        async for delta in generation:
            arrivals.put_nowait((index, delta))
        arrivals.put_nowait(None)
    except Exception as error:
        arrivals.put_nowait(error)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what `work` returns; cancel it when the client disconnects (ClientDisconnect).

    The body must have been read: what `receive` gives next is then the disconnect. `work` runs in
    the caller's task, and nobody looks for the client before it waits for something.
    """
    begun = Begun(work)
    if not begun.waits:
        return await begun
    working = asyncio.current_task()
    assert working is not None, "a coroutine runs in a task"
    is_gone = over = False

    def leave(leaving: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if not over and not leaving.cancelled():
            is_gone = True
            working.cancel()

    leaving = asyncio.create_task(disconnected(request.receive))
    leaving.add_done_callback(leave)
    try:
        return await begun
    except asyncio.CancelledError:
        if not is_gone or working.cancelling() > 1:  # somebody else wants its end, too
            raise
        raise ClientDisconnect from None
    finally:
        over = True
        leaving.cancel()
        if is_gone:
            working.uncancel()


async def disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry."""
    return max(logprob, _LEAST_LOGPROB)


async def settled(generations: Sequence[Generation]) -> None:
    """Return when it is known of each whether its adapter answers or the base in its place."""
    for generation in generations:
        await generation.settled()


def any_fallback(generations: Sequence[Generation]) -> bool:
    """Whether the base answers in an adapter's place, for one of several choices at least."""
    return any(generation.is_fallback for generation in generations)


def opening_headers(generations: Sequence[Generation]) -> dict[str, str]:
    """Return what is known before the first token, once it is settled who answers.

    Where some choices are the adapter's and others the base's, both are named.
    """
    headers = {"x-prompt-tokens": str(generations[0].prompt_tokens)}
    if digest := _digest(generations):
        headers["x-loralane-adapter-digest"] = digest
    if any_fallback(generations):
        headers["x-loralane-adapter-fallback"] = "base"
    return headers


def _digest(generations: Sequence[Generation]) -> str:
    return next((g.adapter_digest for g in generations if g.adapter_digest), "")


def first_token_headers(generations: Sequence[Generation]) -> dict[str, str]:
    """Return what is known from the first token on: also how long an adapter was waited for."""
    headers = opening_headers(generations)
    if _digest(generations):
        cold_ms = max(generation.cold_ms for generation in generations)
        headers["x-loralane-adapter-cold-ms"] = f"{cold_ms:.1f}"
    return headers


def closing_headers(
    generations: Sequence[Generation], answers: Sequence[Answer], started: float
) -> dict[str, str]:
    """Return LoRAX's headers of a complete answer; times in milliseconds since `started`.

    `started` is a reading of `time.perf_counter`.
    """
    first = generations[0]
    return first_token_headers(generations) | {
        "x-generated-tokens": str(sum(len(answer.tokens) for answer in answers)),
        "x-total-time": f"{(time.perf_counter() - started) * 1000:.0f}",
        "x-queue-time": f"{first.queue_s * 1000:.0f}",
    }

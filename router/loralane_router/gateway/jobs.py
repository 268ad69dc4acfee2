"""How every text route answers: open, then stream or collect, and close when the client leaves."""

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from loralane_router.gateway.bodies import decode, read
from loralane_router.gateway.failures import Failure
from loralane_router.gateway.generations import (
    Answer,
    closing_headers,
    collect_all,
    open_all,
    unless_gone,
)
from loralane_router.gateway.limits import Limits
from loralane_router.gateway.sse import EventStream
from loralane_router.requests import TextRequest
from loralane_router.router import Generation, Router


class Job(Protocol):
    """One checked request of one surface: what to generate, and how its answer looks."""

    @property
    def requests(self) -> Sequence[TextRequest]:
        """One for each choice, in the order of their indices."""
        ...

    @property
    def clamp(self) -> bool:
        """Whether max_tokens is only the surface's default and may shrink to what fits."""
        ...

    def frames(self, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream, none before the first delta. Raises RequestError."""
        ...

    def answer(self, generations: Sequence[Generation], answers: Sequence[Answer]) -> bytes:
        """Return the body of a complete answer."""
        ...


class Responder:
    """Runs the jobs of one surface."""

    def __init__(
        self,
        router: Router,
        limits: Limits,
        error_body: Callable[[Failure], Mapping[str, object]],
    ) -> None:
        self._router = router
        self._limits = limits
        self._error_body = error_body

    async def read(self, request: Request) -> dict[str, Any]:
        """Return the body of a request for text, a JSON object.

        It is not looked at while no shard is connected. Raises RequestError (503, then as
        `read_json`).
        """
        raw = await read(request, self._limits)
        self._router.check_ready()
        return decode(raw)

    async def respond(self, request: Request, job: Job, *, stream: bool) -> Response:
        """Return the answer. Raises RequestError, or ClientDisconnect when nobody waits for it."""
        return await unless_gone(request, self._stream(job) if stream else self._complete(job))

    async def _stream(self, job: Job) -> Response:
        generations = await open_all(self._router, job.requests, clamp=job.clamp)
        frames = job.frames(generations)
        return await EventStream(generations, frames, self._error_body, self._limits).begin()

    async def _complete(self, job: Job) -> Response:
        started = time.perf_counter()
        generations = await open_all(self._router, job.requests, clamp=job.clamp)
        answers = await collect_all(generations)
        return Response(
            job.answer(generations, answers),
            headers=closing_headers(generations, answers, started),
            media_type="application/json",
        )

"""One accepted request, between the dispatcher that feeds it and the surface that reads it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from loralane_proto import shard_pb2 as pb

from loralane_router.errors import RequestError
from loralane_router.requests import Delta, FinishReason, OutToken
from loralane_router.text.detokenize import Detokenizer, StopStrings
from loralane_router.text.tokens import Codec


@dataclass(frozen=True, slots=True)
class Accepted:
    """What is fixed when a request is accepted."""

    request_id: int
    prompt_tokens: int
    #: As the user named it; "" for base.
    adapter: str
    #: "" for base.
    digest: str
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    #: Whether the base may answer instead: the request allows it, and its adapter is not there yet.
    may_fall_back: bool = False


class Generation:
    """One accepted request; iterate it for its deltas, close it in `finally`.

    The dispatcher calls `accept` and `fail`, a surface iterates; both on one event loop.
    """

    def __init__(self, accepted: Accepted, codec: Codec, cancel: Callable[[int], None]) -> None:
        self.request_id = accepted.request_id
        self.prompt_tokens = accepted.prompt_tokens
        #: As the user named it; "" for base.
        self.adapter = accepted.adapter
        #: "" for base.
        self.adapter_digest = accepted.digest
        #: The one in use (drawn where the request had none).
        self.seed = accepted.seed
        #: The one in use (what fits, where the request had none).
        self.max_tokens = accepted.max_tokens
        #: Seconds from acceptance to admission; 0 until admitted.
        self.queue_s = 0.0
        #: How long the row waited for its adapter, milliseconds; 0 until its first delta.
        self.cold_ms = 0.0
        #: Tokens of the prompt that were in the prefix cache; 0 until its first delta.
        self.cached_tokens = 0
        #: Whether the base answers in the adapter's place, as the request allowed.
        self.is_fallback = False
        self._codec = codec
        self._cancel = cancel
        self._text = Detokenizer(codec)
        self._stops = StopStrings(accepted.stop)
        self._deltas: deque[Delta] = deque()
        self._error: RequestError | None = None
        #: Whether a shard has made something of it: what comes again from another is no news.
        self._begun = False
        self._finished = False
        self._news = asyncio.Event()
        self._settled = asyncio.Event()
        if not accepted.may_fall_back:
            self._settled.set()

    @property
    def finished(self) -> bool:
        """Whether nothing more will come: its last delta or its error is there, or it is closed."""
        return self._finished

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Return the deltas; the last has a finish reason. Raises RequestError on failure."""
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._finished:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._deltas.popleft()

    async def settled(self) -> None:
        """Return when it is known who answers: nobody, the adapter, or the base in its place."""
        await self._settled.wait()

    def fall_back(self) -> None:
        """Let the base answer in the adapter's place. Nothing was generated yet."""
        assert not self._begun
        self.adapter = self.adapter_digest = ""
        self.is_fallback = True
        self._settled.set()

    async def aclose(self) -> None:
        """Cancel unless finished. Idempotent."""
        self._deltas.clear()
        if not self._finished:
            self._end()
            self._cancel(self.request_id)

    def belongs_to(self, cancel: Callable[[int], None]) -> None:
        """Tell this owner, from now on, when its reader leaves before the end."""
        self._cancel = cancel

    def fail(self, error: RequestError) -> None:
        """End with an error, after the deltas that are there already."""
        if not self._finished:
            self._error = error
            self._end()

    def accept(self, row: pb.Row) -> None:
        """Take what one step made. Afterwards `finished` tells whether more is wanted.

        A row that goes on on another shard brings the tokens behind those that are here; what
        that shard says of its own first message belongs to no client.
        """
        self._begin(row)
        if self._finished:
            return
        tokens: list[OutToken] = []
        pieces: list[str] = []
        ended_by_token = row.finish_reason == pb.FINISH_REASON_STOP_TOKEN
        last = len(row.tokens) - 1
        for position, token in enumerate(row.tokens):
            tokens.append(self._out(token))
            if not (ended_by_token and position == last):
                pieces.append(self._stops.push(self._text.push(token.id)))
            if self._stops.found:
                break
        reason = self._reason(row)
        if reason is not None and not self._stops.found:
            pieces.append(self._stops.push(self._text.flush()))
        if self._stops.found:
            reason = "stop"
        elif reason is not None:
            pieces.append(self._stops.flush())
        if tokens or reason is not None:
            self._deltas.append(Delta("".join(pieces), tuple(tokens), reason))
            self._news.set()
        if reason is not None:
            self._end()

    def _begin(self, row: pb.Row) -> None:
        if not self._begun:
            self.cold_ms = self.cold_ms or row.cold_ms
            self.cached_tokens = self.cached_tokens or row.cached_tokens
            self._begun = bool(row.tokens)
            if self._begun:
                self._settled.set()

    def _reason(self, row: pb.Row) -> FinishReason | None:
        if row.finish_reason == pb.FINISH_REASON_LENGTH:
            return "length"
        if row.finish_reason == pb.FINISH_REASON_STOP_TOKEN:
            return "eos"
        return None

    def _out(self, token: pb.Token) -> OutToken:
        text = self._codec.text
        top = tuple((t.id, text(t.id), t.logprob) for t in token.top) if token.top else ()
        special = token.id in self._codec.special_ids
        return OutToken(token.id, text(token.id), token.logprob, special, top)

    def _end(self) -> None:
        self._finished = True
        self._settled.set()
        self._news.set()

"""`POST /v1/chat/completions`: the turns of a chat in, the assistant's next turn out."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loralane_router.errors import invalid
from loralane_router.gateway import fields
from loralane_router.gateway.bodies import Neutral, parse, refuse_unsupported
from loralane_router.gateway.failures import Failure
from loralane_router.gateway.generations import Answer, finite, merged
from loralane_router.gateway.jobs import Responder
from loralane_router.gateway.limits import MAX_MESSAGES, MAX_TOP_LOGPROBS, Limits
from loralane_router.gateway.openai import (
    NEUTRAL,
    Envelope,
    OpenAIBody,
    finish_reason,
    generated,
    max_tokens_of,
    nth_parameters,
    parameters,
    text_request,
    usage,
)
from loralane_router.gateway.sse import DONE
from loralane_router.requests import Message, OutToken
from loralane_router.router import Generation, Router

_NEUTRAL: Final[Neutral] = {
    **NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "guideline": ("",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "best_of": (1,),
}
_TURN_NEUTRAL: Final[Neutral] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
}


class Part(msgspec.Struct):
    """A piece of a turn's content; text is the only kind."""

    type: Literal["text"]
    text: str


class Turn(msgspec.Struct):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def message(self) -> Message:
        """Return the router's form; parts are joined by line breaks as vLLM does."""
        if isinstance(self.content, str):
            return Message(self.role, self.content)
        return Message(self.role, "\n".join(part.text for part in self.content))


class ChatBody(OpenAIBody):
    """`POST /v1/chat/completions`."""

    messages: list[Turn] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def parse_chat(body: dict[str, Any]) -> ChatBody:
    """Return the request. Raises RequestError with the name of the field at fault."""
    turns = body.get("messages")
    if not turns:
        raise invalid("messages is required, and not empty", "messages")
    if isinstance(turns, list):
        if len(turns) > MAX_MESSAGES:
            raise invalid(f"messages holds more than {MAX_MESSAGES} turns", "messages")
        for turn in turns:
            if isinstance(turn, dict):
                refuse_unsupported(turn, _TURN_NEUTRAL)
    return parse(body, ChatBody, _NEUTRAL)


def top_logprobs_of(body: ChatBody) -> int | None:
    """Return how many alternatives to show; None = no log-probabilities. Raises RequestError."""
    if body.top_logprobs is None:
        return 0 if body.logprobs else None
    if not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return fields.whole("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)


class ChatJob:
    """One request, checked: what to generate and how to answer. Raises RequestError."""

    clamp = False

    def __init__(self, body: ChatBody, request: Request, router: Router) -> None:
        self.choices = body.choices
        messages = tuple(turn.message() for turn in body.messages or ())
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        maximum = max_tokens_of(field, getattr(body, field), None)
        top = top_logprobs_of(body)
        self.logprobs = top is not None
        common = parameters(body, router, max_tokens=maximum, top_logprobs=top)
        self.requests = [
            text_request(body, request, router, messages, seeded)
            for seeded in nth_parameters(common, self.choices)
        ]
        self.usage = body.streams_usage
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self.envelope = Envelope("chatcmpl", kind, body, router)

    async def frames(self, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
        """Yield the stream's events; every choice starts with its role."""
        count = 0
        started: set[int] = set()
        async with aclosing(merged(generations)) as deltas:
            async for index, delta in deltas:
                if index not in started:
                    started.add(index)
                    role = {"role": "assistant", "content": ""}
                    choice = _choice(index, "delta", role, None, None)
                    yield self.envelope.chunk(choice, generations[index])
                count += len(delta.tokens)
                if not delta.text and not self.logprobs and delta.finish_reason is None:
                    continue
                news = {"content": delta.text} if delta.text else {}
                logprobs = self._logprobs(delta.tokens)
                reason = finish_reason(delta.finish_reason)
                choice = _choice(index, "delta", news, logprobs, reason)
                yield self.envelope.chunk(choice, generations[index])
        if self.usage:
            counts = usage(generations, self.choices, count)
            yield self.envelope.usage_chunk(counts, generations)
        yield DONE

    def answer(self, generations: Sequence[Generation], answers: Sequence[Answer]) -> bytes:
        """Return the whole answer."""
        choices: list[object] = []
        for index, answer in enumerate(answers):
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            logprobs = self._logprobs(answer.tokens)
            reason = finish_reason(answer.finish_reason)
            choices.append(_choice(index, "message", message, logprobs, reason))
        counts = usage(generations, self.choices, generated(answers))
        return self.envelope.complete(choices, counts, generations)

    def _logprobs(self, tokens: Sequence[OutToken]) -> object:
        if not self.logprobs:
            return None
        return {"content": [_token(token) for token in tokens], "refusal": None}


def _token(token: OutToken) -> object:
    chosen = _logprob(token.text, token.logprob)
    top = [_logprob(text, logprob) for _, text, logprob in token.top]
    if top and all(other != token.id for other, _, _ in token.top):
        top.append(chosen)  # as vLLM does: what was drawn is always among them
    return {**chosen, "top_logprobs": top}


def _logprob(text: str, logprob: float) -> dict[str, object]:
    """A token that is only a piece of a character has no bytes that its text could tell."""
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": finite(logprob), "bytes": known}


def _choice(index: int, part: str, content: object, logprobs: object, reason: str | None) -> object:
    return {"index": index, part: content, "logprobs": logprobs, "finish_reason": reason}


def routes(router: Router, limits: Limits) -> list[Route]:
    """Return the routes of this surface."""
    responder = Responder(router, limits, Failure.openai)

    async def create(request: Request) -> Response:
        body = parse_chat(await responder.read(request))
        job = ChatJob(body, request, router)
        return await responder.respond(request, job, stream=bool(body.stream))

    return [Route("/v1/chat/completions", create, methods=["POST"])]

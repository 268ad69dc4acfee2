"""`POST /v1/completions`: text or token ids in, one or more continuations out."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loralane_router.errors import invalid
from loralane_router.gateway import fields
from loralane_router.gateway.bodies import parse
from loralane_router.gateway.failures import Failure
from loralane_router.gateway.generations import Answer, finite, merged
from loralane_router.gateway.jobs import Responder
from loralane_router.gateway.limits import MAX_CHOICES, MAX_TOP_LOGPROBS, Limits
from loralane_router.gateway.openai import (
    NEUTRAL,
    Envelope,
    OpenAIBody,
    finish_reason,
    generated,
    max_tokens_of,
    nth_parameters,
    parameters,
    refuse_too_many,
    text_request,
    usage,
)
from loralane_router.gateway.sse import DONE
from loralane_router.requests import OutToken
from loralane_router.router import Generation, Router

_DEFAULT_MAX_TOKENS: Final = 16

Prompt = str | tuple[int, ...]


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


_NEUTRAL: Final = {**NEUTRAL, "suffix": ("",)}


def prompts_of(body: CompletionBody, vocab_size: int) -> list[Prompt]:
    """Return the prompts: one, or a list of one kind. Raises RequestError naming `prompt`."""
    given = body.prompt
    if isinstance(given, str):
        found: list[Prompt] = [given]
    elif not given:
        raise invalid("prompt is required: text, token ids, or a list of either", "prompt")
    elif isinstance(given[0], int):
        found = [_ids(given, vocab_size)]
    else:
        text = isinstance(given[0], str)
        if any(isinstance(prompt, str) is not text for prompt in given):
            raise invalid("prompt mixes text and token ids", "prompt")
        found = [p if isinstance(p, str) else _ids(p, vocab_size) for p in given]
    if not all(found):
        raise invalid("prompt must not be empty", "prompt")
    return found


def _ids(given: object, vocab_size: int) -> tuple[int, ...]:
    ids = tuple(given) if isinstance(given, list) else ()
    if not set(map(type, ids)) <= {int}:
        raise invalid("prompt mixes text and token ids", "prompt")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise invalid(f"prompt holds token ids outside of 0 to {vocab_size - 1}", "prompt")
    return ids


class CompletionJob:
    """One request, checked: what to generate and how to answer. Raises RequestError."""

    def __init__(self, body: CompletionBody, request: Request, router: Router) -> None:
        self.choices = body.choices
        if body.best_of is not None and body.best_of != self.choices:
            raise invalid("best_of is not supported beyond n; leave it out", "best_of")
        prompts = prompts_of(body, router.info.vocab_size)
        refuse_too_many(len(prompts), self.choices, MAX_CHOICES)
        self.logprobs = body.logprobs
        if body.logprobs is not None:
            fields.whole("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
        self.echo = [_echo(prompt, body) for prompt in prompts for _ in range(self.choices)]
        maximum = max_tokens_of("max_tokens", body.max_tokens, _DEFAULT_MAX_TOKENS)
        self.clamp = body.max_tokens is None
        common = parameters(body, router, max_tokens=maximum, top_logprobs=body.logprobs)
        self.requests = [
            text_request(body, request, router, prompt, seeded)
            for prompt in prompts
            for seeded in nth_parameters(common, self.choices)
        ]
        self.usage = body.streams_usage
        self.envelope = Envelope("cmpl", "text_completion", body, router)

    async def frames(self, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
        """Yield the stream's events."""
        texts = list(self.echo)
        offsets = [0] * len(generations)
        count = 0
        async with aclosing(merged(generations)) as deltas:
            async for index, delta in deltas:
                count += len(delta.tokens)
                text, texts[index] = texts[index] + delta.text, ""
                if not text and self.logprobs is None and delta.finish_reason is None:
                    continue
                logprobs, offsets[index] = self._logprobs(delta.tokens, offsets[index])
                reason = finish_reason(delta.finish_reason)
                choice = _choice(index, text, logprobs, reason)
                yield self.envelope.chunk(choice, generations[index])
        if self.usage:
            counts = usage(generations, self.choices, count)
            yield self.envelope.usage_chunk(counts, generations)
        yield DONE

    def answer(self, generations: Sequence[Generation], answers: Sequence[Answer]) -> bytes:
        """Return the whole answer."""
        choices: list[object] = []
        for index, answer in enumerate(answers):
            logprobs, _ = self._logprobs(answer.tokens, 0)
            text = self.echo[index] + answer.text
            choices.append(_choice(index, text, logprobs, finish_reason(answer.finish_reason)))
        counts = usage(generations, self.choices, generated(answers))
        return self.envelope.complete(choices, counts, generations)

    def _logprobs(self, tokens: Sequence[OutToken], offset: int) -> tuple[object, int]:
        """Return OpenAI's four parallel lists and the offset behind these tokens, in characters."""
        if self.logprobs is None:
            return None, offset
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += 0 if token.special else len(token.text)
        table = {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }
        return table, offset


def _echo(prompt: Prompt, body: CompletionBody) -> str:
    if not body.echo:
        return ""
    if body.logprobs is not None:
        raise invalid("logprobs of an echoed prompt are not supported", "logprobs")
    if not isinstance(prompt, str):
        raise invalid("echo needs a prompt of text", "echo")
    return prompt


def _top(token: OutToken) -> dict[str, float]:
    """Alternatives by text; the sampled token is among them, and wins where texts are equal."""
    top: dict[str, float] = {}
    for _, text, logprob in token.top:
        top.setdefault(text, finite(logprob))
    top[token.text] = finite(token.logprob)
    return top


def _choice(index: int, text: str, logprobs: object, reason: str | None) -> object:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def routes(router: Router, limits: Limits) -> list[Route]:
    """Return the routes of this surface."""
    responder = Responder(router, limits, Failure.openai)

    async def create(request: Request) -> Response:
        body = parse(await responder.read(request), CompletionBody, _NEUTRAL)
        job = CompletionJob(body, request, router)
        return await responder.respond(request, job, stream=bool(body.stream))

    return [Route("/v1/completions", create, methods=["POST"])]

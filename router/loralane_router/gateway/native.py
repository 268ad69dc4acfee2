"""LoRAX's and TGI's routes, for lorax-client and huggingface_hub's InferenceClient.

The clients disagree: lorax-client reads an array at `/`, LiteLLM an object at `/generate`, and none
of them may see `[DONE]` or an `error` key in a success. The texts of a stream's tokens, joined, are
its answer, whether or not the client skips special tokens.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loralane_router.gateway.bodies import parse, read_json
from loralane_router.gateway.failures import Failure
from loralane_router.gateway.generations import Answer, finite, merged
from loralane_router.gateway.jobs import Responder
from loralane_router.gateway.limits import MAX_STOPS, Limits
from loralane_router.gateway.native_bodies import (
    NativeBody,
    alternatives_of,
    parse_native,
    text_request,
)
from loralane_router.gateway.sse import event
from loralane_router.requests import Delta, FinishReason, OutToken
from loralane_router.router import Generation, Router

_FINISH: Final[dict[FinishReason, str]] = {
    "length": "length",
    "eos": "eos_token",
    "stop": "stop_sequence",
}
#: Stands for text that comes without a token.
_HELD_BACK: Final = OutToken(id=0, text="", logprob=0.0, special=True)


class NativeJob:
    """One request, checked: what to generate and how to answer. Raises RequestError."""

    def __init__(
        self, body: NativeBody, request: Request, router: Router, *, as_array: bool
    ) -> None:
        self.requests = [text_request(body, request, router)]
        self.clamp = body.given.max_new_tokens is None
        self._prefix = body.inputs if body.given.return_full_text else ""
        self._details = bool(body.given.details)
        self._alternatives = alternatives_of(body.given) > 0
        self._as_array = as_array

    async def frames(self, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
        """Yield one event a token; the last has the whole text and the details."""
        text, index, count = "", 0, 0
        async with aclosing(merged(generations)) as deltas:
            async for _, delta in deltas:
                text += delta.text
                count += len(delta.tokens)
                shown = pieces(delta)
                for token, piece in shown[:-1]:
                    index += 1
                    yield _event(index, self._token(token, piece), None, None)
                if not shown:
                    continue
                index += 1
                last = self._token(*shown[-1])
                if delta.finish_reason is None:
                    yield _event(index, last, None, None)
                else:
                    summary = _summary(generations[0], delta.finish_reason, count)
                    details = summary if self._details else None
                    yield _event(index, last, self._prefix + text, details)

    def answer(self, generations: Sequence[Generation], answers: Sequence[Answer]) -> bytes:
        """Return the whole answer."""
        answer = answers[0]
        body: dict[str, object] = {"generated_text": self._prefix + answer.text}
        if self._details:
            shown = [pair for delta in answer.deltas for pair in pieces(delta)]
            body["details"] = {
                **_summary(generations[0], answer.finish_reason, len(answer.tokens)),
                "prefill": [],
                "tokens": [self._token(token, piece) for token, piece in shown],
            }
        return msgspec.json.encode([body] if self._as_array else body)

    def _token(self, token: OutToken, piece: str) -> dict[str, object]:
        shown: dict[str, object] = {
            "id": token.id,
            "text": piece,
            "logprob": finite(token.logprob),
            # Clients drop the text of special tokens; text that was held back is not theirs.
            "special": token.special and not piece,
            "skipped": False,
        }
        if self._alternatives:
            shown["alternative_tokens"] = [
                {"id": other, "text": text, "logprob": finite(logprob)}
                for other, text, logprob in token.top
            ]
        return shown


def pieces(delta: Delta) -> list[tuple[OutToken, str]]:
    """Return the delta's tokens, each with its share of the delta's text.

    Each gets its own text where these add up; where text was held back or cut, all of it goes to
    the last token. Text that comes without a token gets one that stands for it.
    """
    if not delta.tokens:
        return [(_HELD_BACK, delta.text)] if delta.text or delta.finish_reason else []
    own = ["" if token.special else token.text for token in delta.tokens]
    if "".join(own) != delta.text:
        own = [""] * (len(own) - 1) + [delta.text]
    return list(zip(delta.tokens, own, strict=True))


def _event(index: int, token: object, text: str | None, details: object) -> bytes:
    return event({"index": index, "token": token, "generated_text": text, "details": details})


def _summary(generation: Generation, reason: FinishReason, count: int) -> dict[str, object]:
    """The details that streams and complete answers share; `input_length` is TGI's name."""
    return {
        "finish_reason": _FINISH[reason],
        "prompt_tokens": generation.prompt_tokens,
        "input_length": generation.prompt_tokens,
        "generated_tokens": count,
        "skipped_tokens": 0,
        "seed": generation.seed,
    }


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`."""

    inputs: str


def routes(router: Router, limits: Limits) -> list[Route]:
    """Return the routes of this surface."""
    responder = Responder(router, limits, Failure.native)

    async def generate(request: Request, *, as_array: bool, stream: bool = False) -> Response:
        body = parse_native(await responder.read(request))
        body.stream = body.stream or stream
        job = NativeJob(body, request, router, as_array=as_array)
        return await responder.respond(request, job, stream=body.stream)

    async def array(request: Request) -> Response:
        return await generate(request, as_array=True)

    async def single(request: Request) -> Response:
        return await generate(request, as_array=False)

    async def streamed(request: Request) -> Response:
        return await generate(request, as_array=False, stream=True)

    async def tokenize(request: Request) -> Response:
        body = parse(await read_json(request, limits), TokenizeBody, {})
        rows = [
            {"id": token, "text": text, "start": start, "stop": stop}
            for token, text, start, stop in router.tokenize(body.inputs)
        ]
        return Response(msgspec.json.encode(rows), media_type="application/json")

    async def info(_: Request) -> Response:
        return Response(msgspec.json.encode(describe(router)), media_type="application/json")

    return [
        Route("/", array, methods=["POST"]),
        Route("/invocations", array, methods=["POST"]),
        Route("/generate", single, methods=["POST"]),
        Route("/generate_stream", streamed, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/info", info, methods=["GET"]),
    ]


def describe(router: Router) -> dict[str, object]:
    """Return LoRAX's `/info`; null where it names something that does not exist here."""
    info = router.info
    return {
        "model_id": info.model_id,
        "model_sha": None,
        "model_dtype": info.dtype,
        "model_device_type": info.device,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": router.config.max_queue,
        "max_best_of": 1,
        "max_stop_sequences": MAX_STOPS,
        "max_input_length": info.max_model_len - 1,
        "max_total_tokens": info.max_model_len,
        "capacity": router.capacity,
        "version": info.version,
        "sha": None,
        "docker_label": None,
    }

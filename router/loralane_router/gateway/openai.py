"""What completions and chat share: common fields, adapter and token of a request, envelopes."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final, Literal

import msgspec
from starlette.requests import Request

from loralane_router.errors import invalid
from loralane_router.gateway import fields
from loralane_router.gateway.bodies import Neutral, bearer, hub_key
from loralane_router.gateway.generations import Answer, any_fallback
from loralane_router.gateway.limits import MAX_N
from loralane_router.gateway.sse import one_line
from loralane_router.requests import (
    AdapterWaitPolicy,
    FinishReason,
    Message,
    Parameters,
    TextRequest,
)
from loralane_router.router import Generation, Router

#: Fields of OpenAI, vLLM and LoRAX that would change the answer, and what they may hold.
NEUTRAL: Final[Neutral] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "logits_processors": ([],),
    "merged_adapters": (),
}

#: Clients that cannot leave `model` out send these for "whatever you serve" (huggingface_hub, TGI's
#: examples); they mean the base unless an adapter has the name.
_WHATEVER: Final = ("dummy", "tgi")


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class OpenAIBody(msgspec.Struct):
    """The fields that completions and chat share; null means not given."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    #: JSON's keys are strings.
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    #: vLLM's and LoRAX's name of the same.
    ignore_eos: bool | None = None
    ignore_eos_token: bool | None = None
    #: LoRAX: names the adapter in place of `model`.
    adapter_id: str | None = None
    adapter_source: Literal["hub", "local"] | None = None
    api_token: str | None = msgspec.field(default=None)
    #: As vLLM: lower goes first.
    priority: int | None = None
    max_wait_for_adapter_ms: int | None = None
    adapter_wait_policy: AdapterWaitPolicy | None = None

    @property
    def choices(self) -> int:
        """The number of choices of each prompt. Raises RequestError."""
        return 1 if self.n is None else fields.whole("n", self.n, 1, MAX_N)

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def parameters(
    body: OpenAIBody, router: Router, *, max_tokens: int | None, top_logprobs: int | None
) -> Parameters:
    """Return the checked parameters; `top_logprobs` None = no log-probabilities at all."""
    return Parameters(
        max_tokens=max_tokens,
        temperature=fields.temperature(body.temperature),
        top_k=fields.top_k(body.top_k, router.info.vocab_size),
        top_p=fields.top_p(body.top_p),
        seed=fields.seed(body.seed),
        logit_bias=fields.logit_bias(body.logit_bias, router.info.vocab_size),
        stop=fields.stops(body.stop),
        ignore_eos=bool(body.ignore_eos or body.ignore_eos_token),
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
    )


def nth_parameters(first: Parameters, choices: int) -> list[Parameters]:
    """Return the parameters of each choice of one prompt: their seeds follow one another."""
    others = range(1, choices)
    return [first, *(replace(first, seed=fields.nth_seed(first.seed, n)) for n in others)]


def max_tokens_of(field: str, value: int | None, default: int | None) -> int | None:
    """Return the bound on generated tokens. Raises RequestError."""
    return default if value is None else fields.whole(field, value, 1)


def adapter_of(body: OpenAIBody, router: Router) -> str:
    """Return the adapter that a request names; "" = base."""
    if body.adapter_id is not None:
        return fields.name("adapter_id", body.adapter_id)
    model = fields.name("model", body.model or "")
    if model in _WHATEVER and router.adapter(model) is None:
        return ""
    return model


def text_request(
    body: OpenAIBody,
    request: Request,
    router: Router,
    prompt: str | tuple[int, ...] | tuple[Message, ...],
    parameters: Parameters,
) -> TextRequest:
    """Return what the router is asked for one choice. Raises RequestError.

    A bearer key is the caller's; where it looks like a hub token it is the adapter's as well.
    """
    return TextRequest(
        adapter=adapter_of(body, router),
        prompt=prompt,
        parameters=parameters,
        token=body.api_token or hub_key(request),
        key=bearer(request),
        priority=fields.priority(body.priority),
        max_wait_for_adapter_s=fields.adapter_wait_s(body.max_wait_for_adapter_ms),
        adapter_wait_policy=body.adapter_wait_policy or "fail",
    )


def finish_reason(reason: FinishReason | None) -> str | None:
    """Return OpenAI's word for why a choice ended."""
    return "stop" if reason in ("eos", "stop") else reason


def usage(generations: Sequence[Generation], choices: int, completion_tokens: int) -> object:
    """Return the token counts; each prompt counts once, however many choices it has.

    So do its tokens that were cached: those that its first choice found there.
    """
    prompts = generations[::choices]
    prompt_tokens = sum(generation.prompt_tokens for generation in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(generation.cached_tokens for generation in prompts)
        },
    }


def generated(answers: Sequence[Answer]) -> int:
    """Return the number of tokens of all answers."""
    return sum(len(answer.tokens) for answer in answers)


class Envelope:
    """The fields that an answer and all its chunks share; encoded once, by a stream's first.

    `model` is what the client called it, but the base's id where the base answers in an adapter's
    place.
    """

    def __init__(self, prefix: str, kind: str, body: OpenAIBody, router: Router) -> None:
        self._prefix, self._kind = prefix, kind
        self._base = router.info.model_id
        self._model = body.model or self._base
        self._created = int(time.time())
        self._tail = b'],"usage":null}\n\n' if body.streams_usage else b"]}\n\n"

    def chunk(self, choice: object, generation: Generation) -> bytes:
        """Return the event that carries one choice's news."""
        head = self._fallback_head if generation.is_fallback else self._head
        return head + one_line(choice) + self._tail

    def usage_chunk(self, counts: object, generations: Sequence[Generation]) -> bytes:
        """Return the event that carries the token counts and no choice."""
        head = self._fallback_head if any_fallback(generations) else self._head
        return head + b'],"usage":' + one_line(counts) + b"}\n\n"

    def complete(
        self, choices: list[object], counts: object, generations: Sequence[Generation]
    ) -> bytes:
        """Return a whole answer; it is the base's as soon as one of its choices is."""
        common = self._fallback if any_fallback(generations) else self._fields
        return msgspec.json.encode(common | {"choices": choices, "usage": counts})

    @cached_property
    def _fields(self) -> dict[str, object]:
        return {
            "id": f"{self._prefix}-{secrets.token_hex(16)}",
            "object": self._kind,
            "created": self._created,
            "model": self._model,
        }

    @property
    def _fallback(self) -> dict[str, object]:
        return self._fields | {"model": self._base}

    @cached_property
    def _head(self) -> bytes:
        return _head(self._fields)

    @cached_property
    def _fallback_head(self) -> bytes:
        return _head(self._fallback)


def _head(fields: Mapping[str, object]) -> bytes:
    return b"data: " + one_line(fields)[:-1] + b',"choices":['


def refuse_too_many(prompts: int, choices: int, most: int) -> None:
    """Raise RequestError when one request asks for more choices than one may."""
    if prompts * choices > most:
        raise invalid(f"prompts times n must be at most {most}, not {prompts * choices}", "prompt")

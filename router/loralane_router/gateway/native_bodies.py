"""What LoRAX's and TGI's clients send: explicit nulls, and fields that mean other things together.

Tokens are sampled when `do_sample` is set or any of temperature, top_k and top_p asks for it (as
TGI does), else the most probable one is taken.
"""

from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request

from loralane_router.errors import invalid
from loralane_router.gateway import fields
from loralane_router.gateway.bodies import Neutral, bearer, parse, refuse_unsupported
from loralane_router.gateway.limits import MAX_TOP_LOGPROBS
from loralane_router.gateway.merges import MergedAdapters, merge_of
from loralane_router.requests import AdapterWaitPolicy, Parameters, TextRequest
from loralane_router.router import Router

#: TGI's and LoRAX's.
_DEFAULT_MAX_NEW_TOKENS: Final = 20

_NEUTRAL: Final[Neutral] = {
    "subfolder": (),
    "best_of": (1,),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "typical_p": (1,),
    "watermark": (False,),
    "decoder_input_details": (False,),
    "response_format": ({"type": "text"},),
    "grammar": (),
    "top_n_tokens": (0,),
}


class NativeParameters(msgspec.Struct):
    """`parameters`; null means not given."""

    adapter_id: str | None = None
    merged_adapters: MergedAdapters | None = None
    adapter_source: Literal["hub", "local"] | None = None
    api_token: str | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    ignore_eos_token: bool | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    truncate: int | None = None
    details: bool | None = None
    return_k_alternatives: int | None = None
    #: As vLLM: lower goes first.
    priority: int | None = None
    max_wait_for_adapter_ms: int | None = None
    adapter_wait_policy: AdapterWaitPolicy | None = None


class NativeBody(msgspec.Struct):
    """`POST /`, `/generate`, `/generate_stream`."""

    inputs: str
    parameters: NativeParameters | None = None
    stream: bool | None = None

    @property
    def given(self) -> NativeParameters:
        """The parameters, all null where there are none."""
        return self.parameters or NativeParameters()


def parse_native(body: dict[str, Any]) -> NativeBody:
    """Return the request. Raises RequestError with the name of the field at fault."""
    given = body.get("parameters")
    if isinstance(given, dict):
        refuse_unsupported(given, _NEUTRAL)
    parsed = parse(body, NativeBody, {})
    if not parsed.inputs:
        raise invalid("inputs must not be empty", "inputs")
    return parsed


def text_request(body: NativeBody, request: Request, router: Router) -> TextRequest:
    """Return what the router is asked. Raises RequestError.

    A bearer key is the caller's and, as LoRAX has it, the hub token of the adapter.
    """
    given = body.given
    adapter = fields.name("adapter_id", given.adapter_id or "")
    return TextRequest(
        adapter=adapter,
        prompt=body.inputs,
        parameters=_parameters(body, router),
        token=given.api_token or bearer(request),
        merge=merge_of(given.merged_adapters, adapter),
        key=bearer(request),
        priority=fields.priority(given.priority),
        max_wait_for_adapter_s=fields.adapter_wait_s(given.max_wait_for_adapter_ms),
        adapter_wait_policy=given.adapter_wait_policy or "fail",
    )


def alternatives_of(given: NativeParameters) -> int:
    """Return how many alternatives each token carries. Raises RequestError."""
    if given.return_k_alternatives is None:
        return 0
    return fields.whole("return_k_alternatives", given.return_k_alternatives, 1, MAX_TOP_LOGPROBS)


def _parameters(body: NativeBody, router: Router) -> Parameters:
    given = body.given
    maximum = given.max_new_tokens
    truncate = given.truncate
    top_k = fields.top_k(given.top_k, router.info.vocab_size)
    top_p = fields.top_p(given.top_p)
    asked = given.do_sample or given.temperature not in (None, 1.0) or top_k > 0 or top_p < 1.0
    temperature = fields.temperature(given.temperature)
    return Parameters(
        max_tokens=fields.whole(
            "max_new_tokens", _DEFAULT_MAX_NEW_TOKENS if maximum is None else maximum, 1
        ),
        temperature=temperature if asked else 0.0,
        top_k=top_k,
        top_p=top_p,
        seed=fields.seed(given.seed),
        stop=fields.stops(given.stop),
        ignore_eos=bool(given.ignore_eos_token),
        logprobs=bool(given.details or body.stream),
        top_logprobs=alternatives_of(given),
        truncate=None if truncate is None else fields.whole("truncate", truncate, 1),
    )

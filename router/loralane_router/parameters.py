"""Whether a request's parameters can be served, how long it may be, and its wire form."""

import math
from collections.abc import Sequence
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.errors import invalid
from loralane_router.model import ModelInfo
from loralane_router.requests import Parameters, TextRequest
from loralane_router.text.generation import Accepted

#: Priorities are this far from 0 at most.
MOST_PRIORITY: Final = 1_000_000
#: An hour: who waits longer for an adapter need not say how long.
LONGEST_ADAPTER_WAIT_MS: Final = 3_600_000
_UINT32: Final = 2**32
_UINT64: Final = 2**64
_MOST_TOP_LOGPROBS: Final = 20


def check(parameters: Parameters) -> None:
    """Raise RequestError (400) naming the first parameter that no model could honour."""
    p = parameters
    rules = (
        ("max_tokens", p.max_tokens is None or p.max_tokens >= 1, "at least 1"),
        ("temperature", math.isfinite(p.temperature) and p.temperature >= 0, "finite, at least 0"),
        ("top_k", 0 <= p.top_k < _UINT32, "at least 0 (0 = off)"),
        ("top_p", 0 < p.top_p <= 1, "above 0 and at most 1 (1 = off)"),
        ("seed", p.seed is None or 0 <= p.seed < _UINT64, "between 0 and 2^64 - 1"),
        ("stop", all(p.stop), "texts of at least one character"),
        ("top_logprobs", 0 <= p.top_logprobs <= _MOST_TOP_LOGPROBS, "between 0 and 20"),
        ("truncate", p.truncate is None or p.truncate >= 1, "at least 1"),
    )
    for name, holds, rule in rules:
        if not holds:
            raise invalid(f"{name} must be {rule}, not {getattr(p, name)!r}", name)


def check_waiting(request: TextRequest) -> None:
    """Raise RequestError (400) naming what a request says of waiting and no router could do."""
    if abs(request.priority) > MOST_PRIORITY:
        raise invalid(
            f"priority must be between -{MOST_PRIORITY} and {MOST_PRIORITY}, "
            f"not {request.priority}",
            "priority",
        )
    wait_s, longest_s = request.max_wait_for_adapter_s, LONGEST_ADAPTER_WAIT_MS / 1000
    if wait_s is not None and not 0 < wait_s <= longest_s:
        raise invalid(
            f"max_wait_for_adapter_ms must be between 1 and {LONGEST_ADAPTER_WAIT_MS}, "
            f"not {wait_s * 1000:g}",
            "max_wait_for_adapter_ms",
        )


def fit(prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Return how many tokens to generate at most.

    Raises RequestError (400) with the numbers where the prompt, or the two together, are too long.
    """
    if prompt_tokens == 0:
        raise invalid("the prompt has no tokens; send at least one character", "prompt")
    room = max_model_len - prompt_tokens
    if room < 1:
        raise invalid(
            f"the prompt has {prompt_tokens} tokens and this model takes {max_model_len}, of which "
            "one at least must be left to generate; shorten the prompt",
            "prompt",
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise invalid(
            f"the prompt's {prompt_tokens} tokens and max_tokens {max_tokens} are together "
            f"{prompt_tokens + max_tokens}, but this model takes {max_model_len}; ask for at most "
            f"{room} or shorten the prompt",
            "max_tokens",
        )
    return max_tokens


def admission_of(
    accepted: Accepted, parameters: Parameters, prompt: Sequence[int], info: ModelInfo
) -> pb.Admission:
    """Return the wire form of a request that was accepted."""
    return pb.Admission(
        request_id=accepted.request_id,
        digest=accepted.digest,
        prompt=prompt,
        max_tokens=accepted.max_tokens,
        stop_token_ids=() if parameters.ignore_eos else info.eos_token_ids,
        sampling=sampling(parameters, accepted.seed),
        want_logprobs=parameters.logprobs,
        top_logprobs=parameters.top_logprobs,
    )


def sampling(parameters: Parameters, seed: int) -> pb.Sampling:
    """Return the wire form of checked parameters."""
    return pb.Sampling(
        temperature=parameters.temperature,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        seed=seed,
        logit_bias=dict(parameters.logit_bias),
    )

"""Checks of single fields, the same on every surface. Each raises RequestError naming its field."""

from collections.abc import Mapping, Sequence
from typing import Final

from loralane_router.errors import invalid
from loralane_router.gateway.limits import MAX_BIASES, MAX_NAME_CHARS, MAX_STOP_CHARS, MAX_STOPS
from loralane_router.parameters import LONGEST_ADAPTER_WAIT_MS, MOST_PRIORITY

_INT32: Final = 2**31 - 1
_UINT64: Final = 2**64
#: Below it a float32 softmax is an argmax.
_GREEDY_BELOW: Final = 1e-5
_HOTTEST: Final = 100.0
#: OpenAI's bounds.
_STRONGEST_BIAS: Final = 100.0


def whole(field: str, value: int, low: int, high: int = _INT32) -> int:
    """Return `value` if it lies in [low, high]."""
    if not low <= value <= high:
        bound = f"at least {low}" if high == _INT32 else f"between {low} and {high}"
        raise invalid(f"{field} must be {bound}, not {value}", field)
    return value


def temperature(value: float | None) -> float:
    """Return the temperature; None = 1, and what is too small to matter = 0 (greedy)."""
    if value is None:
        return 1.0
    if not 0.0 <= value <= _HOTTEST:
        raise invalid(f"temperature must be between 0 and {_HOTTEST:g}, not {value}", "temperature")
    return value if value >= _GREEDY_BELOW else 0.0


def top_p(value: float | None) -> float:
    """Return top_p; None = 1 = off."""
    if value is None:
        return 1.0
    if not 0.0 < value <= 1.0:
        raise invalid(f"top_p must be above 0 and at most 1, not {value}", "top_p")
    return value


def top_k(value: int | None, vocab_size: int) -> int:
    """Return top_k; None, 0 and -1 = 0 = off."""
    if value is None or value == -1:
        return 0
    return min(whole("top_k", value, 0), vocab_size)


def seed(value: int | None) -> int | None:
    """Return the seed as an unsigned number of 64 bits; signed ones are mapped one to one."""
    if value is None:
        return None
    if not -_UINT64 // 2 <= value < _UINT64:
        raise invalid(f"seed must fit into 64 bits, not {value}", "seed")
    return value % _UINT64


def logit_bias(value: Mapping[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) of each entry; ids of the vocabulary, biases from -100 to 100."""
    if not value:
        return ()
    if len(value) > MAX_BIASES:
        raise invalid(f"logit_bias may hold at most {MAX_BIASES} tokens", "logit_bias")
    for key, bias in value.items():
        if not key.isascii() or not key.isdecimal() or int(key) >= vocab_size:
            raise invalid(
                f"logit_bias: {key[:40]!r} is no token id below {vocab_size}", "logit_bias"
            )
        if not -_STRONGEST_BIAS <= bias <= _STRONGEST_BIAS:
            raise invalid(f"logit_bias must lie between -100 and 100, not {bias}", "logit_bias")
    return tuple({int(key): bias for key, bias in value.items()}.items())


def nth_seed(first: int | None, index: int) -> int | None:
    """Return the seed of the choice `index` of one prompt."""
    return None if first is None else (first + index) % _UINT64


def stops(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings."""
    found = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(found) > MAX_STOPS:
        raise invalid(f"stop may hold at most {MAX_STOPS} strings, not {len(found)}", "stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in found):
        raise invalid(f"a stop string has 1 to {MAX_STOP_CHARS} characters", "stop")
    return found


def priority(value: int | None) -> int:
    """Return the priority; lower goes first, None = 0."""
    return 0 if value is None else whole("priority", value, -MOST_PRIORITY, MOST_PRIORITY)


def adapter_wait_s(value: int | None) -> float | None:
    """Return how many seconds a request waits for its adapter; None = as long as it takes."""
    if value is None:
        return None
    return whole("max_wait_for_adapter_ms", value, 1, LONGEST_ADAPTER_WAIT_MS) / 1000


def name(field: str, value: str) -> str:
    """Return an adapter's name or reference if its length is sane."""
    if len(value) > MAX_NAME_CHARS:
        raise invalid(f"{field} is longer than {MAX_NAME_CHARS} characters", field)
    return value

"""From the times of tokens to throughput and latency. Pure functions; seconds in, seconds out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import msgspec

from bench.stream import Stream, StreamFailed


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: when it was sent, when each event with text came, and the server's counts."""

    sent: float
    events: tuple[float, ...]
    prompt_tokens: int
    tokens: int

    @property
    def first(self) -> float:
        """Time to first token."""
        return self.events[0] - self.sent

    @property
    def tokens_of_an_event(self) -> float:
        """More than 1 where the server holds back tokens that end inside a character."""
        return self.tokens / len(self.events)


def timing(stream: Stream) -> Timing:
    """Read a completions stream that ends with its usage. Raises StreamFailed."""
    times: list[float] = []
    usage: _Usage | None = None
    for at, data in stream.events:
        try:
            event = msgspec.json.decode(data, type=_Event)
        except msgspec.MsgspecError as exc:
            raise StreamFailed(f"not an event of a completion: {data[:200]!r}") from exc
        if event.choices:
            times.append(at)
        usage = event.usage or usage
    if usage is None or not times:
        raise StreamFailed(f"the stream ended without text or usage: {stream.events[-1:]}")
    return Timing(stream.sent, tuple(times), usage.prompt_tokens, usage.completion_tokens)


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that were measured together, summed up; rates in tokens per second."""

    tokens: int
    prompt_tokens: int
    tokens_of_an_event: float
    #: All generated tokens, from the first request sent to the last token.
    end_to_end: float
    #: From the moment when every request has its first token; 0 if none came after that.
    decode: float
    first_p50: float
    first_p99: float
    between_p50: float
    between_p99: float


def sum_up(timings: Sequence[Timing]) -> Round:
    """Return one round's figures."""
    tokens = sum(t.tokens for t in timings)
    end = max(t.events[-1] for t in timings)
    firsts = [t.first for t in timings]
    between = [gap for t in timings for gap in gaps(t)]
    return Round(
        tokens=tokens,
        prompt_tokens=sum(t.prompt_tokens for t in timings),
        tokens_of_an_event=tokens / sum(len(t.events) for t in timings),
        end_to_end=tokens / (end - min(t.sent for t in timings)),
        decode=decode_rate(timings),
        first_p50=percentile(firsts, 0.5),
        first_p99=percentile(firsts, 0.99),
        between_p50=percentile(between, 0.5),
        between_p99=percentile(between, 0.99),
    )


def decode_rate(timings: Sequence[Timing]) -> float:
    """Return tokens per second after everybody's first token: no prefill is in it."""
    begin = max(t.events[0] for t in timings)
    end = max(t.events[-1] for t in timings)
    later = sum(sum(at > begin for at in t.events) * t.tokens_of_an_event for t in timings)
    return later / (end - begin) if end > begin else 0.0


def gaps(timing: Timing) -> Iterator[float]:
    """Yield the times between a request's events."""
    return (later - earlier for earlier, later in pairwise(timing.events))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(ceil(share * len(ordered)), 1) - 1] if ordered else 0.0

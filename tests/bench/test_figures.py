"""Throughput and latency from times that can be added up by hand."""

import json

import pytest

from bench.figures import Timing, decode_rate, percentile, sum_up, timing
from bench.stream import Stream, StreamFailed


def event(text: str | None = None, usage: tuple[int, int] | None = None) -> bytes:
    choices = [] if text is None else [{"text": text}]
    counts = usage and {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return json.dumps({"choices": choices, "usage": counts}).encode()


def test_a_stream_gives_the_times_of_its_text_and_the_servers_counts():
    stream = Stream(1.0, ((1.5, event("a")), (2.0, event("b")), (2.0, event(usage=(3, 2)))))

    got = timing(stream)

    assert got == Timing(1.0, (1.5, 2.0), 3, 2)
    assert got.first == 0.5


@pytest.mark.parametrize(
    "events",
    [
        ((1.5, event("a")),),
        ((1.5, event(usage=(3, 2))),),
        ((1.5, b'{"choices": "no"}'),),
        (),
    ],
)
def test_a_stream_without_text_usage_or_sense_fails(events):
    with pytest.raises(StreamFailed):
        timing(Stream(1.0, events))


def test_decoding_is_measured_from_the_moment_when_all_have_their_first_token():
    early = Timing(0.0, (1.0, 2.0, 3.0), 4, 3)
    late = Timing(0.0, (2.0, 4.0), 4, 2)

    assert decode_rate([early, late]) == (1 + 1) / 2.0


def test_events_that_hold_several_tokens_count_as_several():
    held_back = Timing(0.0, (1.0, 3.0), 4, 6)

    assert decode_rate([held_back]) == 3 / 2.0


def test_one_token_each_leaves_nothing_to_decode():
    assert decode_rate([Timing(0.0, (1.0,), 4, 1)]) == 0.0


def test_a_round_adds_up_its_requests():
    got = sum_up([Timing(0.0, (1.0, 2.0, 3.0), 4, 3), Timing(1.0, (4.0, 5.0), 4, 2)])

    assert (got.tokens, got.prompt_tokens) == (5, 8)
    assert got.end_to_end == 5 / 5.0
    assert (got.first_p50, got.first_p99) == (1.0, 3.0)
    assert (got.between_p50, got.between_p99) == (1.0, 1.0)


def test_percentiles_are_values_that_occurred():
    values = [float(v) for v in range(100, 0, -1)]

    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([], 0.5) == 0.0

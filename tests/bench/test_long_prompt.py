"""What a long prompt may cost the streams beside it."""

import json

import pytest

from bench.long_prompt import Asking, Measured, NotCached, cached_tokens, promises
from bench.stream import Client, Server, Stream
from bench.windows import Comparison, Gaps


def prompt(quiet_p99: float, p99: float, largest: float) -> Comparison:
    quiet, storm = Gaps(9, 0.1, quiet_p99, quiet_p99), Gaps(9, 0.1, p99, largest)
    return Comparison(quiet, storm, p99 / quiet_p99, 1.0, 1.0)


def usage(**details: int) -> Stream:
    event = {"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens_details": details}}
    return Stream(0.0, ((1.0, b'{"choices": [{"text": "x"}]}'), (1.0, json.dumps(event).encode())))


def test_the_middle_of_the_prompts_is_judged_and_the_longest_gap_of_all_is_told():
    prompts = (prompt(0.1, 0.2, 0.3), prompt(0.1, 0.5, 0.9), prompt(0.3, 0.3, 0.3))
    measured = Measured(512, 0.25, 0.1, 1.0, 2.0, prompts)

    assert (measured.quiet_p99, measured.p99, measured.largest) == (0.1, 0.3, 0.9)
    assert [promise.holds for promise in promises(measured)] == [True]


def test_a_gap_longer_than_a_step_and_a_chunk_does_not_hold():
    measured = Measured(512, 0.25, 0.1, 1.0, 2.0, (prompt(0.1, 0.36, 0.4),))

    assert [promise.holds for promise in promises(measured)] == [False]


def test_what_the_server_had_in_its_prefix_cache_is_read_from_its_usage():
    assert cached_tokens(usage(cached_tokens=48)) == 48
    assert cached_tokens(usage()) == 0
    assert cached_tokens(Stream(0.0, ((1.0, b'{"choices": []}'),))) == 0


class Caching(Client):
    """Answers at once, and says that so much of every prompt was cached."""

    def __init__(self, cached: int) -> None:
        super().__init__(Server("127.0.0.1", 0))
        self._cached = cached
        self.prompts: list[list[int]] = []

    async def post(self, path: str, body: bytes) -> Stream:
        self.prompts.append(json.loads(body)["prompt"])
        return usage(cached_tokens=self._cached)


async def test_one_chunk_is_what_the_prefix_cache_leaves_of_a_prompt():
    client = Caching(cached=960)

    assert await Asking(client, "base").chunks(1024, 64, times=2) == [1.0, 1.0]

    before, *whole = client.prompts
    assert [len(before), *map(len, whole)] == [1024 - 64 + 1, 1024, 1024]
    assert before[:960] == whole[0][:960] == whole[1][:960]
    assert len({prompt[960] for prompt in client.prompts}) == 3


async def test_a_prompt_that_was_not_cached_is_no_measure_of_a_chunk():
    with pytest.raises(NotCached, match="only 0 of 960 tokens"):
        await Asking(Caching(cached=0), "base").chunks(1024, 64, times=2)

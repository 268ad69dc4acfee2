"""What the headers of a text answer say of its adapter."""

from dataclasses import dataclass

import pytest
from loralane_router.gateway.generations import first_token_headers

DIGEST, COLD = "x-loralane-adapter-digest", "x-loralane-adapter-cold-ms"


@dataclass
class Waited:
    """A generation, as far as headers read it."""

    cold_ms: float
    adapter_digest: str = "d"
    prompt_tokens: int = 3
    is_fallback: bool = False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "loud", "prompt": "a b"}),
        ("/v1/chat/completions", {"model": "loud", "messages": [{"role": "user", "content": "a"}]}),
        ("/generate", {"inputs": "a b", "parameters": {"adapter_id": "loud"}}),
        ("/", {"inputs": "a b", "parameters": {"adapter_id": "loud"}}),
    ],
)
async def test_an_adapters_answer_names_its_digest_and_its_wait(http, path, body, stream):
    reply = await http.post(path, json={**body, "stream": stream})

    assert reply.status_code == 200
    assert (reply.headers[DIGEST], reply.headers[COLD]) == ("digest-of-loud", "7.0")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bases_answer_names_neither(http, stream):
    reply = await http.post("/v1/completions", json={"prompt": "a b", "stream": stream})

    assert reply.status_code == 200
    assert not {DIGEST, COLD} & {*reply.headers}


async def test_a_stream_that_began_before_its_first_token_names_the_digest_only(http, router):
    body = {"model": "loud", "prompt": "hold it", "stream": True}

    async with http.stream("POST", "/v1/completions", json=body) as reply:
        headers = dict(reply.headers)
        router.gate.set()
        lines = [line async for line in reply.aiter_lines()]

    assert headers[DIGEST] == "digest-of-loud"
    assert COLD not in headers
    assert "data: [DONE]" in lines


def test_the_longest_wait_of_several_choices_counts():
    headers = first_token_headers([Waited(0.0), Waited(12.34), Waited(3.0)])

    assert (headers[DIGEST], headers[COLD]) == ("d", "12.3")


def test_an_adapter_that_was_there_cost_no_wait():
    assert first_token_headers([Waited(0.0)])[COLD] == "0.0"

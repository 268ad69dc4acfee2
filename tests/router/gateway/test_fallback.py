"""The base's answer in an adapter's place, as a request may allow, says that it is the base's."""

import asyncio
import json

import pytest
from loralane_router.gateway.failures import Failure
from loralane_router.gateway.limits import Limits
from loralane_router.gateway.sse import EventStream
from loralane_router.requests import Parameters, TextRequest

BASE, DIGEST = "base/tiny", "x-loralane-adapter-digest"
FALLBACK = "x-loralane-adapter-fallback"


def body_of(path: str, text: str, **fields: object) -> dict:
    common = {"model": "loud", "prompt": text, "messages": [{"role": "user", "content": text}]}
    native = {"inputs": text, "parameters": {"adapter_id": "loud"}}
    return (common if path.startswith("/v1") else native) | fields


def models_of(stream: str) -> set[str]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data")]
    return {json.loads(line)["model"] for line in lines if line != "[DONE]"}


PATHS = ["/v1/completions", "/v1/chat/completions", "/", "/generate"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_header_and_the_model_name_the_base(http, router, path, stream):
    router.gate.set()

    reply = await http.post(path, json=body_of(path, "late", stream=stream))

    assert reply.status_code == 200
    assert reply.headers[FALLBACK] == "base"
    assert DIGEST not in reply.headers
    if path.startswith("/v1"):
        assert models_of(reply.text if stream else f"data: {reply.text}") == {BASE}


async def test_the_usage_of_a_stream_names_the_base_too(http, router):
    router.gate.set()
    body = body_of("/v1/", "late", stream=True, stream_options={"include_usage": True})

    reply = await http.post("/v1/completions", json=body)

    assert models_of(reply.text) == {BASE}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_an_adapters_own_answer_is_not_marked(http, path, stream):
    reply = await http.post(path, json=body_of(path, "a b", stream=stream))

    assert FALLBACK not in reply.headers
    assert reply.headers[DIGEST] == "digest-of-loud"
    if path.startswith("/v1"):
        assert models_of(reply.text if stream else f"data: {reply.text}") == {"loud"}


async def test_a_stream_does_not_begin_before_it_is_settled_who_answers(router):
    """Without that it would begin at once: its quiet time is over when it starts."""
    generation = await router.open(TextRequest("loud", "late", Parameters(max_tokens=9)))

    async def frames():
        async for delta in generation:
            yield delta.text.encode()

    stream = EventStream([generation], frames(), Failure.openai, Limits(quiet_s=0.0))
    beginning = asyncio.create_task(stream.begin())
    for _ in range(9):
        await asyncio.sleep(0)
    began_early = beginning.done()
    router.gate.set()
    headers = (await beginning).headers

    assert not began_early
    assert headers[FALLBACK] == "base"
    assert DIGEST not in headers
    await stream.aclose()


async def test_of_several_choices_each_chunk_names_who_made_it(http, router):
    router.gate.set()
    body = body_of("/v1/", "", stream=True) | {"prompt": ["late", "a b"]}

    reply = await http.post("/v1/completions", json=body)

    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    named = {(chunk["choices"][0]["index"], chunk["model"]) for chunk in chunks}
    assert named == {(0, BASE), (1, "loud")}
    assert (reply.headers[FALLBACK], reply.headers[DIGEST]) == ("base", "digest-of-loud")

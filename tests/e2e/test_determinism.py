"""A seed decides a sample, whoever runs beside it; texts are cut at characters and stop strings."""

import asyncio

import grpc.aio
import httpx
import pytest
from loralane_proto import inference_pb2 as pb
from loralane_proto import inference_pb2_grpc

from tests.product import Served, World, events_of

PROMPT = "Once upon a time"
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 48}


async def whole(http: httpx.AsyncClient, **request: object) -> str:
    reply = await http.post("/v1/completions", json={"prompt": PROMPT, **request})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


async def pieces(http: httpx.AsyncClient, **request: object) -> list[str]:
    """Return the texts of a stream's events."""
    body = {"prompt": PROMPT, "stream": True, **request}
    reply = await http.post("/v1/completions", json=body)
    return [event["choices"][0]["text"] for event in events_of(reply.text)]


@pytest.mark.parametrize("adapter", ["", "a"])
async def test_a_seed_decides_alone_in_a_batch_and_streaming(http, adapter):
    request = {"model": adapter, "seed": 11, **SAMPLED}
    alone = await whole(http, **request)

    others = [whole(http, model=name, seed=i, **SAMPLED) for i, name in enumerate("abcdefg" * 2)]
    together = await asyncio.gather(whole(http, **request), pieces(http, **request), *others)

    assert together[0] == alone
    assert "".join(together[1]) == alone
    assert len(set(map(str, together[2:]))) == len(others), "other seeds, other texts"


async def test_different_seeds_differ_and_without_a_seed_so_do_requests(http):
    seeded = [await whole(http, model="a", seed=seed, **SAMPLED) for seed in range(4)]
    unseeded = [await whole(http, model="a", **SAMPLED) for _ in range(4)]

    assert len({*seeded, *unseeded}) == 8


async def test_temperature_0_ignores_the_seed(http, world):
    request = {"model": "a", "temperature": 0, "max_tokens": 24}

    texts = {await whole(http, **request, seed=seed) for seed in (1, 2)}

    assert texts == {world.text("a", PROMPT, 24)}


async def test_every_stop_string_that_spans_tokens_cuts_the_text_before_it(http, world):
    full = world.text("a", PROMPT, 48)
    request = {"model": "a", "temperature": 0, "max_tokens": 48}
    stops = [full[at : at + 5] for at in range(0, 30, 6)]

    for stop in stops:
        expected = full[: full.index(stop)]
        streamed = await pieces(http, **request, stop=[stop])
        native = await http.post(
            "/generate",
            json={
                "inputs": PROMPT,
                "parameters": {"adapter_id": "a", "max_new_tokens": 48, "stop": [stop]},
            },
        )

        assert await whole(http, **request, stop=stop) == expected
        assert "".join(streamed) == expected
        assert native.json()["generated_text"] == expected


async def test_a_stop_string_that_never_comes_changes_nothing(http, world):
    request = {"model": "a", "temperature": 0, "max_tokens": 24}
    full = world.text("a", PROMPT, 24)
    almost = full[-3:] + "never"

    assert await whole(http, **request, stop=[almost]) == full
    assert "".join(await pieces(http, **request, stop=[almost])) == full


@pytest.mark.parametrize(
    "prompt", ["héllo wörld", "日本語のテキスト", "👩‍👩‍👧 ok", "a\u2028b\u0085c\x0b"]
)
async def test_prompts_of_any_characters_are_the_references_prompts(http, world, prompt):
    request = {"model": "a", "prompt": prompt, "temperature": 0, "max_tokens": 24}
    expected = world.text("a", prompt, 24)

    assert await whole(http, **request) == expected
    assert "".join(await pieces(http, **request)) == expected


async def test_streams_never_carry_half_a_character(http, served: Served, world: World):
    """The texts must be the decoding of all tokens at once; here tokens are single bytes."""
    seeds = range(12)
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        # One at a time: in other company a draw next to a boundary may round to the other side.
        answers = [await sampled_by_grpc(stub, seed) for seed in seeds]
    request = {"model": "a", "temperature": 1.5, "max_tokens": 96}
    streams = [await pieces(http, **request, seed=seed) for seed in seeds]

    expected = [world.decode(tokens) for _, tokens in answers]
    assert [text for text, _ in answers] == expected
    assert ["".join(stream) for stream in streams] == expected
    long = [char for char in "".join(expected) if char > "\x7f" and char != "\ufffd"]
    assert len(long) > 12, "too few characters of several bytes to prove anything"


async def sampled_by_grpc(
    stub: inference_pb2_grpc.InferenceStub, seed: int
) -> tuple[str, list[int]]:
    """Return the joined text and all tokens of a sample."""
    request = pb.GenerateRequest(
        adapter="a", prompt=PROMPT, temperature=1.5, seed=seed, max_tokens=96
    )
    replies = [reply async for reply in stub.Generate(request)]
    tokens = [token for reply in replies for token in reply.token_ids]
    return "".join(reply.text for reply in replies), tokens

"""Every surface gives the texts of transformers and PEFT, by alias and by path."""

import grpc
import grpc.aio
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loralane_proto import inference_pb2 as pb
from loralane_proto import inference_pb2_grpc

from tests.product import GOOD, Served, World

PROMPT = "Once upon a time"
HI = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "héllo"}]
TOKENS = 24
ADAPTERS = ["", *(recipe.name for recipe in GOOD)]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_openai_completions_by_alias_and_by_path(served: Served, world: World, adapter: str):
    names = [adapter, str(world.root / adapter)] if adapter else ["", "model"]
    expected = world.text(adapter, PROMPT, TOKENS)

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        for name in names:
            request = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}
            whole = client.completions.create(**request).choices[0]
            chunks = client.completions.create(**request, stream=True)

            assert whole.text == expected
            assert "".join(chunk.choices[0].text for chunk in chunks) == expected


@pytest.mark.parametrize("adapter", ["", "a", "g"])
async def test_openai_chat(served: Served, world: World, adapter: str):
    tokens = world.tokens(adapter, [world.chat_ids(HI)], TOKENS)[0]
    request = {"model": adapter, "messages": HI, "temperature": 0, "max_tokens": TOKENS}

    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        whole = await client.chat.completions.create(**request)
        stream = await client.chat.completions.create(**request, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert whole.choices[0].message.content == "".join(pieces) == world.decode(tokens)


@pytest.mark.parametrize("adapter", ["", "a", "g"])
def test_grpc_text_of_a_generated_stub(served: Served, world: World, adapter: str):
    request = pb.GenerateRequest(adapter=adapter, prompt=PROMPT, max_tokens=TOKENS)

    with grpc.insecure_channel(served.grpc) as channel:
        replies = list(inference_pb2_grpc.InferenceStub(channel).Generate(request))

    assert_grpc_answer(replies, world, adapter)


@pytest.mark.parametrize("adapter", ["", "a"])
async def test_grpc_text_of_a_generated_async_stub(served: Served, world: World, adapter: str):
    request = pb.GenerateRequest(adapter=adapter, prompt=PROMPT, max_tokens=TOKENS)

    async with grpc.aio.insecure_channel(served.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        replies = [reply async for reply in call]

    assert_grpc_answer(replies, world, adapter)


def assert_grpc_answer(replies: list[pb.GenerateReply], world: World, adapter: str) -> None:
    tokens = [token for reply in replies for token in reply.token_ids]
    assert tokens == world.tokens(adapter, [world.ids(PROMPT)], TOKENS)[0]
    assert "".join(reply.text for reply in replies) == world.text(adapter, PROMPT, TOKENS)
    assert bool(replies[0].adapter_digest) is bool(adapter)
    assert [reply.finish_reason for reply in replies] == [""] * (len(replies) - 1) + ["length"]
    assert replies[-1].usage.completion_tokens == TOKENS


def test_grpc_takes_token_ids_and_chats(served: Served, world: World):
    ids = pb.TokenIds(ids=world.ids(PROMPT))
    turns = pb.Chat(messages=[pb.Message(**message) for message in HI])
    by_ids = pb.GenerateRequest(adapter="a", token_ids=ids, max_tokens=TOKENS)
    by_chat = pb.GenerateRequest(adapter="a", chat=turns, max_tokens=TOKENS)

    with grpc.insecure_channel(served.grpc) as channel:
        generate = inference_pb2_grpc.InferenceStub(channel).Generate
        texts = ["".join(reply.text for reply in generate(r)) for r in (by_ids, by_chat)]

    chat = world.tokens("a", [world.chat_ids(HI)], TOKENS)[0]
    assert texts == [world.text("a", PROMPT, TOKENS), world.decode(chat)]


def test_grpc_errors_name_their_cause(served: Served):
    cases = {"nope": grpc.StatusCode.NOT_FOUND, "wide": grpc.StatusCode.FAILED_PRECONDITION}
    with grpc.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for adapter, code in cases.items():
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(pb.GenerateRequest(adapter=adapter, prompt="a")))

            assert caught.value.code() is code


def test_grpc_health_says_serving(served: Served):
    with grpc.insecure_channel(served.grpc) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        names = ("", "loralane.inference.v1.Inference")
        found = [check(health_pb2.HealthCheckRequest(service=name)).status for name in names]

    assert found == [health_pb2.HealthCheckResponse.SERVING] * 2

"""The unmodified `huggingface_hub.InferenceClient`, of the server's environment."""

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import GenerationError, ValidationError

HI = [{"role": "user", "content": "hello world"}]


@pytest.mark.parametrize("path", ["", "/generate"])
def test_a_stream_of_tokens_joins_to_the_whole_text(server_url, adapter, path):
    client = InferenceClient(model=server_url + path, token="any")
    request = {"adapter_id": adapter, "max_new_tokens": 12, "stop": ["zz"]}

    whole = client.text_generation("hello world", **request)
    pieces = list(client.text_generation("hello world", **request, stream=True))

    assert whole
    assert "".join(pieces) == whole


def test_texts_are_those_of_base_and_adapter(target):
    client = InferenceClient(model=target.url, token="any")

    base = client.text_generation("hello world", max_new_tokens=12)
    adapted = client.text_generation("hello world", adapter_id=target.adapter, max_new_tokens=12)

    assert base == target.answer("", "hello world", 12)
    assert adapted == target.answer(target.adapter, "hello world", 12)


def test_details_are_typed_in_both_forms(server_url):
    client = InferenceClient(model=server_url, token="any")

    whole = client.text_generation("hello", max_new_tokens=3, details=True)
    *_, last = client.text_generation("hello", max_new_tokens=3, details=True, stream=True)

    assert whole.details.generated_tokens == len(whole.details.tokens) <= 3
    assert whole.details.finish_reason == last.details.finish_reason
    assert last.generated_text == whole.generated_text
    assert last.details.input_length > 0


def test_chat_without_a_model_is_answered_by_the_base(server_url):
    client = InferenceClient(model=server_url, token="any")

    whole = client.chat_completion(HI, max_tokens=8, temperature=0)
    chunks = list(client.chat_completion(HI, max_tokens=8, temperature=0, stream=True))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_chat_names_an_adapter(server_url, adapter):
    client = InferenceClient(base_url=f"{server_url}/v1", api_key="any")

    reply = client.chat_completion(HI, model=adapter, max_tokens=8)

    assert reply.model == adapter


async def test_the_async_client_streams(server_url):
    async with AsyncInferenceClient(model=server_url, token="any") as client:
        stream = await client.text_generation("hello", max_new_tokens=4, stream=True)
        pieces = [piece async for piece in stream]

    assert 1 <= len(pieces) <= 4


def test_a_missing_adapter_and_a_bad_parameter_are_errors(server_url, missing_adapter):
    client = InferenceClient(model=server_url, token="any")

    with pytest.raises(GenerationError, match=missing_adapter):
        client.text_generation("a", adapter_id=missing_adapter)

    with pytest.raises(ValidationError, match="top_p"):
        client.text_generation("a", top_p=1.5)

"""The unmodified `openai` SDK."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

HI = [{"role": "user", "content": "hello world"}]


@pytest.fixture
def client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_models_list_the_base_and_the_adapter(client, adapter):
    models = {model.id: model for model in client.models.list()}

    parent = models[adapter].parent
    assert parent in models
    assert models[parent].parent is None
    assert client.models.retrieve(adapter).id == adapter


def test_texts_are_those_of_base_and_adapter(client, target):
    request = {"prompt": "hello world", "temperature": 0, "max_tokens": 12}

    base = client.completions.create(model="", **request)
    adapted = client.completions.create(model=target.adapter, **request)

    assert base.choices[0].text == target.answer("", "hello world", 12)
    assert adapted.choices[0].text == target.answer(target.adapter, "hello world", 12)


def test_a_streamed_completion_is_the_whole_one_in_pieces(client, adapter):
    request = {"model": adapter, "prompt": "hello world", "temperature": 0, "max_tokens": 12}

    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))

    assert whole.id.startswith("cmpl-")
    assert whole.model == adapter
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_a_streamed_chat_is_the_whole_one_in_pieces_with_usage_at_the_end(client, adapter):
    request = {"model": adapter, "messages": HI, "temperature": 0, "max_completion_tokens": 12}

    whole = client.chat.completions.create(**request)
    *chunks, last = client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    # How much of a prompt is cached depends on who came before.
    details = {"prompt_tokens_details": None}
    assert last.usage.model_copy(update=details) == whole.usage.model_copy(update=details)


def test_priority_and_a_bounded_wait_go_through_extra_body(client, target):
    request = {"model": target.adapter, "prompt": "hello world", "temperature": 0, "max_tokens": 9}
    asked = {"priority": -5, "max_wait_for_adapter_ms": 60_000, "adapter_wait_policy": "base"}

    raw = client.completions.with_raw_response.create(**request, extra_body=asked)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**request, extra_body={"max_wait_for_adapter_ms": 0})

    reply = raw.parse()
    assert reply.choices[0].text == target.answer(target.adapter, "hello world", 9)
    assert reply.model == target.adapter
    assert "x-loralane-adapter-fallback" not in raw.headers
    assert caught.value.param == "max_wait_for_adapter_ms"


def test_usage_tells_how_much_of_the_prompt_was_cached(client, adapter):
    reply = client.chat.completions.create(model=adapter, messages=HI, max_tokens=2)

    details = reply.usage.prompt_tokens_details
    assert 0 <= details.cached_tokens <= reply.usage.prompt_tokens


def test_several_prompts_and_choices_are_numbered(client):
    reply = client.completions.create(
        model="", prompt=["a", "b"], n=2, seed=3, max_tokens=2, logprobs=2
    )

    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for choice in reply.choices:
        table = choice.logprobs
        assert len(table.tokens) == len(table.token_logprobs) == len(table.top_logprobs)
        assert table.text_offset == sorted(table.text_offset)


def test_chat_log_probabilities_are_typed(client):
    reply = client.chat.completions.create(
        model="", messages=HI, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )

    tokens = reply.choices[0].logprobs.content
    assert len(tokens) == reply.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)


def test_extra_body_names_the_adapter(client, adapter):
    request = {"prompt": "hello world", "temperature": 0, "max_tokens": 30}

    by_model = client.completions.create(model=adapter, **request)
    by_extra = client.completions.create(model="", **request, extra_body={"adapter_id": adapter})

    assert by_extra.choices[0].text == by_model.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_missing_adapter_is_a_not_found_error_with_a_request_id(client, missing_adapter, stream):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model=missing_adapter, prompt="a", stream=stream)

    assert caught.value.code == "adapter_not_found"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_a_bad_parameter_is_a_bad_request_error_with_its_name(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="", messages=HI, top_p=1.5)

    assert caught.value.param == "top_p"


async def test_many_async_streams_do_not_mix(server_url, adapter):
    async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="any") as client:

        async def text(model: str, word: str) -> str:
            stream = await client.completions.create(
                model=model, prompt=f"{word} world", temperature=0, max_tokens=20, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        asked = [(model, f"w{i}") for i in range(4) for model in ("", adapter)]
        together = await asyncio.gather(*(text(*one) for one in asked))
        alone = [await text(*one) for one in asked]

    assert together == alone

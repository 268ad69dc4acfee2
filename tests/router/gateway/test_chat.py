"""`/v1/chat/completions` over HTTP."""

import json

import pytest

PATH = "/v1/chat/completions"


def chunks_of(text: str) -> list[dict]:
    return [
        json.loads(e.removeprefix("data: ")) for e in text.split("\n\n") if e.startswith("data: {")
    ]


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


async def test_an_answer_has_every_field_that_openai_gives(http):
    request = {"model": "org/a", "messages": user("a b"), "temperature": 0, "user": "u", "x": 1}

    reply = await http.post(PATH, json=request)

    body = reply.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    message = {"role": "assistant", "content": "b a+org/a", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert body == {
        "object": "chat.completion",
        "model": "org/a",
        "choices": [choice],
        "usage": usage,
    }


async def test_parts_of_text_are_joined_by_line_breaks(http, router):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    await http.post(PATH, json={"messages": user(parts)})

    (message,) = router.requests[0].prompt
    assert (message.role, message.content) == ("user", "a\nb")


async def test_a_stream_starts_with_the_role_and_ends_with_usage_and_done(http):
    request = {"messages": user("a b"), "temperature": 0, "stream": True}

    reply = await http.post(PATH, json=request | {"stream_options": {"include_usage": True}})

    first, *middle, usage = chunks_of(reply.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in middle) == "b a"
    assert [c["choices"][0]["finish_reason"] for c in middle] == [None] * (len(middle) - 1) + [
        "stop"
    ]
    assert {c["object"] for c in middle} == {"chat.completion.chunk"}
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 7)
    assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_both_names_bound_the_answer(http, field):
    reply = await http.post(PATH, json={"messages": user("abcdef"), field: 3})

    choice = reply.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")


async def test_without_a_bound_as_many_tokens_as_fit_are_asked_for(http, router):
    await http.post(PATH, json={"messages": user("a")})

    assert router.requests[0].parameters.max_tokens is None


async def test_log_probabilities_come_with_bytes_and_alternatives(http):
    request = {"messages": user("é"), "max_tokens": 1, "logprobs": True, "top_logprobs": 2}

    reply = await http.post(PATH, json=request)

    (token,) = reply.json()["choices"][0]["logprobs"]["content"]
    assert token == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
            {"token": "ê", "logprob": -1.5, "bytes": [0xC3, 0xAA]},
        ],
    }


async def test_choices_have_consecutive_seeds(http):
    reply = await http.post(PATH, json={"messages": user("a"), "n": 2, "seed": 2**64 - 1})

    texts = [choice["message"]["content"] for choice in reply.json()["choices"]]
    assert texts == [f"a#{2**64 - 1}", "a#0"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": user([{"type": "image_url"}])}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool_calls"),
        ({"messages": user("a"), "top_logprobs": 3}, "top_logprobs"),
        ({"messages": user("a"), "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": user("a"), "tools": [{}]}, "tools"),
        ({"messages": user("a"), "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": user("a"), "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": user("") * 4097}, "messages"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(http, router, body, param):
    reply = await http.post(PATH, json=body)

    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert reply.json()["error"]["param"] == param
    assert router.requests == []


async def test_neutral_values_are_accepted(http):
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}

    reply = await http.post(
        PATH, json={"messages": user("a"), "n": None, "logit_bias": {}} | neutral
    )

    assert reply.status_code == 200

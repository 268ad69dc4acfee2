"""`/v1/completions` over HTTP."""

import json

import pytest

PATH = "/v1/completions"


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data:")]


async def complete(http, **body):
    reply = await http.post(PATH, json={"temperature": 0, "max_tokens": 50} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_an_answer_has_every_field_that_openai_gives(http):
    reply = await http.post(PATH, json={"model": "loud", "prompt": "a b", "temperature": 0})

    body = reply.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    choice = {"index": 0, "text": "b a+loud", "logprobs": None, "finish_reason": "stop"}
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert body == {
        "object": "text_completion",
        "model": "loud",
        "choices": [choice],
        "usage": usage,
    }
    assert reply.headers["x-loralane-adapter-digest"] == "digest-of-loud"
    assert reply.headers["x-prompt-tokens"] == "3"
    assert reply.headers["x-generated-tokens"] == "9"
    assert reply.headers["x-queue-time"] == "250"
    assert reply.headers["x-total-time"].isdecimal()
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize("model", ["", None, "base/tiny", "dummy", "tgi"])
async def test_the_base_answers_to_no_name_its_own_and_the_placeholders(http, model):
    body = await complete(http, model=model, prompt="a b")

    assert body["choices"][0]["text"] == "b a"
    assert body["model"] == (model or "base/tiny")


async def test_a_placeholder_that_names_an_adapter_is_that_adapter(http, router):
    await router.load_adapter("tgi", "org/tgi", None)

    body = await complete(http, model="tgi", prompt="a b")

    assert body["choices"][0]["text"] == "b a+tgi"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c d"], ["ab", "d c"]),
        ([97, 98], ["ab"]),
        ([[97], [98]], ["a", "b"]),
    ],
)
async def test_every_shape_of_prompt_gives_one_choice_a_prompt(http, prompt, texts):
    body = await complete(http, prompt=prompt)

    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert body["usage"]["prompt_tokens"] == sum(len(text) for text in texts)


async def test_choices_of_one_prompt_have_consecutive_seeds_and_count_the_prompt_once(http):
    body = await complete(http, prompt="hi", n=3, seed=7, temperature=1)

    assert [choice["text"] for choice in body["choices"]] == ["hi#7", "hi#8", "hi#9"]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 15,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_a_stream_of_several_choices_carries_the_same_texts(http):
    request = {"prompt": ["a b", "c"], "n": 2, "seed": 7, "max_tokens": 50, "stream": True}

    reply = await http.post(PATH, json=request | {"stream_options": {"include_usage": True}})

    *chunks, usage, done = events(reply.text)
    texts, reasons = ["", "", "", ""], [[], [], [], []]
    for chunk in map(json.loads, chunks):
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == ["b a#7", "b a#8", "c#7", "c#8"]
    assert [list(filter(None, seen)) for seen in reasons] == [["stop"]] * 4
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["prompt_tokens"] == 4
    assert json.loads(usage)["usage"]["completion_tokens"] == 20
    assert done == "[DONE]"


async def test_all_chunks_of_a_stream_share_their_id(http):
    reply = await http.post(PATH, json={"prompt": "a b", "stream": True})

    chunks = [json.loads(event) for event in events(reply.text)[:-1]]
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all("usage" not in chunk for chunk in chunks)


async def test_log_probabilities_are_four_parallel_lists_with_the_sampled_token(http):
    body = await complete(http, prompt="ab", max_tokens=2, logprobs=2)

    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}],
        "text_offset": [0, 1],
    }


async def test_streamed_log_probabilities_continue_their_offsets(http):
    request = {"prompt": "ab", "max_tokens": 2, "logprobs": 0, "temperature": 0, "stream": True}

    reply = await http.post(PATH, json=request)

    tables = [json.loads(e)["choices"][0]["logprobs"] for e in events(reply.text)[:-1]]
    assert [table["text_offset"] for table in tables] == [[0], [1]]
    assert [table["top_logprobs"] for table in tables] == [[{"a": -0.5}], [{"b": -0.5}]]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_each_answer(http, stream):
    request = {"prompt": "a b", "echo": True, "temperature": 0, "n": 2, "stream": stream}

    reply = await http.post(PATH, json=request)

    if stream:
        texts = ["", ""]
        for event in events(reply.text)[:-1]:
            (choice,) = json.loads(event)["choices"]
            texts[choice["index"]] += choice["text"]
    else:
        texts = [choice["text"] for choice in reply.json()["choices"]]
    assert texts == ["a bb a", "a bb a"]


@pytest.mark.parametrize(("stop", "text"), [("b", "a"), (["zz", "ab"], ""), ([], "abc")])
async def test_stop_is_a_text_or_a_list(http, stop, text):
    body = await complete(http, prompt="abc", stop=stop, max_tokens=3)

    assert body["choices"][0]["text"] == text


async def test_max_tokens_is_16_or_what_fits_unless_given(http):
    short = await complete(http, prompt="x" * 30, max_tokens=None)
    full = await complete(http, prompt="x" * 120, max_tokens=None)
    over = await http.post(PATH, json={"prompt": "x" * 120, "max_tokens": 16})

    assert short["usage"]["completion_tokens"] == 16
    assert full["usage"]["completion_tokens"] == 8
    assert over.status_code == 400
    assert "128" in over.json()["error"]["message"]


async def test_parameters_reach_the_router_as_they_were_given(http, router):
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": -1, "stop": ["x"]}

    await complete(http, prompt="a", ignore_eos=True, api_token="hf_1", **given)

    sent = router.requests[0]
    assert (sent.parameters.temperature, sent.parameters.top_p) == (0.5, 0.9)
    assert (sent.parameters.top_k, sent.parameters.seed) == (5, 2**64 - 1)
    assert sent.parameters.stop == ("x",)
    assert sent.parameters.ignore_eos
    assert sent.token == "hf_1"
    assert "hf_1" not in repr(sent)


@pytest.mark.parametrize(("key", "token"), [("EMPTY", None), ("hf_x", "hf_x")])
async def test_only_what_looks_like_a_hub_token_is_taken_for_one(http, router, key, token):
    await http.post(PATH, json={"prompt": "a"}, headers={"authorization": f"Bearer {key}"})

    assert router.requests[0].token == token


async def test_adapter_id_goes_before_model(http):
    body = await complete(http, model="base/tiny", adapter_id="org/a", prompt="x")

    assert body["choices"][0]["text"] == "x+org/a"
    assert body["model"] == "base/tiny"

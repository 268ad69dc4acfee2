"""LoRAX's and TGI's routes over HTTP."""

import json

import pytest

#: What lorax-client sends: everything, mostly null.
NULLS = {
    "adapter_id": None, "adapter_source": None, "merged_adapters": None, "api_token": None,
    "do_sample": False, "max_new_tokens": 8, "ignore_eos_token": False, "best_of": None,
    "repetition_penalty": None, "return_full_text": False, "stop": [], "seed": None,
    "temperature": None, "top_k": None, "top_p": None, "truncate": None, "typical_p": None,
    "watermark": False, "response_format": None, "decoder_input_details": False,
    "return_k_alternatives": None, "details": True,
}  # fmt: skip


def events(text: str) -> list[dict]:
    assert "[DONE]" not in text
    lines = [line for line in text.splitlines() if line]
    assert all(line.startswith("data:") for line in lines)
    return [json.loads(line.removeprefix("data:")) for line in lines]


async def generate(http, path="/generate", inputs="a b", stream=False, **parameters):
    body = {"inputs": inputs, "parameters": parameters, "stream": stream}
    return await http.post(path, json=body)


@pytest.mark.parametrize("path", ["/", "/invocations"])
async def test_the_root_answers_with_an_array_and_accepts_nulls(http, path):
    reply = await generate(http, path, **NULLS | {"adapter_id": "org/a"})

    (answer,) = reply.json()
    assert answer["generated_text"] == "b a+org/"
    details = answer["details"]
    assert (details["finish_reason"], details["prompt_tokens"]) == ("length", 3)
    assert (details["generated_tokens"], details["skipped_tokens"]) == (8, 0)
    assert (details["prefill"], details["seed"]) == ([], 42)
    token = {"id": 98, "text": "b", "logprob": -0.5, "special": False, "skipped": False}
    assert details["tokens"][0] == token
    assert reply.headers["x-loralane-adapter-digest"] == "digest-of-org/a"


async def test_generate_answers_with_an_object_and_no_error_key(http):
    reply = await http.post("/generate", json={"inputs": "a b"})

    assert reply.json() == {"generated_text": "b a"}


async def test_without_a_bound_20_tokens_or_what_fits(http):
    short = await generate(http, inputs="x" * 40, details=True)
    full = await generate(http, inputs="x" * 120, details=True)
    over = await generate(http, inputs="x" * 120, max_new_tokens=20)

    assert short.json()["details"]["generated_tokens"] == 20
    assert full.json()["details"]["generated_tokens"] == 8
    assert (over.status_code, over.json()["error_type"]) == (422, "validation")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"max_new_tokens": 2}, "length"),
        ({"max_new_tokens": 9}, "eos_token"),
        ({"stop": ["a"]}, "stop_sequence"),
    ],
)
async def test_the_three_ways_to_end_have_lorax_names(http, parameters, reason):
    reply = await generate(http, details=True, **parameters)

    assert reply.json()["details"]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 1.0}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0}, 0.0),
        ({"temperature": 0, "do_sample": True}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False, "top_k": 5}, 1.0),
        ({"do_sample": False, "top_p": 0.5}, 1.0),
        ({"top_p": 1.0}, 0.0),
    ],
)
async def test_any_warper_means_sampling_and_none_means_greedy(
    http, router, parameters, temperature
):
    await generate(http, **parameters)

    assert router.requests[0].parameters.temperature == temperature


@pytest.mark.parametrize(
    ("path", "stream"), [("/", True), ("/generate", True), ("/generate_stream", False)]
)
async def test_a_stream_has_one_event_a_token_and_the_text_in_the_last(http, path, stream):
    reply = await generate(http, path, stream=stream, details=True)

    *first, last = events(reply.text)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert [event["index"] for event in (*first, last)] == [1, 2, 3, 4]
    assert all(event["generated_text"] is None for event in first)
    assert all(event["details"] is None for event in first)
    assert last["generated_text"] == "b a"
    assert last["details"] == {
        "finish_reason": "eos_token",
        "prompt_tokens": 3,
        "input_length": 3,
        "generated_tokens": 4,
        "skipped_tokens": 0,
        "seed": 42,
    }
    eos = {"id": 0, "text": "", "logprob": -0.25, "special": True, "skipped": False}
    assert last["token"] == eos
    assert "".join(event["token"]["text"] for event in (*first, last)) == "b a"


async def test_details_of_a_stream_come_only_when_asked_for(http):
    reply = await generate(http, "/generate_stream")

    assert events(reply.text)[-1]["details"] is None


async def test_the_prompt_comes_back_on_request(http):
    whole = await generate(http, return_full_text=True)
    stream = await generate(http, stream=True, return_full_text=True)

    assert whole.json()["generated_text"] == "a bb a"
    assert events(stream.text)[-1]["generated_text"] == "a bb a"


async def test_truncate_keeps_the_end_of_the_prompt(http):
    reply = await generate(http, inputs="x" * 500 + "yz", truncate=2, details=True)

    assert reply.json()["generated_text"] == "yz"
    assert reply.json()["details"]["prompt_tokens"] == 2


async def test_alternatives_come_with_each_token(http):
    reply = await generate(http, inputs="a", details=True, return_k_alternatives=2)

    assert reply.json()["details"]["tokens"][0]["alternative_tokens"] == [
        {"id": 97, "text": "a", "logprob": -0.5},
        {"id": 98, "text": "b", "logprob": -1.5},
    ]


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x85", "a\nb", "\r\n"])
async def test_no_character_breaks_an_event_in_two(http, text):
    reply = await generate(http, inputs=text, stream=True)

    assert events(reply.text)[-1]["generated_text"] == text


@pytest.mark.parametrize(
    ("header", "parameters", "token"),
    [({}, {}, None), ({}, {"api_token": "t1"}, "t1"), ({"authorization": "Bearer t2"}, {}, "t2")],
)
async def test_the_hub_token_comes_from_the_body_or_the_header(
    http, router, header, parameters, token
):
    body = {"inputs": "a", "parameters": parameters}

    await http.post("/generate", json=body, headers=header)

    assert router.requests[0].token == token


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"merged_adapters": {"ids": ["a"], "weights": []}}, "merged_adapters"),
        ({"subfolder": "policy"}, "subfolder"),
        ({"adapter_source": "s3"}, "adapter_source"),
        ({"adapter_source": "pbase"}, "adapter_source"),
        ({"best_of": 2}, "best_of"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"watermark": True}, "watermark"),
        ({"decoder_input_details": True}, "decoder_input_details"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"grammar": {"type": "json", "value": {}}}, "grammar"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": "5"}, "max_new_tokens"),
        ({"return_k_alternatives": 0}, "return_k_alternatives"),
        ({"truncate": 0}, "truncate"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**64}, "seed"),
    ],
)
async def test_what_cannot_be_honoured_is_a_validation_error_with_its_name(
    http, router, parameters, field
):
    reply = await generate(http, **parameters)

    assert reply.status_code == 422
    assert reply.json().keys() == {"error", "error_type"}
    assert reply.json()["error_type"] == "validation"
    assert field in reply.json()["error"]
    assert router.requests == []


async def test_empty_inputs_are_a_validation_error(http):
    reply = await http.post("/", json={"inputs": "", "parameters": {"max_new_tokens": 1}})

    assert (reply.status_code, reply.json()["error_type"]) == (422, "validation")


async def test_tokenize_gives_ids_texts_and_offsets(http):
    reply = await http.post("/tokenize", json={"inputs": "ab"})

    assert reply.json() == [
        {"id": 97, "text": "a", "start": 0, "stop": 1},
        {"id": 98, "text": "b", "start": 1, "stop": 2},
    ]


async def test_info_tells_what_is_served(http, router):
    router.capacity = {"rows_total": 8, "lanes_free": 48}

    reply = await http.get("/info")

    assert reply.json()["model_id"] == "base/tiny"
    assert reply.json()["max_total_tokens"] == 128
    assert reply.json()["max_stop_sequences"] == 16
    assert reply.json()["capacity"]["lanes_free"] == 48

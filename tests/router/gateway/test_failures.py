"""What clients see when something goes wrong: status, body by route, and nothing worse."""

import asyncio
import json

import pytest

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("adapter", "status", "code", "native_type"),
    [
        ("org/nope", 404, "adapter_not_found", "generation"),
        ("org/secret", 403, "adapter_forbidden", "generation"),
        ("org/wide", 422, "adapter_incompatible", "validation"),
        ("org/bad", 424, "adapter_corrupt", "generation"),
        ("org/huge", 413, "adapter_too_large", "validation"),
        ("org/loading", 503, "adapter_loading", "generation"),
        ("org/busy", 429, "overloaded", "overloaded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_error_has_its_status_before_any_byte_of_a_stream(
    http, adapter, status, code, native_type, stream
):
    openai = await http.post(COMPLETIONS, json={"model": adapter, "prompt": "a", "stream": stream})
    native = await http.post(
        "/", json={"inputs": "a", "parameters": {"adapter_id": adapter}, "stream": stream}
    )

    assert openai.status_code == native.status_code == status
    error = openai.json()["error"]
    assert error.keys() - {"tensors"} == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert native.json().keys() == {"error", "error_type"}
    assert native.json()["error_type"] == native_type
    for reply in (openai, native):
        assert ("retry-after" in reply.headers) is (status in (429, 503))
        assert reply.headers["x-request-id"]


async def test_retry_after_rounds_up(http):
    reply = await http.post(COMPLETIONS, json={"model": "org/loading", "prompt": "a"})

    assert reply.headers["retry-after"] == "3"


async def test_incompatible_tensors_are_named(http):
    reply = await http.post(COMPLETIONS, json={"model": "org/wide", "prompt": "a"})

    assert reply.json()["error"]["tensors"] == ["a.weight"]


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b'"x"', b'{"prompt":"a"} x', b'{"a":' * 20000, b"[" * 20000,
        b'{"model":"\xff"}', b'{"prompt":"\\ud83d"}', b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":1e400}', b"model=a",
        b'{"prompt":"a","seed":1' + b"0" * 5000 + b"}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/generate", "/v1/adapters"])
async def test_a_body_that_is_not_a_json_object_is_400_in_the_routes_shape(http, path, raw):
    reply = await http.post(path, content=raw)

    assert reply.status_code == 400
    if path.startswith("/v1"):
        assert reply.json()["error"]["code"] == "invalid_json"
    else:
        assert reply.json()["error_type"] == "validation"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [5, 10_000]}, "prompt"),
        ({"prompt": [[2**80]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"model": 1}, "model"),
        ({"model": "x" * 2000}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**32}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 100_000}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"prompt": [97], "echo": True}, "echo"),
        ({"stop": ["s"] * 50_000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -0.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"260": 5, "-1": 5}}, "logit_bias"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"min_p": 0.1}, "min_p"),
        ({"stop_token_ids": [99_999]}, "stop_token_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"merged_adapters": {"ids": []}}, "merged_adapters"),
        ({"adapter_source": "s3"}, "adapter_source"),
    ],
)
async def test_a_bad_field_is_400_with_its_name_and_reaches_nobody(http, router, body, param):
    given = body if "prompt" in body or not body else {"prompt": "a"} | body

    reply = await http.post(COMPLETIONS, json=given)

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert reply.json()["error"]["code"] == "invalid_request"
    assert router.requests == []


@pytest.mark.parametrize(
    "body",
    [
        {"presence_penalty": 0.0, "frequency_penalty": None, "repetition_penalty": 1.0},
        {"logit_bias": {}, "best_of": 1, "suffix": None, "min_p": 0},
        {"temperature": 1e-9, "top_k": -1, "seed": None, "stop": None, "logprobs": None},
        {"top_k": 999_999_999, "top_p": 1, "seed": 2**63 - 1, "unknown": {"x": 1}, "user": "u"},
        {"prompt": "\ufeffhi"},
        {"prompt": "a\0b"},
    ],
)
async def test_neutral_and_unknown_fields_change_nothing(http, body):
    reply = await http.post(COMPLETIONS, json={"prompt": "a"} | body)

    assert reply.status_code == 200


async def test_a_wrong_method_is_405_and_an_unknown_path_404_as_json(http):
    wrong = await http.get(COMPLETIONS)
    unknown = await http.get("/v1/nothing")
    embed = await http.post("/embed", json={"inputs": "a"})

    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert (embed.status_code, embed.json()["error_type"]) == (404, "validation")


@pytest.mark.parametrize("times", [1, 20])
async def test_a_body_that_is_too_long_is_413(http, router, times):
    body = b'{"prompt": "' + b"a" * 256 * 1024 * times + b'"}'

    reply = await http.post(COMPLETIONS, content=body)

    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "body_too_large"
    assert router.requests == []


async def test_a_body_that_never_ends_is_408(url):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    status = await reader.readline()

    assert status.split()[1] == b"408"
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("path", [COMPLETIONS, "/generate_stream"])
async def test_an_error_after_the_headers_is_the_last_event(http, router, path):
    body = {"prompt": "break it", "inputs": "break it", "stream": True}

    reply = await http.post(path, json=body)

    assert reply.status_code == 200
    last = json.loads(reply.text.strip().splitlines()[-1].removeprefix("data:"))
    if path == COMPLETIONS:
        assert last["error"]["message"] == "the shard died"
    else:
        assert last == {"error": "the shard died", "error_type": "generation"}
    assert "[DONE]" not in reply.text
    await router.until_running(0)


async def test_a_failure_in_the_middle_fails_a_whole_answer(http, router):
    reply = await http.post(COMPLETIONS, json={"prompt": ["ok", "break it"], "max_tokens": 9})

    assert reply.status_code == 503
    await router.until_running(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_500_that_tells_nothing(http, router, stream):
    reply = await http.post(COMPLETIONS, json={"prompt": "go boom now", "stream": stream})

    assert reply.status_code == (200 if stream else 500)
    assert reply.headers["x-request-id"]
    assert "internal error" in reply.text
    assert "a bug" not in reply.text
    await router.until_running(0)

"""What a request may ask for beside its text: priority, how long it waits, whose share it is."""

import pytest

HOUR_MS = 3_600_000
MESSAGES = [{"role": "user", "content": "a b"}]
#: (path, body, whether the fields are in `parameters`)
ROUTES = [
    ("/v1/completions", {"prompt": "a b"}, False),
    ("/v1/chat/completions", {"messages": MESSAGES}, False),
    ("/", {"inputs": "a b"}, True),
    ("/generate", {"inputs": "a b"}, True),
    ("/generate_stream", {"inputs": "a b"}, True),
]


def with_fields(body: dict, nested: bool, **fields: object) -> dict:
    return body | ({"parameters": fields} if nested else fields)


@pytest.mark.parametrize(("path", "body", "nested"), ROUTES)
async def test_priority_and_wait_reach_the_router(http, router, path, body, nested):
    fields = {"priority": -7, "max_wait_for_adapter_ms": 1500, "adapter_wait_policy": "base"}

    reply = await http.post(path, json=with_fields(body, nested, **fields))

    assert reply.status_code == 200
    (asked,) = router.requests
    assert (asked.priority, asked.max_wait_for_adapter_s) == (-7, 1.5)
    assert asked.adapter_wait_policy == "base"


@pytest.mark.parametrize("given", [{}, {"priority": None, "max_wait_for_adapter_ms": None}])
@pytest.mark.parametrize(("path", "body", "nested"), ROUTES)
async def test_without_them_a_request_waits_in_line_as_long_as_it_takes(
    http, router, path, body, nested, given
):
    reply = await http.post(path, json=with_fields(body, nested, **given))

    assert reply.status_code == 200
    (asked,) = router.requests
    assert (asked.priority, asked.max_wait_for_adapter_s) == (0, None)
    assert asked.adapter_wait_policy == "fail"


@pytest.mark.parametrize(
    "fields",
    [{"priority": 1_000_000, "max_wait_for_adapter_ms": HOUR_MS, "adapter_wait_policy": "fail"},
     {"priority": -1_000_000, "max_wait_for_adapter_ms": 1, "adapter_wait_policy": None}],
)  # fmt: skip
@pytest.mark.parametrize(("path", "body", "nested"), ROUTES)
async def test_the_bounds_themselves_are_allowed(http, path, body, nested, fields):
    reply = await http.post(path, json=with_fields(body, nested, **fields))

    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 1_000_001),
        ("priority", -1_000_001),
        ("priority", 2**80),
        ("priority", 0.5),
        ("priority", "1"),
        ("priority", True),
        ("max_wait_for_adapter_ms", 0),
        ("max_wait_for_adapter_ms", -1),
        ("max_wait_for_adapter_ms", HOUR_MS + 1),
        ("max_wait_for_adapter_ms", 1.5),
        ("max_wait_for_adapter_ms", "10"),
        ("adapter_wait_policy", "other"),
        ("adapter_wait_policy", ""),
        ("adapter_wait_policy", 1),
    ],
)
@pytest.mark.parametrize(("path", "body", "nested"), ROUTES)
async def test_a_bad_value_is_refused_by_name_and_reaches_nobody(
    http, router, path, body, nested, field, value
):
    reply = await http.post(path, json=with_fields(body, nested, **{field: value}))

    if path.startswith("/v1"):
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].endswith(field)
        assert reply.json()["error"]["code"] == "invalid_request"
    else:
        assert reply.status_code == 422
        assert reply.json()["error_type"] == "validation"
    assert field in reply.text
    assert router.requests == []


@pytest.mark.parametrize(("path", "body", "nested"), ROUTES)
@pytest.mark.parametrize(
    ("header", "key"), [("Bearer sk-1", "sk-1"), ("bearer  x", "x"), ("Basic x", None), ("", None)]
)
async def test_a_bearer_key_is_the_callers_and_shows_nowhere(
    http, router, path, body, nested, header, key
):
    reply = await http.post(path, json=body, headers={"authorization": header} if header else {})

    assert reply.status_code == 200
    (asked,) = router.requests
    assert asked.key == key
    assert "sk-1" not in repr(asked)


async def test_a_bearer_that_looks_like_a_hub_token_is_both(http, router):
    await http.post(
        "/v1/completions", json={"prompt": "a"}, headers={"authorization": "Bearer hf_1"}
    )
    await http.post(
        "/v1/completions", json={"prompt": "a"}, headers={"authorization": "Bearer sk_1"}
    )

    assert [(asked.key, asked.token) for asked in router.requests] == [
        ("hf_1", "hf_1"),
        ("sk_1", None),
    ]


async def test_every_choice_asks_the_same(http, router):
    body = {"prompt": ["a", "b"], "n": 2, "priority": 3, "max_wait_for_adapter_ms": 9}

    await http.post("/v1/completions", json=body)

    asked = [(r.prompt, r.priority, r.max_wait_for_adapter_s) for r in router.requests]
    assert asked == [("a", 3, 0.009)] * 2 + [("b", 3, 0.009)] * 2

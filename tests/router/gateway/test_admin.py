"""`/v1/models`, `/v1/adapters`, probes and metrics over HTTP."""

import re
from dataclasses import replace

import pytest
from loralane_router.adapters.facts import AtShard


async def test_models_are_the_base_and_the_adapters_with_parent_and_root(http):
    reply = await http.get("/v1/models")

    rows = {row["id"]: (row["parent"], row["root"]) for row in reply.json()["data"]}
    assert reply.json()["object"] == "list"
    assert rows == {
        "base/tiny": (None, "base/tiny"),
        "loud": ("base/tiny", "org/loud"),
        "org/a": ("base/tiny", "org/a"),
    }


@pytest.mark.parametrize("name", ["base/tiny", "org/a"])
async def test_one_model_is_found_by_an_id_with_slashes(http, name):
    reply = await http.get(f"/v1/models/{name}")

    assert (reply.json()["id"], reply.json()["object"]) == (name, "model")


async def test_an_unknown_model_is_404(http):
    reply = await http.get("/v1/models/org/none")

    assert reply.status_code == 404
    assert "org/none" in reply.json()["error"]["message"]


async def test_a_row_tells_everything_about_an_adapter(http):
    reply = await http.get("/v1/adapters")

    assert reply.json()["data"][0] == {
        "name": "loud",
        "reference": "org/loud",
        "digest": "digest-of-org/loud",
        "tier": "device",
        "rank": 8,
        "lanes": 8,
        "bytes": 4096,
        "host_bytes": 8192,
        "targets": 2,
        "modules": ["q_proj", "v_proj"],
        "rows": 0,
        "pinned": False,
        "ttl_s": 60.0,
        "last_used": 0.0,
        "load_ms": 1.5,
        "load_times": {
            "open_ms": 0.125,
            "read_ms": 0.25,
            "cast_ms": 0.5,
            "write_ms": 1.0,
            "wait_ms": 2.0,
        },
    }


async def test_where_an_adapter_is_is_told_if_there_are_several_shards(http, router):
    known = router.adapter("loud")
    here = replace(known.facts, rows=2)
    router.put(replace(known, shards=(AtShard("a:1", here), AtShard("b:2", known.facts))))

    reply = await http.get("/v1/adapters")

    (loud,) = [row for row in reply.json()["data"] if row["name"] == "loud"]
    place = {"digest": here.digest, "tier": "device", "pinned": False}
    assert loud["shards"] == [
        {"shard": "a:1", "rows": 2, **place},
        {"shard": "b:2", "rows": 0, **place},
    ]


async def test_loading_creates_once_and_then_confirms(http):
    body = {"name": "new/one", "reference": "org/x", "pin": True}

    first = await http.post("/v1/adapters", json=body)
    second = await http.post("/v1/adapters", json=body)

    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["reference"] == "org/x"
    assert first.json()["pinned"]


async def test_pins_are_set_and_lifted(http):
    on = await http.patch("/v1/adapters/org/a", json={"pinned": True})
    off = await http.patch("/v1/adapters/org/a", json={"pinned": False})

    assert (on.json()["pinned"], off.json()["pinned"]) == (True, False)


async def test_unloading_tells_what_it_freed_or_why_not(http):
    freed = await http.delete("/v1/adapters/loud")
    again = await http.delete("/v1/adapters/loud")
    used = await http.delete("/v1/adapters/org/a")

    assert freed.json() == {"name": "loud", "freed_host_bytes": 4096, "freed_lanes": 8}
    assert (again.status_code, again.json()["error"]["code"]) == (404, "adapter_not_found")
    assert (used.status_code, used.json()["error"]["code"]) == (409, "adapter_in_use")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"reference": "org/x"}, 400, "name"),
        ({"name": "", "reference": "org/x"}, 400, "name"),
        ({"name": "x", "reference": 5}, 400, "reference"),
        ({"name": "x" * 2000, "reference": "org/x"}, 400, "name"),
        ({"name": "x", "reference": "org/nope"}, 404, None),
    ],
)
async def test_a_load_that_cannot_work_is_no_success(http, body, status, param):
    reply = await http.post("/v1/adapters", json=body)

    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


async def test_vllms_routes_load_and_unload(http, router):
    loaded = await http.post("/v1/load_lora_adapter", json={"lora_name": "v", "lora_path": "org/v"})
    names = [entry.name for entry in router.adapters(9).entries]
    unloaded = await http.post("/v1/unload_lora_adapter", json={"lora_name": "v"})

    assert (loaded.status_code, unloaded.status_code) == (200, 200)
    assert "v" in names
    assert "v" not in [entry.name for entry in router.adapters(9).entries]


async def test_a_path_that_is_not_there_is_not_a_200(http):
    body = {"lora_name": "v", "lora_path": "org/nope"}

    reply = await http.post("/v1/load_lora_adapter", json=body)

    assert reply.status_code == 404


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/ping", "/startup", "/"])
async def test_readiness_follows_the_router_and_liveness_does_not(http, router, path):
    up = await http.get(path)
    router.ready = False
    down = await http.get(path)
    live = await http.get("/health/live")

    assert (up.status_code, down.status_code, live.status_code) == (200, 503, 200)
    assert down.headers["retry-after"]


async def test_metrics_count_requests_by_surface_and_status(http):
    await http.post("/v1/completions", json={"prompt": "a"})
    await http.post("/generate", json={"inputs": ""})

    reply = await http.get("/metrics")

    assert reply.headers["content-type"].startswith("text/plain")
    assert 'loralane_requests_total{status="200",surface="openai"} 1.0' in reply.text
    assert 'loralane_requests_total{status="422",surface="native"} 1.0' in reply.text


@pytest.mark.parametrize(
    ("given", "kept"), [("my-id.1", True), ("a b", False), ("x" * 200, False), ("", False)]
)
async def test_a_callers_request_id_comes_back_if_it_is_safe(http, given, kept):
    reply = await http.get("/health/live", headers={"x-request-id": given})

    answered = reply.headers["x-request-id"]
    assert (answered == given) is kept
    assert kept or re.fullmatch("[0-9a-f]{32}", answered)


async def test_the_log_has_the_path_and_no_secret(http, caplog):
    caplog.set_level("DEBUG")
    body = {"prompt": "a", "api_token": "hf_secret1"}
    headers = {"authorization": "Bearer hf_secret2"}

    await http.post("/v1/completions?token=hf_secret3", json=body, headers=headers)

    lines = [r.getMessage() for r in caplog.records if r.name.startswith("loralane_router")]
    assert any(line.startswith("POST /v1/completions 200") for line in lines)
    assert not any("hf_secret" in line for line in lines)


async def test_the_list_comes_in_pages_by_name(http, router):
    for number in range(4):
        await router.load_adapter(f"n{number}", "org/x", None)

    first = (await http.get("/v1/adapters", params={"limit": 4})).json()
    rest = (await http.get("/v1/adapters", params={"after": first["data"][-1]["name"]})).json()

    assert [row["name"] for row in first["data"]] == ["loud", "n0", "n1", "n2"]
    assert (first["object"], first["has_more"], first["total"]) == ("list", True, 6)
    assert [row["name"] for row in rest["data"]] == ["n3", "org/a"]
    assert rest["has_more"] is False


@pytest.mark.parametrize("path", ["/v1/adapters", "/v1/models"])
@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "9" * 5000, "1_0", ""])
async def test_a_page_of_no_sensible_size_is_refused(http, path, limit):
    reply = await http.get(path, params={"limit": limit})

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "limit")


async def test_models_go_on_behind_the_first_thousand(http, router):
    for number in range(1500):
        await router.load_adapter(f"n{number:04}", "org/x", None)

    first = (await http.get("/v1/models")).json()
    last = first["data"][-1]["id"]
    rest = (await http.get("/v1/models", params={"after": last})).json()

    ids = [row["id"] for row in first["data"] + rest["data"]]
    assert (len(first["data"]), first["has_more"], rest["has_more"]) == (1001, True, False)
    assert ids[0] == "base/tiny"
    assert ids[1:] == sorted(ids[1:])
    assert len(set(ids)) == len(ids) == 1503


async def test_a_dry_run_tells_what_an_adapter_is(http, router):
    body = {"reference": "org/x", "tensors": True, "api_token": "t"}

    reply = await http.post("/v1/adapters/validate", json=body)

    assert reply.status_code == 200
    assert reply.json() == {
        "valid": True,
        "reference": "org/x",
        "digest": "digest-of-org/x",
        "rank": 8,
        "lanes": 8,
        "bytes": 4096,
        "targets": 2,
        "modules": ["q_proj", "v_proj"],
        "notes": ["read with t"],
    }
    assert router.adapter("org/x") is None


@pytest.mark.parametrize("reference", ["org/nope", "org/secret", "org/wide", "org/bad", "org/huge"])
async def test_a_dry_run_says_what_a_request_would_be_answered(http, reference):
    asked = await http.post("/v1/completions", json={"model": reference, "prompt": "a"})

    reply = await http.post("/v1/adapters/validate", json={"reference": reference})

    assert reply.status_code == 200
    assert reply.json() == {"valid": False, "status": asked.status_code, **asked.json()}


@pytest.mark.parametrize("body", [{}, {"reference": ""}, {"reference": 5}])
async def test_a_dry_run_of_nothing_is_a_bad_request(http, body):
    reply = await http.post("/v1/adapters/validate", json=body)

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reference")


async def test_an_adapter_may_be_called_validate(http):
    await http.post("/v1/adapters", json={"name": "validate", "reference": "org/x"})

    pinned = await http.patch("/v1/adapters/validate", json={"pinned": True})
    deleted = await http.delete("/v1/adapters/validate")

    assert (pinned.status_code, deleted.status_code) == (200, 200)


async def test_a_time_to_live_is_set_and_lifted(http):
    body = {"name": "x", "reference": "org/x"}

    set_ = await http.post("/v1/adapters", json={**body, "ttl_s": 2.5})
    lifted = await http.post("/v1/adapters", json={**body, "ttl_s": 0})

    assert (set_.json()["ttl_s"], lifted.json()["ttl_s"]) == (2.5, 0)


@pytest.mark.parametrize("ttl", [-1, 1e300, "soon"])
async def test_a_time_to_live_that_is_none_is_refused(http, ttl):
    body = {"name": "x", "reference": "org/x", "ttl_s": ttl}

    reply = await http.post("/v1/adapters", json=body)

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "ttl_s")

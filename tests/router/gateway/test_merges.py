"""`merged_adapters` on LoRAX's routes."""

import pytest
from loralane_router.requests import Merge

MERGED = {
    "ids": ["org/a", "loud"],
    "weights": [0.5, 2],
    "merge_strategy": "ties",
    "density": 0.5,
    "majority_sign_method": "frequency",
}


async def generate(http, path="/generate", **parameters):
    return await http.post(path, json={"inputs": "a b", "parameters": parameters})


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
async def test_merged_adapters_reach_the_router_as_one_merge(http, router, path):
    reply = await generate(http, path, adapter_id=None, merged_adapters=MERGED, api_token="hf_t")

    assert reply.status_code == 200
    (request,) = router.requests
    members = (("org/a", 0.5), ("loud", 2.0))
    assert request.merge == Merge(members, "ties", 0.5, "frequency")
    assert (request.adapter, request.token) == ("", "hf_t")
    assert reply.headers["x-loralane-adapter-digest"] == "digest-of-org/a&loud"


@pytest.mark.parametrize(
    "given",
    [
        {"ids": ["org/a", "loud"]},
        {"ids": ["org/a", "loud"], "weights": None, "merge_strategy": None, "density": None},
        {"ids": ["org/a", "loud"], "weights": [1, 1], "majority_sign_method": None},
    ],
)
async def test_what_is_left_out_or_null_has_the_defaults_of_lorax(http, router, given):
    await generate(http, merged_adapters=given)

    (request,) = router.requests
    assert request.merge == Merge((("org/a", 1.0), ("loud", 1.0)), "linear", 0.0, "total")


async def test_an_empty_adapter_id_beside_a_merge_is_none(http, router):
    reply = await generate(http, adapter_id="", merged_adapters=MERGED)

    assert reply.status_code == 200
    assert router.requests[0].merge is not None


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"adapter_id": "org/a", "merged_adapters": MERGED}, "exclude each other"),
        ({"merged_adapters": MERGED | {"weights": [1.0]}}, "2 ids and 1 weights"),
        ({"merged_adapters": MERGED | {"weights": []}}, "2 ids and 0 weights"),
        ({"merged_adapters": MERGED | {"ids": ["x" * 5000, "b"]}}, "merged_adapters.ids is longer"),
        ({"merged_adapters": MERGED | {"ids": None}}, "parameters.merged_adapters.ids"),
        ({"merged_adapters": MERGED | {"ids": "org/a"}}, "parameters.merged_adapters.ids"),
        ({"merged_adapters": MERGED | {"weights": ["1"] * 2}}, "merged_adapters.weights"),
        ({"merged_adapters": MERGED | {"density": "much"}}, "parameters.merged_adapters.density"),
        ({"merged_adapters": MERGED | {"merge_strategy": 1}}, "merged_adapters.merge_strategy"),
        ({"merged_adapters": ["org/a"]}, "parameters.merged_adapters"),
        ({"merged_adapters": {}}, "parameters.merged_adapters.ids is required"),
    ],
)
async def test_a_merge_that_cannot_be_read_is_refused_by_name(http, router, parameters, named):
    reply = await generate(http, **parameters)

    assert (reply.status_code, reply.json()["error_type"]) == (422, "validation")
    assert named in reply.json()["error"]
    assert router.requests == []


async def test_a_member_that_cannot_be_served_fails_the_request(http):
    reply = await generate(http, merged_adapters={"ids": ["org/nope"], "weights": [1]})

    assert (reply.status_code, reply.json()["error_type"]) == (404, "generation")

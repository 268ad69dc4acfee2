"""Merges through every surface that takes them: native HTTP and gRPC."""

from collections.abc import Mapping
from typing import Any

import grpc
import httpx
import pytest
from loralane_proto import inference_pb2 as pb
from loralane_proto import inference_pb2_grpc

from tests import reference
from tests.product import Served, World

MEMBERS = ("a", "d", "g")
WEIGHTS = (0.5, -1.0, 0.25)
PROMPT, TOKENS = "hello world", 16


def by_peft(world: World) -> str:
    folders = [world.root / member for member in MEMBERS]
    with reference.together(world.model, folders, WEIGHTS, combination_type="cat") as adapted:
        return world.decode(reference.continued(adapted, [world.ids(PROMPT)], TOKENS)[0])


def generate(served: Served, merged: Mapping[str, Any]) -> httpx.Response:
    parameters = {"merged_adapters": merged, "max_new_tokens": TOKENS}
    body = {"inputs": PROMPT, "parameters": parameters}
    return httpx.post(f"{served.url}/generate", json=body, timeout=60)


def test_adapters_of_any_ranks_are_added_by_cat(served: Served, world: World) -> None:
    merged = {"ids": MEMBERS, "weights": WEIGHTS, "merge_strategy": "cat"}

    reply = generate(served, merged)

    assert reply.json()["generated_text"] == by_peft(world)
    assert len(reply.headers["x-loralane-adapter-digest"]) == 64


def test_grpc_takes_merges_too(served: Served, world: World) -> None:
    members = [pb.MergeMember(adapter=a, weight=w) for a, w in zip(MEMBERS, WEIGHTS, strict=True)]
    merge = pb.Merge(members=members, strategy="cat")
    request = pb.GenerateRequest(merge=merge, prompt=PROMPT, max_tokens=TOKENS)

    with grpc.insecure_channel(served.grpc) as channel:
        replies = list(inference_pb2_grpc.InferenceStub(channel).Generate(request))

    assert "".join(reply.text for reply in replies) == by_peft(world)
    assert len(replies[0].adapter_digest) == 64


def test_a_merge_is_pinned_and_unloaded_by_its_name(served: Served) -> None:
    generate(served, {"ids": ["a", "b"], "weights": [1, 3], "merge_strategy": "cat"})
    name = "merge:cat(a*1.0+b*3.0)"

    url = f"{served.url}/v1/adapters/{name}"
    pinned = httpx.patch(url, json={"pinned": True}).json()
    freed = httpx.delete(url)

    assert (pinned["name"], pinned["pinned"], pinned["tier"]) == (name, True, "device")
    assert pinned["lanes"] == 16
    assert freed.status_code == 200


@pytest.mark.parametrize(
    ("merged", "status", "named"),
    [
        ({"merge_strategy": "slerp"}, 422, "'slerp' must be one of linear, ties"),
        ({"merge_strategy": "ties", "density": 0}, 422, "ties needs a density"),
        ({"merge_strategy": "ties"}, 422, "ties needs a density"),
        ({"ids": ["a", "d"]}, 422, "the strategy cat"),
        ({"ids": ["a", ""]}, 422, "'' means the base"),
        ({"weights": [0, 0]}, 422, "all weights of the merge are 0"),
        ({"ids": ["a"] * 9, "weights": None}, 422, "1 to 8 adapters, not 9"),
        ({"ids": [], "weights": []}, 422, "1 to 8 adapters, not 0"),
    ],
)
def test_what_gives_no_adapter_is_refused_by_name(
    served: Served, merged: Mapping[str, Any], status: int, named: str
) -> None:
    reply = generate(served, {"ids": ["a", "e"], "weights": [0.5, 0.5]} | merged)

    assert reply.status_code == status
    assert named in reply.json()["error"]

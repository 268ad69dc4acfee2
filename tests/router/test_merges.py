"""Several adapters as one, from the router's surfaces to the shard."""

import pytest
from loralane_proto import inference_pb2
from loralane_router.errors import RequestError
from loralane_router.inference import text_request
from loralane_router.requests import Merge, Parameters, TextRequest


def ask(merge: Merge, token=None) -> TextRequest:
    return TextRequest("", "a", Parameters(max_tokens=2), token, merge)


async def answer(router, request) -> str:
    generation = await router.open(request)
    return "".join([delta.text async for delta in generation])


async def failure(router, request) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await answer(router, request)
    return caught.value


async def test_a_merge_is_an_adapter_of_its_own(start_shard, start_router):
    shard = await start_shard({"two": {"increment": 2}, "three": {"increment": 3}})
    router = await start_router(shard)
    merge = Merge((("two", 2.0), ("three", -1.0)), "ties", 0.25, "frequency")

    generation = await router.open(ask(merge))
    text = "".join([delta.text async for delta in generation])

    assert text == "bc"
    assert generation.adapter == "merge:ties(two+three)"
    assert generation.adapter_digest == "digest-of-merge:ties(two+three)"
    assert [admission.digest for admission in shard.admissions] == [generation.adapter_digest]
    (sent,) = shard.merges
    assert (sent.strategy, sent.density, sent.majority_sign) == ("ties", 0.25, "frequency")


async def test_aliases_of_members_are_resolved_and_the_merge_is_listed(start_shard, start_router):
    shard = await start_shard({"org/two": {"increment": 2}, "org/three": {"increment": 3}})
    router = await start_router(shard)
    await router.load_adapter("deux", "org/two", None)

    text = await answer(router, ask(Merge((("deux", 1.0), ("org/three", 1.0)))))

    assert text == "fk"
    names = [entry.name for entry in router.adapters(100).entries]
    assert names == ["deux", "merge:linear(org/two+org/three)", "org/three"]


async def test_a_token_that_does_not_reach_one_member_reaches_nothing(start_shard, start_router):
    shard = await start_shard(
        {"two": {"increment": 2}, "secret": {"increment": 3, "token": "good"}}
    )
    router = await start_router(shard)
    merge = Merge((("two", 1.0), ("secret", 1.0)))

    assert await answer(router, ask(merge, token="good")) == "fk"
    error = await failure(router, ask(merge, token="bad"))

    assert error.status.http == 403
    assert shard.resolved[-1] == ("secret", "bad")


async def test_an_unknown_member_is_not_found(start_shard, start_router):
    router = await start_router(await start_shard({"two": {"increment": 2}}))

    error = await failure(router, ask(Merge((("two", 1.0), ("nope", 1.0)))))

    assert error.status.http == 404
    assert "nope" in error.message


@pytest.mark.parametrize("name", ["", "org/counter", "counter"])
async def test_the_base_is_no_member(start_shard, start_router, name):
    shard = await start_shard({"two": {"increment": 2}})
    router = await start_router(shard)

    error = await failure(router, ask(Merge((("two", 1.0), (name, 1.0)))))

    assert error.status.http == 400
    assert repr(name) in error.message
    assert shard.merges == []


async def test_names_that_are_no_text_are_refused_without_the_token(start_shard, start_router):
    router = await start_router(await start_shard())

    error = await failure(router, ask(Merge((("a\ud800", 1.0), ("b", 1.0))), token="hf_secret"))

    assert error.status.http == 400
    assert error.__cause__ is None
    assert "hf_secret" not in error.message


def test_grpc_requests_name_members_and_leave_out_what_they_like():
    request = inference_pb2.GenerateRequest(
        prompt="a",
        merge=inference_pb2.Merge(members=[{"adapter": "x", "weight": 0.5}]),  # type: ignore[list-item]
    )

    assert text_request(request).merge == Merge((("x", 0.5),), "linear", 0.0, "total")


def test_grpc_requests_name_an_adapter_or_a_merge():
    request = inference_pb2.GenerateRequest(
        adapter="x", prompt="a", merge=inference_pb2.Merge(strategy="cat")
    )

    with pytest.raises(RequestError, match="exclude each other"):
        text_request(request)

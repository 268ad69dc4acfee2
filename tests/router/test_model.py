"""One model per router."""

import asyncio

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.errors import RequestError
from loralane_router.model import CommonModel, OtherModel

from tests.router.conftest import tokenizer_files

SERVED = {
    "model_id": "org/counter",
    "dtype": "int",
    "vocab_size": 260,
    "max_model_len": 64,
    "eos_token_ids": [257, 258],
}


def served(**changes) -> pb.InfoReply:
    return pb.InfoReply(**(SERVED | changes))


async def files() -> dict[str, bytes]:
    return tokenizer_files()


async def never() -> dict[str, bytes]:
    raise AssertionError("the tokenizer is known already")


async def test_the_first_shard_says_what_the_model_is_and_the_next_needs_no_tokenizer():
    common = CommonModel()

    await common.join("a", served(), files)
    await common.join("b", served(eos_token_ids=[258, 257], device="another"), never)

    assert common.model.info.model_id == "org/counter"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_id": "org/other"}, "model 'org/other' is not 'org/counter'"),
        ({"dtype": "float"}, "dtype 'float' is not 'int'"),
        ({"vocab_size": 261}, "vocabulary 261 is not 260"),
        ({"max_model_len": 32}, "max_model_len 32 is not 64"),
        ({"eos_token_ids": [257]}, r"end tokens \[257\] is not \[257, 258\]"),
    ],
)
async def test_a_shard_that_differs_is_told_in_what(change, words):
    common = CommonModel()
    await common.join("a", served(), files)

    with pytest.raises(OtherModel, match=words):
        await common.join("b", served(**change), never)

    assert common.model.info.max_model_len == 64


async def test_who_was_refused_does_not_take_over_while_the_others_are_only_away():
    common = CommonModel()
    await common.join("a", served(), files)
    common.leave("a")

    with pytest.raises(OtherModel):
        await common.join("b", served(max_model_len=32), files)

    await common.join("a", served(), files)
    assert common.model.info.max_model_len == 64


async def test_a_shard_may_come_back_with_another_model_when_no_other_is_connected():
    common = CommonModel()
    await common.join("a", served(), files)
    common.leave("a")

    await common.join("a", served(max_model_len=32), files)

    assert common.model.info.max_model_len == 32


async def test_who_was_refused_may_say_what_the_model_is_once_the_others_are_gone_for_good():
    common = CommonModel()
    await common.join("a", served(), files)
    with pytest.raises(OtherModel):
        await common.join("b", served(max_model_len=32), files)

    common.let_go("a")
    await common.join("b", served(max_model_len=32), files)

    assert common.model.info.max_model_len == 32


async def test_of_two_that_come_at_once_one_says_what_the_model_is():
    common = CommonModel()

    results = await asyncio.gather(
        common.join("a", served(), files),
        common.join("b", served(max_model_len=32), files),
        return_exceptions=True,
    )

    (refused,) = [result for result in results if result is not None]
    assert isinstance(refused, OtherModel)


async def test_a_shard_whose_tokenizer_cannot_be_had_does_not_join():
    common = CommonModel()

    async def broken() -> dict[str, bytes]:
        raise RequestError(pb.ERROR_KIND_UNAVAILABLE, "it went away")

    with pytest.raises(RequestError, match="went away"):
        await common.join("a", served(), broken)
    await common.join("b", served(max_model_len=32), files)

    assert common.model.info.max_model_len == 32

import json

import pytest
from loralane_router.errors import RequestError
from loralane_router.text.tokens import Codec
from tokenizers import Tokenizer, models, pre_tokenizers


def files(**tokenizer_fields) -> dict[str, bytes]:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return {
        "tokenizer.json": json.dumps(json.loads(tokenizer.to_str()) | tokenizer_fields).encode()
    }


async def test_truncation_and_padding_of_the_file_do_not_apply():
    truncation = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    codec = Codec(files(truncation=truncation), 3)

    assert await codec.encode("a b a b", special=True) == [0, 1, 0, 1]


async def test_a_long_text_is_encoded_the_same():
    codec = Codec(files(), 3)

    assert await codec.encode("a b " * 3000, special=True) == [0, 1] * 3000


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": b"{}"}, "cannot be read"),
        ({"tokenizer.json": b"\xff\xfe"}, "cannot be read"),
    ],
)
def test_an_unusable_tokenizer_is_a_typed_error(broken, words):
    with pytest.raises(RequestError, match=words):
        Codec(broken, 3)


def test_ids_that_the_tokenizer_does_not_know_leave_no_text():
    codec = Codec(files(), 10)

    assert codec.is_silent(9)
    assert codec.text(9) == ""
    assert codec.check_ids([9]) == [9]

import json
import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from loralane_server.adapters.formats.headers import MAX_HEADER_BYTES, header_end, parse_header
from loralane_server.errors import AdapterCorrupt
from safetensors import safe_open

from tests.server.adapters.samples import FUZZ, header_bytes, lora, safetensors


def file_of(header: Any, body: int = 0, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(body)


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), **more: Any) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


def test_every_tensor_is_where_the_safetensors_library_finds_it(tmp_path: Any) -> None:
    file = safetensors(lora())
    (tmp_path / "f.safetensors").write_bytes(file)

    header = parse_header(file, len(file), "f.safetensors")

    with safe_open(tmp_path / "f.safetensors", "np") as theirs:
        assert {tensor.name for tensor in header.tensors} == set(theirs.keys())
        for tensor in header.tensors:
            array = theirs.get_tensor(tensor.name)
            assert tensor.shape == array.shape
            assert file[tensor.begin : tensor.end] == array.tobytes()


def test_the_bytes_before_the_tensors_are_enough() -> None:
    file = safetensors(lora())

    end = header_end(file[:8], len(file), "f")

    assert end == header_bytes(file)
    assert parse_header(file[:end], len(file), "f") == parse_header(file, len(file), "f")


@pytest.mark.parametrize(
    "file",
    [
        file_of({}),
        file_of({"__metadata__": {"format": "pt"}}),
        file_of({"x": entry(shape=(0, 4), offsets=(0, 0)), "y": entry()}, 4),
        file_of({"y": entry(offsets=(4, 8)), "x": entry()}, 8),
        file_of({"x": entry("F16", (), (0, 2))}, 2),
        file_of({"x": entry("F4", (2,), (0, 1))}, 1),
    ],
)
def test_odd_but_valid_files_are_read(file: bytes) -> None:
    header = parse_header(file, len(file), "f")

    assert sum(tensor.end - tensor.begin for tensor in header.tensors) == len(file) - header_bytes(
        file
    )


BROKEN = {
    "empty": b"",
    "four bytes": b"\x10\0\0\0",
    "length alone": struct.pack("<Q", 64),
    "beyond the limit": file_of({}, 16, length=MAX_HEADER_BYTES + 1),
    "beyond the file": file_of({}, 16, length=4096),
    "all ones": file_of({}, 16, length=2**64 - 1),
    "no JSON": file_of(b"{oops"),
    "a list": file_of([]),
    "deep": file_of(b'{"a":' * 50_000),
    "no UTF-8": file_of(b'{"\xff":1}'),
    "half a character": file_of(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4),
    "twice": file_of(
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        4,
    ),
    "unknown dtype": file_of({"x": entry("Q9")}, 4),
    "dtype of another type": file_of({"x": entry(dtype=[])}, 4),
    "not an object": file_of({"x": 4}),
    "more keys": file_of({"x": entry(more=1)}, 4),
    "negative shape": file_of({"x": entry(shape=[-1])}, 4),
    "true as shape": file_of({"x": entry(shape=[True])}, 4),
    "shape that overflows": file_of({"x": entry(shape=[2**40, 2**40])}, 4),
    "huge number": file_of(
        b'{"x":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', 4
    ),
    "size unlike shape": file_of({"x": entry(shape=[2])}, 4),
    "offsets reversed": file_of({"x": entry(offsets=[4, 0])}, 4),
    "three offsets": file_of({"x": entry(offsets=[0, 4, 8])}, 4),
    "gap at the start": file_of({"x": entry(offsets=[4, 8])}, 8),
    "gap": file_of({"x": entry(), "y": entry(offsets=[8, 12])}, 12),
    "overlap": file_of({"x": entry(shape=[2], offsets=[0, 8]), "y": entry(offsets=[4, 8])}, 8),
    "same bytes twice": file_of({"x": entry(), "y": entry()}, 4),
    "one byte short": file_of({"x": entry()}, 3),
    "one byte more": file_of({"x": entry()}, 5),
    "metadata": file_of({"__metadata__": {"a": 1}}),
    "too many": file_of({f"{i}": entry(shape=[0], offsets=[0, 0]) for i in range(8193)}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_breach_of_the_format_is_corrupt_and_names_the_file(name: str) -> None:
    file = BROKEN[name]

    with pytest.raises(AdapterCorrupt, match=r"^f\.st .*safetensors header"):
        parse_header(file, len(file), "f.st")


@pytest.mark.parametrize(
    ("file", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS"),
        (b"<html><body>sign in</body></html>", "HTML"),
        (b"\n <!DOCTYPE html>", "HTML"),
    ],
)
def test_what_is_no_safetensors_file_is_recognised(file: bytes, word: str) -> None:
    with pytest.raises(AdapterCorrupt, match=f"{word}.*safetensors"):
        parse_header(file, len(file), "f.st")


def test_a_file_that_ends_early_is_called_truncated() -> None:
    file = safetensors(lora())

    for size in (0, 4, 8, len(file) // 2, len(file) - 1):
        with pytest.raises(AdapterCorrupt, match="truncated"):
            parse_header(file[:size], size, "f")


@FUZZ
@given(st.binary(max_size=300), st.integers(0, 400))
@example(b"", 0)
def test_no_bytes_make_it_raise_anything_else(head: bytes, size: int) -> None:
    try:
        parse_header(head, size, "f")
    except AdapterCorrupt as error:
        error.to_proto()


NUMBERS = st.integers(-1, 8) | st.integers() | st.none() | st.booleans()
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "F4", 4]),
        "shape": st.lists(NUMBERS, max_size=3) | st.none(),
        "data_offsets": st.lists(NUMBERS, max_size=3) | st.none(),
    }
)


@FUZZ
@given(st.dictionaries(st.text(max_size=3), ENTRIES, max_size=4), st.integers(0, 40))
def test_what_passes_covers_the_file_without_gap_or_overlap(header: Any, body: int) -> None:
    file = file_of(header, body)
    try:
        tensors = parse_header(file, len(file), "f").tensors
    except AdapterCorrupt:
        return

    assert sum(tensor.end - tensor.begin for tensor in tensors) == body
    assert all(a.end == b.begin for a, b in pairwise(tensors))

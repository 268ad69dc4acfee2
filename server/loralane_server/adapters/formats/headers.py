"""The strict reading of a safetensors header: where each tensor is, before any of it is read.

A file is 8 bytes of header length, the header (JSON), then the tensors' bytes. Everything is
bounded before it is allocated, so a hostile file costs at most one header of `MAX_HEADER_BYTES`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

from loralane_server.errors import AdapterCorrupt

PREFIX_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 1 << 20
MAX_TENSORS: Final = 8192
_MAX_FILE_BYTES: Final = 1 << 62
_INTS: Final = frozenset({int})
_KEYS: Final = {"dtype", "shape", "data_offsets"}

#: Width in bits of each dtype of the format.
_BITS: Final[dict[str, int]] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorRef(NamedTuple):
    """Where a tensor's bytes are: `[begin, end)` of the file itself, header included.

    A tuple, because a hostile header has 8,192 of them and must be read in 50 ms.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """One file's tensors, in the order of their bytes."""

    file: str
    size: int
    tensors: tuple[TensorRef, ...]
    #: The header as it stands in the file; part of the adapter's digest.
    raw: bytes = field(repr=False)


def header_end(prefix: bytes, file_size: int, file_name: str) -> int:
    """Where the header ends, from the file's first bytes: how many have to be read.

    Raises:
        AdapterCorrupt: too short, a Git LFS pointer, an HTML page, or an impossible length.
    """
    if len(prefix) < PREFIX_BYTES or file_size < PREFIX_BYTES:
        _corrupt(file_name, "is truncated: no safetensors header")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > MAX_HEADER_BYTES:  # as text always is, read as a number
        if prefix.startswith(b"version "):
            _corrupt(file_name, "is a Git LFS pointer, not a safetensors file; run git lfs pull")
        if prefix.lstrip().startswith(b"<"):
            _corrupt(file_name, "is an HTML page, not a safetensors file; download it again")
        _corrupt(file_name, f"has a safetensors header longer than {MAX_HEADER_BYTES} bytes")
    if PREFIX_BYTES + length > file_size:
        _corrupt(file_name, "is truncated: its safetensors header runs past the end of the file")
    return PREFIX_BYTES + length


def parse_header(head: bytes, file_size: int, file_name: str) -> FileHeader:
    """Read a header from the bytes before the tensors (`head` may go on behind them).

    Raises:
        AdapterCorrupt: any breach of the format; the message names the file and the tensor.
    """
    end = header_end(head, file_size, file_name)
    raw = head[PREFIX_BYTES:end]
    if len(raw) < end - PREFIX_BYTES:
        _corrupt(file_name, "is truncated: its safetensors header is incomplete")
    entries = _entries(raw, file_name)
    tensors = [_tensor(name, entry, end, file_name) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_layout(tensors, end, file_size, file_name)
    return FileHeader(file_name, file_size, tuple(tensors), raw)


def _corrupt(file_name: str, what: str, cause: Exception | None = None) -> NoReturn:
    raise AdapterCorrupt(f"{file_name} {what}") from cause


def _entries(raw: bytes, file_name: str) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        _corrupt(file_name, "has a safetensors header that is not a JSON object")
    try:
        entries = _without_repeats(raw)
        if b"\\u" in raw:  # half characters can only be written so
            for name in entries:
                name.encode("utf-8")
    except (ValueError, RecursionError) as exc:
        _corrupt(file_name, "has a safetensors header that is not valid JSON", exc)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _corrupt(file_name, "has a safetensors header whose __metadata__ is not text")
    if len(entries) > MAX_TENSORS:
        _corrupt(file_name, f"has a safetensors header of more than {MAX_TENSORS} tensors")
    return entries


def _without_repeats(raw: bytes) -> dict[str, Any]:
    """Read a JSON object; raises `ValueError` if a name occurs twice in it, or in one inside it.

    Each pair of a name and a value has a colon: as many colons as pairs means that none was lost.
    Only where there are more, perhaps inside names, each object has to be looked at.
    """
    text = raw.decode("utf-8")
    entries: dict[str, Any] = json.loads(text)
    pairs = len(entries) + sum(len(v) for v in entries.values() if isinstance(v, dict))
    if text.count(":") > pairs:
        entries = json.loads(text, object_pairs_hook=_unique)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _tensor(name: str, entry: object, base: int, file_name: str) -> TensorRef:
    def refuse(what: str) -> NoReturn:
        _corrupt(file_name, f"has a safetensors header whose {name[:200]!a} {what}")

    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        refuse("is not a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        refuse("has an unknown dtype")
    if not _is_naturals(shape):
        refuse("has an impossible shape")
    if not _is_range(offsets):
        refuse("has impossible data_offsets")
    if (offsets[1] - offsets[0]) * 8 != math.prod(shape) * _BITS[dtype]:
        refuse("has data_offsets that do not fit its shape and dtype")
    return TensorRef(file_name, name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


# Called 8,192 times for a hostile header, which must not take long: no generators here.
def _is_naturals(value: object) -> bool:
    return (
        type(value) is list
        and len(value) <= 8
        and _INTS.issuperset(map(type, value))
        and (not value or (min(value) >= 0 and max(value) < _MAX_FILE_BYTES))
    )


def _is_range(value: object) -> bool:
    if type(value) is not list or len(value) != 2:
        return False
    begin, end = value
    return type(begin) is int and type(end) is int and 0 <= begin <= end < _MAX_FILE_BYTES


def _check_layout(tensors: Sequence[TensorRef], start: int, file_size: int, file_name: str) -> None:
    at = start
    for tensor in tensors:
        if tensor.begin != at:
            _corrupt(
                file_name,
                f"has a safetensors header with a gap or an overlap before {tensor.name[:200]!a}",
            )
        at = tensor.end
    if at > file_size:
        _corrupt(
            file_name, f"is truncated: safetensors header promises {at} bytes, not {file_size}"
        )
    if at < file_size:
        _corrupt(file_name, f"has {file_size - at} bytes that its safetensors header does not name")

"""What every source finds: an adapter's config, the headers of its files, and a way to the bytes.

Also what an adapter's folder must look like, which is the same on a disk and on the hub.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from loralane_server.adapters.formats.headers import FileHeader
from loralane_server.errors import AdapterCorrupt, AdapterIncompatible, AdapterNotFound

WEIGHTS_FILE: Final = "adapter_model.safetensors"
SHARDS_FILE: Final = "adapter_model.safetensors.index.json"
MAX_SHARDS_FILE_BYTES: Final = 4 << 20
#: Where other tools put what we do not read; naming them tells the user what to do.
FOREIGN_FILES: Final = ("adapter_model.bin", "adapter_model.pt", "adapters.safetensors")
_MAX_SHARDS: Final = 64
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors")


@dataclass(frozen=True, slots=True)
class Located:
    """An adapter that was found; no tensor byte has been read.

    `open_file(name)` gives the path of one of its files, the config too, no link itself; it may be
    slow: from the hub and S3 it downloads.
    It raises `AdapterCorrupt` when the bytes are no longer those that `identity` names, so a
    reader that calls it before *and* after reading knows what it has read.
    """

    reference: str
    kind: Literal["local", "hub", "s3"]
    config: bytes = field(repr=False)
    headers: tuple[FileHeader, ...] = field(repr=False)
    #: What names the files' bytes without reading them; see each source.
    identity: tuple[str, ...]
    open_file: Callable[[str], Path] = field(repr=False, compare=False)
    #: Whether `open_file` needs no network.
    is_on_disk: Callable[[], bool] = field(repr=False, compare=False)


def parse_shards(raw: bytes) -> dict[str, str]:
    """Read the index of a sharded adapter: tensor name to file name.

    Raises:
        AdapterCorrupt: not such an index, or a file that is not a plain name in the same folder.
    """
    try:
        weight_map = json.loads(raw.decode("utf-8"))["weight_map"]
        files = dict(weight_map)
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise AdapterCorrupt(f"{SHARDS_FILE} is not JSON with a weight_map") from exc
    for file in files.values():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
            raise AdapterCorrupt(
                f"{SHARDS_FILE}: weight_map must name safetensors files of the same folder, "
                f"without any path; found {ascii(file)[:80]}"
            )
    if not files or len(set(files.values())) > _MAX_SHARDS:
        raise AdapterCorrupt(f"{SHARDS_FILE}: weight_map must name 1 to {_MAX_SHARDS} files")
    return files


def check_shards(weight_map: Mapping[str, str], headers: Sequence[FileHeader]) -> None:
    """Raise `AdapterCorrupt` unless every tensor is where the map says, and no other is there."""
    found = {(tensor.name, tensor.file) for header in headers for tensor in header.tensors}
    for name, file in sorted(found.symmetric_difference(weight_map.items())):
        place = "is not in" if (name, file) not in found else "is unknown to weight_map but in"
        raise AdapterCorrupt(f"{SHARDS_FILE}: tensor {name[:200]!a} {place} {file}")


def no_weights(has: Callable[[str], bool]) -> AdapterIncompatible | AdapterNotFound:
    """The error for a folder without a file that we read; `has` tells which others it holds."""
    foreign = next(filter(has, FOREIGN_FILES), None)
    if foreign is None:
        return AdapterNotFound(f"{WEIGHTS_FILE} is missing")
    return AdapterIncompatible(
        f"{foreign} is not read; save the adapter with PEFT as safetensors ({WEIGHTS_FILE})"
    )

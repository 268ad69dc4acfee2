"""The real reading path: from an adapter's two files to the map of its targets, no tensor read."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from loralane_server.adapters.formats.headers import FileHeader, parse_header
from loralane_server.adapters.formats.index import AdapterIndex, build_index
from loralane_server.adapters.formats.spec import parse_spec
from loralane_server.adapters.sources.files import Reads, read_header
from loralane_server.adapters.sources.located import WEIGHTS_FILE, Located

from tests.server.adapters.samples import BASE

#: As deep as the models that people serve, so that work per layer shows.
_DEEP: Final = replace(BASE, layers=32)
#: Files up to this size are also written and read as files.
_MOST_WRITTEN: Final = 4 << 20


@dataclass(frozen=True)
class Case:
    """One input: a config, the bytes before the tensors, and how large the weights file is."""

    config: bytes
    head: bytes
    size: int
    base: Literal["shallow", "deep"] = "deep"
    #: Whether the header is read from a file on a disk instead of memory.
    on_disk: bool = False


def read(case: Case, folder: Path) -> AdapterIndex:
    """Read an adapter as a shard resolves it. Raises ShardError; anything else is a defect."""
    header = _header(case, folder)
    located = Located(
        reference="org/fuzz",
        kind="local",
        config=case.config,
        headers=(header,),
        identity=("fuzz",),
        open_file=folder.joinpath,
        is_on_disk=lambda: True,
    )
    base = _DEEP if case.base == "deep" else BASE
    return build_index(parse_spec(case.config), located, base)


def _header(case: Case, folder: Path) -> FileHeader:
    if not case.on_disk or case.size > _MOST_WRITTEN:
        return parse_header(case.head, case.size, WEIGHTS_FILE)
    path = folder / WEIGHTS_FILE
    with path.open("wb") as file:
        file.write(case.head[: case.size])
        file.truncate(case.size)  # zeros behind the head take no room
    return read_header(path, WEIGHTS_FILE, Reads())[0]

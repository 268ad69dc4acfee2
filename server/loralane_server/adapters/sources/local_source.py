"""Adapters in folders of this machine."""

import os
from dataclasses import dataclass
from pathlib import Path

from loralane_server.adapters.formats.fields import CONFIG_FILE, MAX_CONFIG_BYTES
from loralane_server.adapters.sources.files import (
    Reads,
    StatIdentity,
    identity_of,
    read_header,
    read_whole,
)
from loralane_server.adapters.sources.located import (
    MAX_SHARDS_FILE_BYTES,
    SHARDS_FILE,
    WEIGHTS_FILE,
    Located,
    check_shards,
    no_weights,
    parse_shards,
)
from loralane_server.errors import AdapterCorrupt, AdapterNotFound


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A folder. `roots` are where its files must lie, links followed; empty = anywhere.

    Only the operator's own aliases may lie anywhere.
    """

    folder: Path
    roots: tuple[Path, ...] = ()

    def file(self, name: str) -> Path:
        """The path of one of its files; raises `AdapterNotFound` if it leads out of the roots."""
        path = Path(os.path.realpath(self.folder / name))
        if self.roots and not any(root in path.parents for root in self.roots):
            raise AdapterNotFound(f"{name} leads out of the --adapter-root through a link")
        return path

    def has(self, name: str) -> bool:
        """Whether the folder holds a file of this name."""
        return os.path.lexists(self.folder / name)


@dataclass(frozen=True, slots=True)
class _Opener:
    """Gives the paths of files that are still those which were resolved.

    One for each adapter that is known, so it holds little: a `Path` is five times its text.
    """

    folder: str
    roots: tuple[Path, ...]
    #: One line for each file, as `_line`.
    identity: tuple[str, ...]

    def __call__(self, name: str) -> Path:
        path = LocalPlace(Path(self.folder), self.roots).file(name)
        if _line(name, identity_of(path)) not in self.identity:
            raise AdapterCorrupt(f"{name} has changed since it was resolved; request it again")
        return path


class LocalSource:
    """Finds adapters in folders. Its identity for a file is its `StatIdentity`."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def is_current(self, place: LocalPlace, identity: tuple[str, ...]) -> bool:
        """Whether the files are still those of `identity`; reads no byte of them.

        Raises:
            AdapterNotFound: one of them is gone.
        """
        names = (line.partition(":")[0] for line in identity)
        return identity == tuple(_line(name, identity_of(place.file(name))) for name in names)

    def locate(self, reference: str, place: LocalPlace) -> Located:
        """Read config and headers.

        Raises:
            AdapterNotFound: the folder or a file is missing; the message says which.
            AdapterIncompatible: its weights are in a format that is not read.
            AdapterCorrupt: not the format that it claims to be.
            AdapterNotFound: a link leads out of the roots.
        """
        if not place.folder.is_dir():
            raise AdapterNotFound(f"the folder of adapter {reference!a} is missing")
        config, config_identity = read_whole(place.file(CONFIG_FILE), MAX_CONFIG_BYTES)
        identities = {CONFIG_FILE: config_identity}
        weight_map = None
        names = [WEIGHTS_FILE]
        if not place.has(WEIGHTS_FILE):
            if not place.has(SHARDS_FILE):
                raise no_weights(place.has)
            raw, identities[SHARDS_FILE] = read_whole(
                place.file(SHARDS_FILE), MAX_SHARDS_FILE_BYTES
            )
            weight_map = parse_shards(raw)
            names = sorted(set(weight_map.values()))
        headers = []
        for name in names:
            header, identities[name] = read_header(place.file(name), name, self._reads)
            headers.append(header)
        if weight_map is not None:
            check_shards(weight_map, headers)
        identity = tuple(_line(name, stat) for name, stat in identities.items())
        return Located(
            reference=reference,
            kind="local",
            config=config,
            headers=tuple(headers),
            identity=identity,
            open_file=_Opener(str(place.folder), place.roots, identity),
            is_on_disk=_always,
        )


def _always() -> bool:
    return True


def _line(name: str, identity: StatIdentity) -> str:
    return f"{name}:{':'.join(map(str, identity))}"

"""What the hub and S3 have in common: folders that can be asked, and read by range.

A remote adapter is found by a few small requests and downloaded when it is first loaded.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from loralane_server.adapters.formats.fields import CONFIG_FILE, MAX_CONFIG_BYTES
from loralane_server.adapters.formats.headers import (
    PREFIX_BYTES,
    FileHeader,
    header_end,
    parse_header,
)
from loralane_server.adapters.sources.downloads import Expected
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
from loralane_server.errors import AdapterCorrupt, AdapterNotFound, SourceUnavailable

#: For one request about metadata, from its start to its last byte.
METADATA_TIMEOUT_S: Final = 10.0
#: For all requests of one look together; a load's download has bounds of its own.
LOOK_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as it was when it was asked for; all that names its bytes."""

    name: str
    #: The commit on the hub, the version id on S3 ("" = not versioned).
    version: str
    etag: str
    size: int
    #: As in `Expected`; "sha256" or "md5" alone = the etag is that.
    checksum: str = ""

    @property
    def expected(self) -> Expected:
        """What a download must bring."""
        checksum = self.checksum
        if checksum in ("sha256", "md5"):
            bare = self.etag.strip('"')
            checksum = f"{checksum}:{bare}"
        return Expected(self.name, self.size, checksum)

    @property
    def identity(self) -> str:
        """One line for the digest."""
        return f"{self.name}:{self.version}:{self.etag}:{self.size}"


class RemoteFolder(Protocol):
    """One caller's view of one adapter's folder. May hold a token; kept until the files are here.

    Every method may raise `AdapterNotFound`, `AdapterForbidden` and `SourceUnavailable`.
    """

    def find(self, name: str) -> RemoteFile:
        """Ask for a file; also the check that this caller may read it."""

    def read(self, file: RemoteFile, begin: int, end: int) -> bytes:
        """The bytes `[begin, end)` of that version of a file, and no more."""

    def cached(self, file: RemoteFile) -> Path | None:
        """Where the local cache has the file, if it does; its bytes may be spoilt."""

    def is_intact(self, path: Path, file: RemoteFile) -> bool:
        """Whether a cached file has the right bytes."""

    def download(self, file: RemoteFile) -> Path:
        """Bring a file into the local cache, verified; what is wrong there is moved aside.

        Raises:
            AdapterCorrupt: the source sends wrong bytes.
        """

    def finish(self) -> None:
        """All files are here: forget what only downloads need."""


def locate_remote(
    reference: str,
    kind: Literal["hub", "s3"],
    folder: RemoteFolder,
    reads: Reads,
    clock: Callable[[], float],
) -> Located:
    """Ask for config and weights; read config and headers, no tensor byte.

    Raises:
        AdapterCorrupt, AdapterIncompatible: it is no adapter that we read.
        SourceUnavailable: it took too long in all.
        As the folder's methods.
    """
    look = _Look(folder, reads, clock)
    config = look.find(CONFIG_FILE)
    config_bytes = look.content(config, MAX_CONFIG_BYTES)
    found = [config]
    weight_map = None
    try:
        weights = [look.find(WEIGHTS_FILE)]
    except AdapterNotFound as exc:
        try:
            found.append(look.find(SHARDS_FILE))
        except AdapterNotFound:
            raise no_weights(look.has) from exc
        weight_map = parse_shards(look.content(found[1], MAX_SHARDS_FILE_BYTES))
        weights = [look.find(name) for name in sorted(set(weight_map.values()))]
    headers = tuple(look.header(file) for file in weights)
    if weight_map is not None:
        check_shards(weight_map, headers)
    opener = RemoteOpener(folder, (config, *weights))
    return Located(
        reference=reference,
        kind=kind,
        config=config_bytes,
        headers=headers,
        identity=(_identity(found + weights),),
        open_file=opener,
        is_on_disk=opener.is_on_disk,
    )


def _identity(files: Sequence[RemoteFile]) -> str:
    """One short line for all files: thousands of adapters are known."""
    lines = "\n".join(file.identity for file in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()


class _Look:
    """One look at a folder: its requests together have a bound, since each may be slow."""

    def __init__(self, folder: RemoteFolder, reads: Reads, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._reads = reads
        self._clock = clock
        self._until = clock() + LOOK_TIMEOUT_S

    def find(self, name: str) -> RemoteFile:
        self._check_time(name)
        return self._folder.find(name)

    def has(self, name: str) -> bool:
        try:
            self.find(name)
        except AdapterNotFound:
            return False
        return True

    def content(self, file: RemoteFile, limit: int) -> bytes:
        if file.size > limit:
            raise AdapterCorrupt(f"{file.name} is larger than {limit} bytes")
        path = self._folder.cached(file)
        if path is not None and self._folder.is_intact(path, file):
            return read_whole(path, limit)[0]
        return self._bytes(file, 0, file.size)

    def header(self, file: RemoteFile) -> FileHeader:
        path = self._folder.cached(file)
        if path is not None and path.stat().st_size == file.size:
            try:
                return read_header(path, file.name, self._reads)[0]
            except AdapterCorrupt:  # all of it is hashed only for cause: it may be large
                if self._folder.is_intact(path, file):
                    raise
        prefix = self._bytes(file, 0, min(PREFIX_BYTES, file.size))
        rest = self._bytes(file, len(prefix), header_end(prefix, file.size, file.name))
        self._reads.add_header(len(prefix) + len(rest))
        return parse_header(prefix + rest, file.size, file.name)

    def _bytes(self, file: RemoteFile, begin: int, end: int) -> bytes:
        if begin >= end:
            return b""
        self._check_time(file.name)
        return self._folder.read(file, begin, end)

    def _check_time(self, name: str) -> None:
        if self._clock() > self._until:
            raise SourceUnavailable(
                f"{name}: the source answers too slowly (over {LOOK_TIMEOUT_S:g} s in all)"
            )


class RemoteOpener:
    """Downloads an adapter's files when they are first opened, and verifies them once.

    One for each adapter that is known, so it holds little. The first of the files is the config:
    it comes with any other, since whoever finds weights in the cache later needs it too.
    """

    __slots__ = ("_files", "_folder", "_verified")

    def __init__(self, folder: RemoteFolder, files: tuple[RemoteFile, ...]) -> None:
        self._folder = folder
        self._files = files
        #: Files whose bytes were verified, with what names them on the disk; made when needed.
        self._verified: dict[str, tuple[Path, StatIdentity]] | None = None

    def __call__(self, name: str) -> Path:
        """The path of the config or a weights file, downloaded if need be.

        Raises:
            AdapterCorrupt: its bytes are not those that were resolved, downloaded twice.
            As the folder's methods.
        """
        config = self._files[0]
        path = self._verify(config)
        if name == config.name:
            return path
        return self._verify(next(file for file in self._files if file.name == name))

    def is_on_disk(self) -> bool:
        """Whether opening needs no network."""
        return all(self._folder.cached(file) for file in self._files)

    def _verify(self, file: RemoteFile) -> Path:
        known = (self._verified or {}).get(file.name)
        if known is not None and _is_still(known):
            return known[0]
        path = self._folder.cached(file)
        if path is None or not self._folder.is_intact(path, file):
            path = self._folder.download(file)
        self._verified = {**(self._verified or {}), file.name: (path, identity_of(path))}
        if len(self._verified) == len(self._files):
            self._folder.finish()
        return path


def _is_still(known: tuple[Path, StatIdentity]) -> bool:
    path, identity = known
    try:
        return identity_of(path) == identity
    except AdapterNotFound:  # somebody cleared the cache
        return False

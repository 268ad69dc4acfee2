"""Adapters in S3 or a store that speaks its protocol, below the prefixes that the operator named.

Read with the shard's own credentials: whoever may send requests may use all that lies below them.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loralane_server.adapters.sources.downloads import Downloads
from loralane_server.adapters.sources.files import Reads
from loralane_server.adapters.sources.located import Located
from loralane_server.adapters.sources.references import S3Place
from loralane_server.adapters.sources.remote import METADATA_TIMEOUT_S, RemoteFile, locate_remote
from loralane_server.adapters.sources.s3_client import ObjectReplaced, S3Client

CACHE = "the adapter cache (--adapter-cache)"


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where downloads are kept, and which store."""

    #: None = ~/.cache/loralane.
    cache_dir: Path | None = None
    #: None = what boto3 takes from the environment.
    endpoint: str | None = None
    #: For one metadata request, from its start to its last byte.
    timeout_s: float = METADATA_TIMEOUT_S


class S3Source:
    """Finds adapters in S3. Its identity for a file is key, ETag, version id and size."""

    def __init__(
        self, reads: Reads, settings: S3Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reads = reads
        self._clock = clock
        self._cache_dir = settings.cache_dir
        self.client = S3Client(settings.endpoint, settings.timeout_s)
        self.downloads = Downloads(CACHE, clock)

    def close(self) -> None:
        """Close idle connections."""
        self.client.close()

    def locate(self, reference: str, place: S3Place) -> Located:
        """Ask for config and weights; read config and headers.

        An adapter that is replaced meanwhile is looked at once more.

        Raises:
            AdapterNotFound: no such bucket or object.
            AdapterForbidden: this shard may not read it.
            SourceUnavailable: the store does not answer in time.
            AdapterCorrupt, AdapterIncompatible: it is no adapter that we read.
        """
        folder = _S3Folder(self, place)
        try:
            return locate_remote(reference, "s3", folder, self._reads, self._clock)
        except ObjectReplaced:
            return locate_remote(reference, "s3", folder, self._reads, self._clock)

    def cache_file(self, place: S3Place, file: RemoteFile) -> Path:
        """Where a version of an object is kept, whether it is there or not."""
        identity = f"{place}/{file.identity}".encode("utf-8", "surrogatepass")
        name = f"{hashlib.sha256(identity).hexdigest()}.safetensors"
        folder = self._cache_dir or Path.home() / ".cache" / "loralane"
        return folder / "s3" / place.bucket / name


class _S3Folder:
    """One adapter's keys. Nothing is secret here: the credentials are the client's."""

    __slots__ = ("_place", "_source")

    def __init__(self, source: S3Source, place: S3Place) -> None:
        self._source = source
        self._place = place

    def find(self, name: str) -> RemoteFile:
        return self._source.client.head(self._place, name)

    def read(self, file: RemoteFile, begin: int, end: int) -> bytes:
        return self._source.client.read(self._place, file, begin, end)

    def cached(self, file: RemoteFile) -> Path | None:
        path = self._source.cache_file(self._place, file)
        return path if path.is_file() else None

    def is_intact(self, path: Path, file: RemoteFile) -> bool:
        return self._source.downloads.is_intact(path, file.expected)

    def download(self, file: RemoteFile) -> Path:
        path = self._source.cache_file(self._place, file)
        self._source.downloads.ensure(path, file.expected, self._reader(file))
        return path

    def finish(self) -> None:
        """Nothing is held for downloads alone."""

    def _reader(self, file: RemoteFile) -> Callable[[int], Iterator[bytes]]:
        client, place = self._source.client, self._place
        return lambda begin: client.stream(place, file, begin, file.size)
